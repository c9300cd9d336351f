# SPDX-License-Identifier: Apache-2.0
"""The command line of `simulate`: a plan or a preset in, a predicted step out.

Owns its options, where plan, model and cluster come from, and the files that it
writes. Does not own the costs (`planner/costing.py`), what is shown
(`report/prediction.py`) nor the simulation itself (`schedule/`).
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hetjax.cli.outputs import check_folders, writing
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.record import did_you_mean
from hetjax.costs.plan_costs import costs_of, device_kinds, usd_per_hour
from hetjax.costs.profile import Profile, check_profile
from hetjax.costs.profile_files import read_profile
from hetjax.costs.runs import tied_holders
from hetjax.costs.static import OptimizerInit, adam_state
from hetjax.errors import BadInput
from hetjax.models.model import Model
from hetjax.models.presets import model_preset
from hetjax.planner.costing import (
    check_measured,
    check_times,
    compute_dtype,
    times_from,
)
from hetjax.plans.files import read_plan, write_plan
from hetjax.plans.plan import Plan
from hetjax.report.picture import check_picture
from hetjax.report.prediction import (
    check_finite,
    headline,
    tables,
    values,
    with_prediction,
)
from hetjax.report.progress import working
from hetjax.report.timeline import timeline_picture
from hetjax.schedule.named import with_schedule
from hetjax.schedule.predicted import Predicted, predict
from hetjax.schedule.spans import simulated_spans
from hetjax.schedule.trace import Span, perfetto
from hetjax.training.optimizer import optimizer
from hetjax.training.options import parse_options
from hetjax.training.placement import check_plan, choose_plan, cluster_of
from hetjax.training.presets import PRESETS, preset

PROGRAM = "python -m hetjax.simulate"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """The options of `simulate`."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """Plan file, or the name of a preset for the plan that it would train with."""
    cluster: Path | None = None
    """Cluster file, or lab or tiny; else the preset's, else the devices here."""
    model: str | None = None
    """Name of a model preset; else the plan's."""
    profile: Path | None = None
    """Measured times, from python -m hetjax.profile; else times are estimated."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What is computed in; else the profile's, the preset's, or bfloat16."""
    schedule: str | None = None
    """Another schedule than the plan's: gpipe, 1f1b, h1f1b (launch-aheads that suit
    stages and links), harp (those of HARP's thresholds), interleaved, zero-bubble, or
    searched (the fastest that is found)."""
    trace: Path | None = None
    """Write the timeline here, to open in ui.perfetto.dev."""
    plot: Path | None = None
    """Draw the timeline here: .png, .pdf or .svg."""
    output: Path | None = None
    """Write the plan as simulated here, the prediction in it."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object in place of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """What is simulated: a valid plan with its model, on a cluster.

    `dtype` and the optimizer's `init` are those of training, where a preset tells.
    """

    plan: Plan
    model: Model
    cluster: Cluster
    dtype: str = "bfloat16"
    init: OptimizerInit = adam_state


def simulate_command(arguments: Sequence[str]) -> None:
    """Simulate as the arguments say; print and write what they ask for.

    BadInput before anything is written, NoFeasiblePlan for a plan over memory.
    """
    if not arguments:
        raise BadInput(
            got="no plan to simulate",
            allowed=f"{PROGRAM} PLAN [options], with a plan file or a preset",
            fix=f"{PROGRAM} tiny, say; {PROGRAM} --help tells more",
        )
    default = SimulateOptions(plan=tyro.MISSING)
    options = parse_options(default, arguments, program=PROGRAM, description=_HELP)
    _check_outputs(options)
    with working("simulating", quiet=options.json) as told:
        predicted = _predicted(options, told)
    if options.json:
        print(json.dumps(values(predicted), allow_nan=False))
    else:
        print(tables(predicted))
    with writing("--trace", "--plot", "--output"):
        for line in _write(options, predicted):
            if not options.json:
                print(line)


def _predicted(options: SimulateOptions, told: Callable[[str], None]) -> Predicted:
    """Simulate one step of what the options name."""
    profile = None if options.profile is None else read_profile(options.profile)
    subject = _subject(options, profile, told)
    plan, model, cluster = subject.plan, subject.model, subject.cluster
    dtype = compute_dtype(options.dtype, profile, subject.dtype)
    if profile is not None:
        check_profile(profile, model.name, plan.seq_len, len(model.layers))
        check_measured(profile, device_kinds(plan, cluster), "plan")
    costs = costs_of(plan, model, cluster, profile, dtype=dtype, optimizer=subject.init)
    check_times(costs)
    tied = tied_holders(plan, model)
    if options.schedule is not None:
        plan = with_schedule(plan, options.schedule, costs, tied)
        check_plan(plan, model, cluster, f"--schedule {options.schedule}")
    predicted = predict(
        plan,
        costs,
        tied,
        times_from=times_from(plan, cluster, dtype, profile, options.profile, tied),
        usd_per_hour=usd_per_hour(plan, cluster),
    )
    check_finite(predicted)
    return predicted


def _subject(
    options: SimulateOptions, profile: Profile | None, told: Callable[[str], None]
) -> _Subject:
    """Read what the options name, and check that it fits together."""
    if options.plan in PRESETS:
        return _of_preset(options, profile, told)
    path = Path(options.plan)
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        shown = options.plan if len(options.plan) < 80 else f"{options.plan[:77]}..."
        raise BadInput(
            got=f"{shown!r}, which is neither a file nor a preset",
            allowed=f"a plan file, or a preset of {', '.join(PRESETS)}",
            fix=did_you_mean(options.plan, list(PRESETS)),
        )
    plan = read_plan(path)
    model = model_preset(options.model or plan.model)
    plan = replace(plan, model=model.name)
    cluster = cluster_of(options.cluster)
    check_plan(plan, model, cluster, f"plan file {options.plan!r}")
    return _Subject(plan=plan, model=model, cluster=cluster)


def _of_preset(
    options: SimulateOptions, profile: Profile | None, told: Callable[[str], None]
) -> _Subject:
    """Take the preset's plan, else plan with the times that are simulated with."""
    chosen = preset(options.plan)
    model = model_preset(options.model or chosen.config.model)
    dtype = compute_dtype(options.dtype, profile, chosen.config.dtype)
    config = replace(chosen.config, dtype=dtype, profile=options.profile)
    chosen = replace(chosen, config=config)
    config = replace(config, model=model.name)
    cluster = cluster_of(options.cluster or chosen.cluster)
    plan = choose_plan(config, model, cluster, chosen, None, told).plan
    init = optimizer(config.optimizer, config.steps).init
    return _Subject(
        plan=plan, model=model, cluster=cluster, dtype=config.dtype, init=init
    )


def _check_outputs(options: SimulateOptions) -> None:
    """Refuse what could not be written before anything is computed."""
    check_folders(
        {
            "--trace": options.trace,
            "--plot": options.plot,
            "--output": options.output,
        }
    )
    if options.plot is not None:
        check_picture(options.plot)


def _write(options: SimulateOptions, predicted: Predicted) -> Iterator[str]:
    """Write the files that were asked for; yield a line on each."""
    plan, costs = predicted.plan, predicted.costs
    drawn = options.trace is not None or options.plot is not None
    spans = _spans(predicted) if drawn else []
    if options.trace is not None:
        options.trace.write_text(json.dumps(perfetto(spans)))
        yield f"trace: {options.trace} (open it at ui.perfetto.dev)"
    if options.plot is not None:
        title = f"{plan.model}, {plan.schedule}: {headline(predicted)}"
        timeline_picture(spans, plan, costs, title).save(options.plot)
        yield f"picture: {options.plot}"
    if options.output is not None:
        write_plan(options.output, with_prediction(predicted))
        yield f"plan: {options.output}"


def _spans(predicted: Predicted) -> list[Span]:
    return simulated_spans(
        predicted.simulation, predicted.plan, predicted.costs, predicted.tied
    )
