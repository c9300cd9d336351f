# SPDX-License-Identifier: Apache-2.0
"""Checks and describes a plan's costs before simulation: times, data type, memory.

Owns the text on where times come from, the limits of times that can be simulated, and
the check whether a given plan fits into known memory. Does not own the costs
(`costs/`) nor a plan's memory needs (`schedule/simulation/memory.py`).
"""

import math
from collections.abc import Set
from pathlib import Path

from hetjax.cluster.catalogue import canonical_name, catalogue, compiler_of
from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node, Precision
from hetjax.cluster.memory_budget import plan_bytes
from hetjax.costs.certainty.calibration import UNCALIBRATED, StepCalibration
from hetjax.costs.costs import Costs
from hetjax.costs.measured.compiled import (
    NOTHING,
    CompiledBytes,
    PlanPrograms,
    compiled_stage,
)
from hetjax.costs.measured.layer_profile import Profile
from hetjax.costs.network.wire_bytes import GradientWire, Transport
from hetjax.costs.plan_costs import costs_of, device_kinds, stage_devices
from hetjax.costs.stage_memory import stage_memory
from hetjax.costs.stage_times import has_halves
from hetjax.errors import BadInput, counted_noun
from hetjax.models.attention.attention import head_sizes
from hetjax.models.model import Model
from hetjax.plans.attention import Attention, with_attentions
from hetjax.plans.plan import Plan, StageKey
from hetjax.plans.precision import Dtype, stage_precision
from hetjax.schedule.launch_ahead import hop_s
from hetjax.schedule.programs.action import Op, Programs, Tied
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.search import may_split
from hetjax.schedule.simulation.memory import check_memory, memory_uses
from hetjax.stage.arrays import OptimizerInit
from hetjax.stage.partition import tied_holders

LEAST_S, MOST_S = 1e-12, 1e12  # beyond these, sums would be 0 or infinite


def compute_dtype(
    given: Dtype | None, profile: Profile | None, otherwise: Dtype
) -> Dtype:
    """Return the dtype: `given` by --dtype, else the profile's, else `otherwise`.

    "best" requires nothing: devices in the profile use the dtype that was measured.
    Raises BadInput if --dtype is not the profile's dtype.
    """
    if profile is None:
        return given or otherwise
    if given not in (None, "best", profile.dtype):
        raise BadInput(
            got=f"--dtype {given}, but the profile was measured in {profile.dtype}",
            allowed=f"--dtype {profile.dtype}, or no --dtype",
            fix=f"leave --dtype out, or measure: python -m hetjax.profile "
            f"{profile.model} --dtype {given} --output FILE",
        )
    return given or ("best" if otherwise == "best" else profile.dtype)


def check_measured(profile: Profile, devices: set[str], what: str) -> None:
    """Raise BadInput if the profile has none of the devices. The
    message calls their owner `what`."""
    if not devices & profile.devices:
        raise BadInput(
            got=f"a profile of {', '.join(sorted(profile.devices)) or 'no devices'}",
            allowed=f"one of the {what}'s devices: {', '.join(sorted(devices))}",
            fix=f"measure on these: python -m hetjax.profile {profile.model}, or leave "
            "--profile out",
        )


def all_kinds(cluster: Cluster) -> set[str]:
    """Return the device kinds of the cluster, by the catalogue's names."""
    return {canonical_name(node.device) for node in cluster.nodes}


def known_degrees(
    degrees: tuple[int, ...], cluster: Cluster, profile: Profile | None
) -> tuple[int, ...]:
    """Return those of the tensor degrees that the profile measured; all if it has none.

    Also all if the profile lacks a device kind of the cluster: its times are estimated
    at every degree.
    """
    kinds = all_kinds(cluster)
    if profile is None or not kinds <= profile.devices:
        return degrees
    measured = {m.tensor for m in profile.measurements}
    return tuple(degree for degree in degrees if degree in measured) or degrees


def times_from(
    plan: Plan,
    cluster: Cluster,
    dtype: Dtype | None,
    profile: Profile | None,
    path: Path | None,
    tied: Tied,
    calibration: StepCalibration = UNCALIBRATED,
) -> str:
    """Return text on where the plan's times come from; `path` is the profile's."""
    source = _times_from(plan, cluster, dtype, profile, path, tied)
    num_steps = calibration.num_steps
    if not device_kinds(plan, cluster) & calibration.kinds():
        return source
    return f"at speeds learnt from {counted_noun(num_steps, 'measured step')}, {source}"


def _times_from(
    plan: Plan,
    cluster: Cluster,
    dtype: Dtype | None,
    profile: Profile | None,
    path: Path | None,
    tied: Tied,
) -> str:
    if profile is None:
        spelled = _estimated_in(plan, cluster, set(), dtype)
        return f"estimated from {_sources(plan, cluster)}, {spelled}"
    missing = _not_measured(profile, plan, cluster, dtype, lower(plan, tied))
    return f"measured, {path}, {profile.dtype}{missing}"


def memory_from(source: str, costs: Costs) -> str:
    """Return `source` with a note on which workspaces the compiler has measured."""
    known, stages = len(costs.compiled), len(costs.memory)
    if not known:
        return source
    which = "workspace" if known == stages else f"workspace of {known}/{stages} stages"
    return f"{source}; {which} measured by the compiler"


def _estimated_in(
    plan: Plan, cluster: Cluster, measured: Set[str], dtype: Dtype | None
) -> str:
    """Return the precisions of stages on devices not in `measured`, as text."""
    nodes = {node.name: node for node in cluster.nodes}
    used = [(stage, nodes[stage.node]) for _, _, stage in plan.stages()]
    found = {
        stage_precision(stage, node, dtype)
        for stage, node in used
        if canonical_name(node.device) not in measured
    }
    return " and ".join(sorted(found))


