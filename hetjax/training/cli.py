# SPDX-License-Identifier: Apache-2.0
"""The command line of `train`: a preset's name, then settings to override.

Owns its help and its errors. Does not own settings (`config.py`) nor presets
(`presets.py`).
"""

import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO

import tyro

from hetjax.cluster.record import did_you_mean
from hetjax.errors import BadInput
from hetjax.training.config import RunConfig, option
from hetjax.training.config_files import flat_values
from hetjax.training.presets import PRESETS, Preset, preset

_PROGRAM = "python -m hetjax.train"


def parse(arguments: Sequence[str]) -> tuple[RunConfig, Preset]:
    """Return the settings and the preset that they started from.

    BadInput for an unknown preset or option and for a value of the wrong type.
    SystemExit after help, which is printed.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(presets_help())
        raise SystemExit(0 if arguments else 2)
    name, *rest = arguments
    if name.startswith("-"):
        raise BadInput(
            got=f"{name!r} where the preset's name comes first",
            allowed=f"{_PROGRAM} PRESET [options], with a preset of "
            f"{', '.join(PRESETS)}",
            fix=f"{_PROGRAM} tiny {' '.join(arguments)}",
        )
    chosen = preset(name)
    told = StringIO()
    try:
        with redirect_stderr(told):
            config, unknown = tyro.cli(
                RunConfig,
                prog=f"{_PROGRAM} {name}",
                description=chosen.summary,
                args=rest,
                default=chosen.config,
                return_unknown_args=True,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as ended:
        if not ended.code:
            raise
        raise _wrong_value(told.getvalue(), name, rest) from ended
    if unknown:
        raise _unknown(unknown[0], chosen.config)
    return config, chosen


def presets_help() -> str:
    """Return the text of `--help`: what can be trained, a line each."""
    width = max(map(len, PRESETS))
    lines = [f"  {name:<{width}}  {make().summary}" for name, make in PRESETS.items()]
    return "\n".join(
        [
            f"usage: {_PROGRAM} PRESET [options]",
            "",
            "Train a model, or go on with the run that is in its --run-dir.",
            "",
            "presets:",
            *lines,
            "",
            f"{_PROGRAM} PRESET --help lists the options and their values.",
            "Exit codes: 0 done, 1 failed, 2 bad input, 4 stopped with state saved.",
        ]
    )


def _wrong_value(box: str, preset_name: str, arguments: Sequence[str]) -> BadInput:
    """Retell the frame that Tyro draws: a title, the problem, a rule, help texts."""
    problem = re.split(r"\u2500{3,}", box.partition("\n")[2])[0]
    problem = " ".join(re.sub(r"[\u2500-\u257f]", " ", problem).split())
    named = re.search(r"--[\w.-]*\w", problem)
    return BadInput(
        got=_typed(named.group(), arguments) if named else " ".join(arguments),
        allowed=problem,
        fix=f"{_PROGRAM} {preset_name} --help",
    )


def _typed(name: str, arguments: Sequence[str]) -> str:
    """Return the option with its value, as it was typed."""
    for i, argument in enumerate(arguments):
        if argument.partition("=")[0].replace("_", "-") == name:
            has_value = "=" in argument or i + 1 == len(arguments)
            return argument if has_value else f"{argument} {arguments[i + 1]}"
    return name


def _unknown(argument: str, config: RunConfig) -> BadInput:
    options = [option(name) for name in flat_values(config)]
    typed = argument.partition("=")[0]
    return BadInput(
        got=f"unknown option {typed!r}",
        allowed=", ".join(options),
        fix=did_you_mean(typed.replace("_", "-"), options)
        if typed.startswith("-")
        else f"leave {typed!r} out, or write the option that it belongs to before it",
    )
