# SPDX-License-Identifier: Apache-2.0
"""The command `simulate`: predicts a step of a plan or of a preset.

Owns its options and its help, and the files that it writes. Does not own the simulation
(`api/simulating.py`) nor the display (`report/`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from hetjax.cli.command import check_inputs, check_outputs, main_of, write_outputs
from hetjax.cli.options.options import nothing_given, parse_options
from hetjax.costs.network.wire_bytes import GradientWire
from hetjax.models.finetuning import LoraConfig, TrainConfig
from hetjax.plans.attention import Attention
from hetjax.plans.plan_files import write_plan
from hetjax.plans.precision import Dtype
from hetjax.plans.schedules import FITTED, SCHEDULES
from hetjax.report.progress import working
from hetjax.training.settings.presets import PRESETS, check_plan_or_preset

_PROGRAM = "python -m hetjax.simulate"
_COMMON = (
    *("plan", "cluster", "model", "profile", "schedule", "trace", "plot", "output"),
    "json",
)
_HELP = """Predict one training step of a plan before it runs: time, bubble, memory.

Simulates the programs that training would run. Times come from a measured profile, or
are estimated from what the devices can do.

The plan that a preset would train with:
  python -m hetjax.simulate tiny

A plan file, with a timeline to look at and one for a paper:
  python -m hetjax.simulate plan.json --cluster lab --trace t.json --plot t.pdf

Launch-aheads that suit slow links, kept as a plan to train with:
  python -m hetjax.simulate plan.json --cluster lab --schedule h1f1b
      --output fitted.json

Exit codes: 0 done, 2 bad input, 3 the plan needs more memory than there is."""


_SCHEDULES = {name: row.summary for name, row in SCHEDULES.items()} | FITTED
_SCHEDULE_HELP = "Another schedule than the plan's. " + ". ".join(
    f"{name}: {summary}" for name, summary in _SCHEDULES.items()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """The options of `simulate`."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """Plan file, or the name of a preset for the plan that it would train with."""
    cluster: Path | None = None
    """Cluster file, or lab, office or tiny; None: the preset's cluster, or the devices
    found here."""
    model: str | None = None
    """The model: a preset; a Hugging Face folder or config.json; or a function that
    returns a model, package.module:function. None: the plan's model."""
    profile: Path | None = None
    """Measured times, from python -m hetjax.profile; None: estimate the times."""
    compiled: Path | None = None
    """Memory that the compiler reported for a run, its compiled.json; None: estimate
    it."""
    calibration: Annotated[str | None, tyro.conf.arg(metavar="none|FILE")] = None
    """Measured speeds: a run's calibration.json, or the output of NCCL-tests. none:
    speeds as modelled. By default, what earlier runs measured."""
    dtype: Dtype | None = None
    """Precision of computation; best: the best that each kind of device has. None: that
    of the plan, the profile or the preset, otherwise best."""
    attention: Attention | None = None
    """How to compute attention; best: with each kind's own kernel, if it has one. None:
    as in the plan or the preset, otherwise best."""
    gradient_wire: GradientWire = "float32"
    """Precision of gradients between workers; bfloat16 halves the bytes but rounds."""
    schedule: Annotated[str | None, tyro.conf.arg(help=_SCHEDULE_HELP)] = None
    trace: Path | None = None
    """Write the timeline here, to open in ui.perfetto.dev."""
    plot: Path | None = None
    """Draw the timeline here: .png, .pdf or .svg."""
    output: Path | None = None
    """Write the simulated plan here, with its prediction."""
    allow_model_code: str | None = None
    """Function, package.module:function, that may be called if the plan file names it
    as the model; no other function is called."""
    json: bool = False
    """Print one JSON object instead of tables."""
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


def simulate(arguments: Sequence[str]) -> None:
    """Simulate as the arguments say; print and write the results.

    Raises BadInput before anything is written, NoFeasiblePlan for a plan over memory.
    """
    options = parse(arguments)
    check_plan_or_preset(options.plan)
    file = None if options.plan in PRESETS else Path(options.plan)
    check_inputs(
        cluster=options.cluster,
        plan=file,
        profile=options.profile,
        calibration=options.calibration,
        model=options.model,
    )
    check_outputs(options, "trace", "plot", "output")
    with working("starting", quiet=options.json):  # JAX takes seconds to import
        from hetjax.api.simulating import simulate_plan
    step = simulate_plan(
        options.plan,
        model=options.model,
        cluster=options.cluster,
        profile=options.profile,
        compiled=options.compiled,
        calibration=options.calibration,
        allow_model_code=options.allow_model_code,
        dtype=options.dtype,
        attention=options.attention,
        schedule=options.schedule,
        gradient_wire=options.gradient_wire,
        train=options.train,
        lora=options.lora,
        quiet=options.json,
    )
    result = json.dumps(step.values(), allow_nan=False) if options.json else step
    trace = "trace: {} (open it at ui.perfetto.dev)"
    write_outputs(
        options,
        {
            "trace": (trace, step.write_trace),
            "plot": ("picture: {}", lambda path: step.draw().save(path)),
            "output": ("plan: {}", lambda path: write_plan(path, step.plan)),
        },
        lambda: print(result),
    )


def parse(arguments: Sequence[str]) -> SimulateOptions:
    """Return the options. Raises BadInput for invalid ones, SystemExit after help."""
    if not arguments:
        raise nothing_given(
            _PROGRAM,
            got="no plan to simulate",
            allowed=f"{_PROGRAM} PLAN [options], with a plan file or a preset",
        )
    return parse_options(
        SimulateOptions(plan=tyro.MISSING),
        arguments,
        program=_PROGRAM,
        description=_HELP,
        markers=(tyro.conf.FlagCreatePairsOff,),
        common=_COMMON,
    )


main = main_of(simulate)