def _sources(plan: Plan, cluster: Cluster) -> str:
    """Return text on where the figures of the plan's devices come from."""
    used = {cluster.node(stage.node) for _, _, stage in plan.stages()}
    own = any(getattr(node, f) is not None for node in used for f in DEVICE_FIGURES)
    return f"the device catalogue{' and the cluster file' if own else ''}"


def _not_measured(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    dtype: Dtype | None,
    programs: Programs,
) -> str:
    """Return text on which times are not from the profile."""
    missing = sorted(device_kinds(plan, cluster) - profile.devices)
    missing_kinds = ""
    if missing:
        spelled = _estimated_in(plan, cluster, profile.devices, dtype)
        missing_kinds = f"; {', '.join(missing)} not in it, estimated in {spelled}"
    kinds = {node.name: canonical_name(node.device) for node in cluster.nodes}
    halved = {a.key for p in programs.values() for a in p if a.op is Op.I}
    whole = any(
        (r, s) in halved
        and kinds[stage.node] in profile.devices
        and not has_halves(
            profile,
            stage,
            node=cluster.node(stage.node),
            microbatch_size=plan.replicas[r].microbatch_size,
        )
        for r, s, stage in plan.stages()
    )
    if not whole:
        return missing_kinds
    return f"{missing_kinds}; B split into equal halves, profile --halves measures them"


def checked_costs(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    profile: Profile | None,
    *,
    dtype: Dtype | None,
    attention: Attention | None = None,
    optimizer: OptimizerInit,
    schedule: str | None = None,
    transport: Transport = "sockets",
    gradient_wire: GradientWire = "float32",
    compiled: CompiledBytes = NOTHING,
) -> Costs:
    """Return the costs to simulate a plan with, under its schedule or `schedule`.

    Raises BadInput for devices without figures, and for times that cannot be simulated.
    """
    costs = costs_of(
        plan,
        model,
        cluster,
        profile,
        dtype=dtype,
        attention=attention,
        optimizer=optimizer,
        # hand-written programs may split backward passes under any schedule
        halves=may_split(schedule or plan.schedule) or bool(plan.programs),
        transport=transport,
        gradient_wire=gradient_wire,
        compiled=compiled,
    )
    check_times(costs)
    return costs


def check_times(costs: Costs) -> None:
    """Raise BadInput for times that are too short or too long to simulate."""
    for (r, s), times in costs.times.items():
        _check_s(times.fused_s, f"F and B of replicas[{r}].stages[{s}]", LEAST_S)
        _check_s(times.update_s, f"the update of replicas[{r}].stages[{s}]")
    for a, b in costs.routes:
        _check_s(hop_s(costs, a, b), f"a message from stage {a} to stage {b}")
    for group, reduction in costs.reductions.items():
        for trunk, size in reduction.trunk_bytes.items():
            _check_s(size / costs.trunks[trunk], f"the gradient sum of {group}")


def _check_s(seconds: float, what: str, least_s: float = 0.0) -> None:
    if not least_s <= seconds <= MOST_S:
        raise BadInput(
            got=f"{seconds:g} s for {what}",
            allowed=f"{least_s:g} to {MOST_S:g} s",
            fix="correct the times in the profile, or the figures in the cluster file",
        )


def check_plan_fits(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    *,
    dtype: Dtype | None,
    attention: Attention | None = None,
    optimizer: OptimizerInit,
    compiled: CompiledBytes = NOTHING,
) -> None:
    """Raise NoFeasiblePlan if a device of known memory has less than the plan needs.

    Raises BadInput for attention that cannot run on a stage's device.
    """
    precisions: dict[StageKey, Precision] = {
        (r, s): stage_precision(stage, cluster.node(stage.node), dtype)
        for r, s, stage in plan.stages()
    }
    plan = with_attentions(plan, cluster, head_sizes(model), precisions, attention)
    has_bytes = {
        (r, s): known_memory_bytes(cluster.node(stage.node))
        for r, s, stage in plan.stages()
    }
    if not any(map(math.isfinite, has_bytes.values())):
        return
    devices = stage_devices(plan, cluster)
    actions = lower(plan, tied_holders(plan, model))
    splits = any(a.op is Op.I for program in actions.values() for a in program)
    programs = PlanPrograms(
        plan=plan,
        model=model,
        precisions=precisions,
        devices=devices,
        optimizer=optimizer,
    )
    needs = {
        (r, s): stage_memory(
            plan,
            model,
            (r, s),
            dtype=precisions[r, s],
            optimizer=optimizer,
            halves=splits,
            compiler=compiler_of(devices[r, s]),
            compiled=compiled_stage(compiled, programs, (r, s), split=splits),
        )
        for r, s, _ in plan.stages()
    }
    costs = Costs(times={}, memory=needs, memory_bytes=has_bytes)
    check_memory(memory_uses(actions, plan, costs), plan, costs)


def known_memory_bytes(node: Node) -> float:
    """Return the memory of each device that a plan may fill; infinity if unknown.

    The catalogue's figure for "cpu" serves to compare plans, it is not a limit.
    """
    name = canonical_name(node.device)
    if node.memory_gib is not None:
        return plan_bytes(name, node.memory_gib)
    spec = catalogue().get(name)
    if spec is None or name == "cpu":
        return math.inf
    return plan_bytes(name, spec.memory_gib)
