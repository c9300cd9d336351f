# SPDX-License-Identifier: Apache-2.0
"""The command line of `simulate`: a plan or a preset in, a predicted step out.

Owns its options, where plan, model, cluster and times come from, and the files that
it writes. Does not own what is shown (`prediction.py`) nor the simulation itself
(`schedule/`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import jax
import tyro

from hetjax.cluster.cluster import Cluster, Link
from hetjax.cluster.discovery import discover
from hetjax.cluster.files import load_cluster
from hetjax.cluster.record import did_you_mean
from hetjax.costs.analytic import analytic_costs
from hetjax.costs.costs import Costs
from hetjax.costs.profile import Profile, check_profile
from hetjax.costs.profile_files import read_profile
from hetjax.errors import BadInput
from hetjax.models.counts import tensor_sizes
from hetjax.models.model import Model
from hetjax.models.presets import model_preset
from hetjax.plans.files import read_plan, write_plan
from hetjax.plans.plan import Plan
from hetjax.plans.validation import validate_plan
from hetjax.runtime.layout import Layout
from hetjax.schedule.lower import lower
from hetjax.schedule.memory import check_memory, memory_uses
from hetjax.schedule.named import with_schedule
from hetjax.schedule.plot import check_picture, write_picture
from hetjax.schedule.simulator import simulate
from hetjax.schedule.spans import simulated_spans
from hetjax.schedule.trace import Span, perfetto
from hetjax.training.options import parse_options
from hetjax.training.placement import choose_plan
from hetjax.training.prediction import (
    Predicted,
    headline,
    tables,
    values,
    with_prediction,
)
from hetjax.training.presets import PRESETS, preset

PROGRAM = "python -m hetjax.simulate"
_HELP = """Predict one training step of a plan before it runs: time, bubble, memory.

Simulates the programs that training would run. Times come from a measured profile, or
are estimated from what the devices can do.

The plan that a preset would train with:
  python -m hetjax.simulate tiny

A plan file, with a timeline to look at and one for a paper:
  python -m hetjax.simulate plan.json --cluster lab.toml --trace t.json --plot t.pdf

Launch-aheads that suit slow links, kept as a plan to train with:
  python -m hetjax.simulate plan.json --cluster lab.toml --schedule h1f1b
      --output fitted.json

Exit codes: 0 done, 2 bad input, 3 the plan needs more memory than there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """The options of `simulate`."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """Plan file, or the name of a preset for the plan that it would train with."""
    cluster: Path | None = None
    """Cluster file; else the preset's, else the devices that are here."""
    model: str | None = None
    """Name of a model preset; else the plan's."""
    profile: Path | None = None
    """Measured times, from python -m hetjax.profile; else times are estimated."""
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
    """What is simulated: a valid plan with its model, on a cluster."""

    plan: Plan
    model: Model
    cluster: Cluster
    dtype: str


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
    predicted = predict(options)
    if options.json:
        print(json.dumps(values(predicted)))
    else:
        print(tables(predicted))
    try:
        for line in _write(options, predicted):
            if not options.json:
                print(line)
    except OSError as error:
        raise BadInput(
            got=f"{error.filename}: {error.strerror}",
            allowed="files that can be written for --trace, --plot and --output",
            fix="give another path",
        ) from error


def predict(options: SimulateOptions) -> Predicted:
    """Simulate one step of what the options name."""
    profile = None if options.profile is None else read_profile(options.profile)
    subject = _subject(options)
    plan, model, cluster = subject.plan, subject.model, subject.cluster
    costs = costs_of(plan, model, cluster, profile, dtype=subject.dtype)
    tied = Layout(plan, model).tied
    if options.schedule is not None:
        plan = with_schedule(plan, options.schedule, costs, tied)
        _validate(plan, model, cluster, f"--schedule {options.schedule}")
    programs = lower(plan, tied)
    memory = memory_uses(programs, plan, costs)
    check_memory(memory, plan, costs)
    return Predicted(
        plan=plan,
        costs=costs,
        simulation=simulate(programs, plan, costs),
        memory=memory,
        tied=tied,
        times_from=f"estimated from the device catalogue, {subject.dtype}"
        if profile is None
        else _measured_where(profile, options.profile, _devices(plan, cluster)),
    )


