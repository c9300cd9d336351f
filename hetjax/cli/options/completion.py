# SPDX-License-Identifier: Apache-2.0
"""What lets a shell complete commands, presets and options: `hetjax completion bash`.

Owns the script, which holds all words, so that completing starts no Python. Does not
own the words: they are those of `--help-all`.
"""

import re
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO

from hetjax.errors import BadInput
from hetjax.training.settings.presets import PRESETS

_HELP = "--help-all"
_WITH_PRESET = ("plan", "profile", "train")
_BEFORE = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}


def completion(commands: Collection[str], given: Sequence[str]) -> str:
    """Return the script for the shell that is given; BadInput for another."""
    if len(given) != 1 or given[0] not in _BEFORE:
        raise BadInput(
            got=f"completion {' '.join(given)}".strip(),
            allowed=f"one of {', '.join(_BEFORE)}",
            fix="hetjax completion bash",
        )
    cases = "\n".join(f'    {name}) words="{_words(name)}" ;;' for name in commands)
    return f"""{_BEFORE[given[0]]}_hetjax() {{
  local words="{" ".join(commands)}"
  ((COMP_CWORD > 1)) && case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hetjax hetjax"""


def _words(name: str) -> str:
    """Options of a command, and the presets where one comes first."""
    presets = [*PRESETS] if name in (*_WITH_PRESET, "simulate") else []
    first = presets[:1] if name in _WITH_PRESET else []
    help_ = StringIO()
    with redirect_stdout(help_), suppress(SystemExit):
        import_module(f"hetjax.cli.{name}").main([*first, _HELP])
    rows = (line.strip("\u2502| ") for line in help_.getvalue().splitlines())
    named = (row.split("  ")[0] for row in rows if row.startswith("-"))
    options = [_HELP, *re.findall(r"--[a-z][\w.-]*", " ".join(named))]
    return " ".join(dict.fromkeys([*presets, *sorted(options)]))
