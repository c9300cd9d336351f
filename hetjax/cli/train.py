# SPDX-License-Identifier: Apache-2.0
"""The command `train`: trains with a preset and settings that override it.

Owns its help and its errors. Does not own settings and presets (`training/settings/`),
nor the run (`training/session.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

import tyro

from hetjax.cli.command import check_inputs, main_of
from hetjax.cli.options.options import HELP, parse_options, preset_first, preset_lines
from hetjax.cli.process import end_at_once, signals_say
from hetjax.data.settings import ingredients
from hetjax.launchers.reprovisioning import split_command
from hetjax.models.named import TypedName
from hetjax.report.progress import working
from hetjax.training.directory.rundir import check_start
from hetjax.training.observers.dispatch import has_busy_observers
from hetjax.training.observers.loading import observer_sources
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset
from hetjax.training.settings.run_settings import with_absolute_init

_PROGRAM = "python -m hetjax.train"
_COMMON = (
    *("run_dir", "steps", "cluster", "plan", "launcher", "global_batch", "seq_len"),
    *("data.path", "optimizer.learning_rate", "checkpoint.every"),
)
_GOES_ON = "resumes from the last checkpoint, if there is one"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions(RunConfig):
    """The settings of a run, and options that a run does not store with them."""

    observer: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Observer of the run: tensorboard, wandb, prometheus, or your own class or
    function, package.module:name; repeat it for more. Give it again when the run
    resumes."""
    reprovision: str | None = None
    """Command that requests machines, run without a shell while nodes of the cluster
    file are missing; it reads these as JSON from standard input. Give it again when the
    run resumes."""


def train(arguments: Sequence[str]) -> int:
    """Train as the arguments say; return 0, or 4 if the run was stopped."""
    options, preset = _parsed(arguments)
    config = _settings(options)
    check_config(config)
    check_inputs(
        cluster=config.cluster,
        plan=config.plan,
        profile=config.profile,
        calibration=config.calibration,
        texts=ingredients(config.data).given,
        model=config.model,
    )
    check_start(config)
    observers = observer_sources(options.observer)
    reprovision = split_command(options.reprovision, config.launcher)
    with working("starting"):  # JAX takes seconds to import
        from hetjax.training.run_model import run_model
        from hetjax.training.session import run
    model = run_model(config)
    signals_say(f"at once; the same command {_GOES_ON}")
    try:
        return run(config, preset, model, observers, reprovision)
    finally:
        if has_busy_observers():
            end_at_once()


def parse(arguments: Sequence[str]) -> tuple[RunConfig, Preset]:
    """Return the settings and the preset that they started from.

    Raises as `parse_options` does.
    """
    options, chosen = _parsed(arguments)
    return _settings(options), chosen


def _settings(options: TrainOptions) -> RunConfig:
    """Return the settings that the run stores; the model's name counts as typed."""
    values = {each.name: getattr(options, each.name) for each in fields(RunConfig)}
    config = replace(RunConfig(**values), model=TypedName(options.model))
    return with_absolute_init(config)


def _parsed(arguments: Sequence[str]) -> tuple[TrainOptions, Preset]:
    """Return the options, and the preset that they started from.

    Raises BadInput for an unknown preset or option and for a value of the wrong type,
    SystemExit after it has printed help.
    """
    if not arguments or arguments[0] in HELP:
        print(_help())
        raise SystemExit(0 if arguments else 2)
    name, chosen, rest = preset_first(arguments, program=_PROGRAM)
    config = chosen.config
    default = {each.name: getattr(config, each.name) for each in fields(RunConfig)}
    options = parse_options(
        TrainOptions(**default),
        rest,
        program=f"{_PROGRAM} {name}",
        description=chosen.summary,
        common=_COMMON,
    )
    return options, chosen


def _help() -> str:
    """Return the help: what can be trained, one line each."""
    return f"""usage: {_PROGRAM} PRESET [options]

Train a model, or resume the run in its --run-dir.

presets:
{preset_lines()}

In place of a preset: a Hugging Face folder, whose weights and tokenizer the run starts
with; a config.json, or a TOML file with its fields; package.module:function.

{_PROGRAM} PRESET --help lists the usual options and their values; --help-all
lists every option.
Exit codes: 0 done, 1 failed, 2 bad input, 3 no plan fits in memory,
4 stopped with state saved, 143 ended by SIGTERM before the first step."""


main = main_of(train, _GOES_ON)
