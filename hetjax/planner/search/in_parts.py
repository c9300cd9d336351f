# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose devices do their layers in several parts, and back to one part.

A pipeline waits at both ends of a step for as long as a microbatch takes through the
other stages' layers. Where every stage does its layers in V parts, a microbatch goes
round V times, through a V-th of the layers each time, and all wait a V-th of that
(interleaving, Megatron-LM, arXiv 2104.04473), for V times the messages.
Owns how layers are shared out among parts. Does not own which order such plans keep to
(`schedule/search.py`) nor when they pay (`finish.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hetjax.plans.plan import Plan, Replica, Stage


def in_parts(plan: Plan, num_parts: int) -> Plan | None:
    """Return the plan with so many parts for every stage of its pipelines.

    Devices keep as many layers each as they had, in parts as even as can be. None where
    no replica has several stages, or a stage has fewer layers.
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
    """Return the plan with one stage for all that the same devices do in parts."""
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
    """So many layers in parts that differ by one at most, the larger ones first."""
    return [(num_layers + n) // num_parts for n in reversed(range(num_parts))]


def _stages(sized: Sequence[tuple[Stage, int]]) -> tuple[Stage, ...]:
    """Stages of so many layers each, one after the other."""
    ends = accumulate((size for _, size in sized), initial=0)
    return tuple(
        replace(stage, layers=layers, launch_ahead=1)
        for (stage, _), layers in zip(sized, pairwise(ends), strict=True)
    )
