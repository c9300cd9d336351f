# SPDX-License-Identifier: Apache-2.0
"""Writes completion scripts of commands, presets and options: `hetjax completion bash`.

Owns the script, which holds all words, so that completing starts no Python. Does not
own the words: they are those of `--help-all`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO

from hetjax.errors import BadInput
from hetjax.training.settings.presets import PRESETS

_HELP = "--help-all"
_WITH_PRESET = ("plan", "profile", "train")


def completion(commands: Collection[str], given: Sequence[str]) -> str:
    """Return the script for the given shell. Raises BadInput for an unknown one."""
    if len(given) != 1 or given[0] not in _SCRIPTS:
        raise BadInput(
            got=f"completion {' '.join(given)}".strip(),
            allowed=f"one of {', '.join(_SCRIPTS)}",
            fix="hetjax completion bash",
        )
    return _SCRIPTS[given[0]]({name: _words(name) for name in commands})


def _bash(words: Mapping[str, str]) -> str:
    cases = "\n".join(f'    {name}) words="{of}" ;;' for name, of in words.items())
    return f"""_hetjax() {{
  local words="{" ".join(words)}"
  ((COMP_CWORD > 1)) && case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hetjax hetjax"""


def _zsh(words: Mapping[str, str]) -> str:
    """Return the script of bash, which zsh can run, whether it has `compdef` or not."""
    return f"""(( $+functions[compdef] )) || {{ autoload -U compinit && compinit -i; }}
autoload -U +X bashcompinit && bashcompinit
{_bash(words)}"""


def _fish(words: Mapping[str, str]) -> str:
    """Return a script whose one function finds the words, as in the script of bash."""
    cases = "\n".join(
        f"    case {name}\n      string split -- ' ' '{of}'"
        for name, of in words.items()
    )
    return f"""function __hetjax_words
  set -l typed (commandline -opc)
  if not set -q typed[2]
    string split -- ' ' '{" ".join(words)}'
    return
  end
  switch $typed[2]
{cases}
  end
end
complete -c hetjax -a '(__hetjax_words)'
complete -c hetjax -f -n 'test (count (commandline -opc)) = 1'"""


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def _words(name: str) -> str:
    """Return the options of a command, and the presets if one can be its first word."""
    presets = [*PRESETS] if name in (*_WITH_PRESET, "simulate") else []
    first = presets[:1] if name in _WITH_PRESET else []
    help_ = StringIO()
    with redirect_stdout(help_), suppress(SystemExit):
        import_module(f"hetjax.cli.{name}").main([*first, _HELP])
    rows = (line.strip("\u2502| ") for line in help_.getvalue().splitlines())
    named = (row.split("  ")[0] for row in rows if row.startswith("-"))
    options = [_HELP, *re.findall(r"--[a-z][\w.-]*", " ".join(named))]
    return " ".join(dict.fromkeys([*presets, *sorted(options)]))
