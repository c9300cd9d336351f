# SPDX-License-Identifier: Apache-2.0
"""The command `train`: a preset's name, then settings to override.

Owns its help and its errors. Does not own settings and presets (`training/settings/`),
nor the run (`training/session.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

from hetjax.cli.command import check_inputs, main_of
from hetjax.cli.options import HELP, parse_options, preset_first, preset_lines
from hetjax.cli.process import signals_say
from hetjax.data.settings import ingredients
from hetjax.models.named import TypedName
from hetjax.report.progress import working
from hetjax.training.directory.rundir import check_start
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset

_PROGRAM = "python -m hetjax.train"
_COMMON = (
    *("run_dir", "steps", "cluster", "plan", "launcher", "global_batch", "seq_len"),
    *("data.path", "optimizer.learning_rate", "checkpoint.every"),
)
_GOES_ON = "goes on from the last checkpoint"


def train(arguments: Sequence[str]) -> int:
    """Train as the arguments say; the exit code is 0, or 4 if the run was stopped."""
    config, preset = parse(arguments)
    check_config(config)
    check_inputs(
        cluster=config.cluster,
        plan=config.plan,
        profile=config.profile,
        texts=ingredients(config.data).given,
        model=config.model,
    )
    check_start(config)
    with working("starting"):  # JAX takes seconds to import
        from hetjax.training.run_model import run_model
        from hetjax.training.session import run
    model = run_model(config)
    signals_say(f"at once; the same command {_GOES_ON}")
    return run(config, preset, model)


def parse(arguments: Sequence[str]) -> tuple[RunConfig, Preset]:
    """Return the settings and the preset that they started from.

    BadInput for an unknown preset or option and for a value of the wrong type.
    SystemExit after help, which is printed.
    """
    if not arguments or arguments[0] in HELP:
        print(_help())
        raise SystemExit(0 if arguments else 2)
    name, chosen, rest = preset_first(arguments, program=_PROGRAM)
    config = parse_options(
        chosen.config,
        rest,
        program=f"{_PROGRAM} {name}",
        description=chosen.summary,
        common=_COMMON,
    )
    return replace(config, model=TypedName(config.model)), chosen


def _help() -> str:
    """What can be trained, a line each."""
    return f"""usage: {_PROGRAM} PRESET [options]

Train a model, or go on with the run that is in its --run-dir.

presets:
{preset_lines()}

In place of a preset: a folder of Hugging Face, whose weights and tokenizer the run
begins with; a config.json, or a TOML file with its fields; package.module:function.

{_PROGRAM} PRESET --help lists the usual options and their values, --help-all all.
Exit codes: 0 done, 1 failed, 2 bad input, 3 no plan fits in memory,
4 stopped with state saved."""


main = main_of(train, _GOES_ON)