def costs_of(
    plan: Plan, model: Model, cluster: Cluster, profile: Profile | None, *, dtype: str
) -> Costs:
    """Return what the plan costs: measured where the profile knows the device.

    `dtype` is that of compute where there is no profile. BadInput for an unknown
    device, an unreachable link, a profile of another model or of other devices only.
    """
    if profile is None:
        return analytic_costs(plan, model, cluster, dtype=dtype)
    check_profile(profile, model.name, plan.seq_len, len(model.layers))
    devices = _devices(plan, cluster)
    if not devices & _measured(profile):
        raise BadInput(
            got=f"a profile of {', '.join(sorted(_measured(profile)))}",
            allowed=f"one of the plan's devices: {', '.join(sorted(devices))}",
            fix=f"measure there: python -m hetjax.profile {model.name}, or leave "
            "--profile out",
        )
    cluster = with_measured_links(cluster, profile)
    return analytic_costs(plan, model, cluster, dtype=profile.dtype, profile=profile)


def with_measured_links(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with a link for each pair of its nodes that was measured.

    Of two directions the slower counts for both.
    """
    nodes = {node.name for node in cluster.nodes}
    links = {frozenset(link.between): link for link in cluster.links}
    # the slowest come last, and stay
    for found in sorted(profile.links, key=lambda f: -f.bandwidth_gbit_per_s):
        ends = frozenset(found.between)
        if len(ends) == 2 and ends <= nodes:
            links[ends] = Link(
                between=found.between,
                bandwidth_gbit_per_s=found.bandwidth_gbit_per_s,
                latency_ms=found.latency_ms,
            )
    return replace(cluster, links=tuple(links.values()))


def _devices(plan: Plan, cluster: Cluster) -> set[str]:
    used = {stage.node for _, _, stage in plan.stages()}
    return {node.device for node in cluster.nodes if node.name in used}


def _measured(profile: Profile) -> set[str]:
    return {measurement.device for measurement in profile.measurements}


def _measured_where(profile: Profile, path: Path | None, devices: set[str]) -> str:
    """Say for people which times are measured."""
    missing = sorted(devices - _measured(profile))
    rest = f"; {', '.join(missing)} not in it, estimated" if missing else ""
    return f"measured, {path}{rest}"


def _subject(options: SimulateOptions) -> _Subject:
    """Read what the options name, and check that it fits together."""
    if options.plan in PRESETS:
        return _of_preset(options)
    path = Path(options.plan)
    if not path.exists():
        raise BadInput(
            got=f"{options.plan!r}, which is neither a file nor a preset",
            allowed=f"a plan file, or a preset of {', '.join(PRESETS)}",
            fix=did_you_mean(options.plan, list(PRESETS)),
        )
    plan = read_plan(path)
    model = model_preset(options.model or plan.model)
    plan = replace(plan, model=model.name)
    cluster = _cluster(options.cluster)
    _validate(plan, model, cluster, f"plan file {options.plan!r}")
    return _Subject(plan=plan, model=model, cluster=cluster, dtype="bfloat16")


def _of_preset(options: SimulateOptions) -> _Subject:
    chosen = preset(options.plan)
    model = model_preset(options.model or chosen.config.model)
    config = replace(chosen.config, model=model.name)
    cluster = _cluster(options.cluster or chosen.cluster)
    plan = choose_plan(config, model, cluster, chosen, previous=None).plan
    return _Subject(plan=plan, model=model, cluster=cluster, dtype=config.dtype)


def _cluster(path: Path | None) -> Cluster:
    return discover(jax.local_devices()) if path is None else load_cluster(path)


def _validate(plan: Plan, model: Model, cluster: Cluster, where: str) -> None:
    try:
        validate_plan(
            plan, cluster, len(model.layers), tensor_sizes(model), model.max_seq_len
        )
    except BadInput as bad:
        got = f"{where}: {bad.got}"
        raise BadInput(got=got, allowed=bad.allowed, fix=bad.fix) from bad


def _check_outputs(options: SimulateOptions) -> None:
    """Refuse what could not be written before anything is computed."""
    for name in ("trace", "plot", "output"):
        path: Path | None = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise BadInput(
                got=f"--{name} {path}, in a folder that is not there",
                allowed="a file in a folder that is there",
                fix=f"mkdir -p {path.parent}",
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
        write_picture(options.plot, spans, plan, costs, title)
        yield f"picture: {options.plot}"
    if options.output is not None:
        write_plan(options.output, with_prediction(predicted))
        yield f"plan: {options.output}"


def _spans(predicted: Predicted) -> list[Span]:
    return simulated_spans(
        predicted.simulation, predicted.plan, predicted.costs, predicted.tied
    )
