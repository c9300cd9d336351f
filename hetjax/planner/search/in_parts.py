# SPDX-License-Identifier: Apache-2.0
"""Converts pipelines so that devices hold their layers in several parts, and back.

At both ends of a step a stage waits while a microbatch passes the other stages' layers.
If every stage has its layers in V parts, a microbatch goes round V times, through a
V-th of the layers each time. Then stages wait only a V-th of that time, at the price of
V times the messages (interleaving, Megatron-LM, arXiv 2104.04473). Owns the
distribution of layers to parts. Does not own the schedule of such plans
(`schedule/search.py`) nor the decision when they pay (`finish.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hetjax.plans.plan import Plan, Replica, Stage


def in_parts(plan: Plan, num_parts: int) -> Plan | None:
    """Return the plan with `num_parts` parts for every stage of its pipelines.

    Devices keep their number of layers, in parts as even as possible. None if no
    replica has several stages, or if a stage has fewer layers than parts.
    """
    cut = [_cut(replica, num_parts) for replica in plan.replicas]
    replicas = [replica for replica in cut if replica is not None]
    if len(replicas) < len(cut) or replicas == [*plan.replicas]:
        return None
    return replace(plan, replicas=tuple(replicas), programs={})


def _cut(replica: Replica, num_parts: int) -> Replica | None:
    if len(replica.stages) == 1:
        return replica
    layers = [stage.layers for stage in replica.stages]
    sizes = [_even(hi - lo, num_parts) for lo, hi in layers]
    if any(0 in parts for parts in sizes):
        return None
    rounds = [
        (stage, parts[n])
        for n in range(num_parts)
        for stage, parts in zip(replica.stages, sizes, strict=True)
    ]
    return replace(replica, stages=_stages(rounds))


def in_one_part(plan: Plan) -> Plan:
    """Return the plan with one stage in place of all parts on the same devices."""
    return replace(
        plan, replicas=tuple(map(_joined, plan.replicas)), schedule="1f1b", programs={}
    )


def _joined(replica: Replica) -> Replica:
    stages: dict[object, Stage] = {}
    sizes: dict[object, int] = {}
    for stage in replica.stages:
        place, (lo, hi) = (stage.node, stage.devices), stage.layers
        stages.setdefault(place, stage)
        sizes[place] = sizes.get(place, 0) + hi - lo
    joined = [(stage, sizes[place]) for place, stage in stages.items()]
    return replace(replica, stages=_stages(joined))


def _even(num_layers: int, num_parts: int) -> list[int]:
    """Return sizes of parts that differ by at most one layer, larger ones first."""
    return [(num_layers + n) // num_parts for n in reversed(range(num_parts))]


def _stages(sized: Sequence[tuple[Stage, int]]) -> tuple[Stage, ...]:
    """Return consecutive stages with these numbers of layers."""
    ends = accumulate((size for _, size in sized), initial=0)
    return tuple(
        replace(stage, layers=layers, launch_ahead=1)
        for (stage, _), layers in zip(sized, pairwise(ends), strict=True)
    )
