# SPDX-License-Identifier: Apache-2.0
"""Makes nodes alike that differ only in speed.

A node that is a little faster than others of its kind, or that a run measured to be a
little slower, is a class of its own. Then the search no longer sees that these nodes
can take equal parts of a plan. So it also searches the cluster as if they were all as
slow as the slowest: its plans are plans for the true cluster, where none is slower.
Owns which nodes are made alike, and how slow.
"""

from collections import defaultdict
from dataclasses import fields, replace

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Node
from hetjax.cluster.speeds import AS_MODELLED, Speeds
from hetjax.planner.model.request import PlanRequest


def levelled(request: PlanRequest) -> PlanRequest | None:
    """Return the request for a cluster in which nodes that differ only in speed are all
    as slow as the slowest; None if there are no such nodes."""
    nodes = request.cluster.nodes
    alike = defaultdict[Node, list[Node]](list)
    for node in nodes:
        alike[_at_any_speed(node)].append(node)
    slow = tuple(_as_slow_as(alike[_at_any_speed(node)], node) for node in nodes)
    if slow == nodes:
        return None
    return replace(request, cluster=replace(request.cluster, nodes=slow))


def _at_any_speed(node: Node) -> Node:
    """Return what nodes have in common that differ only in name and speed."""
    return replace(
        node, name="", peak_tflops=None, memory_gb_per_s=None, speeds=AS_MODELLED
    )


def _as_slow_as(alike: list[Node], node: Node) -> Node:
    specs, speeds = [device_spec(each) for each in alike], {n.speeds for n in alike}
    tflops = {spec.peak_tflops for spec in specs}
    gb_per_s = {spec.memory_gb_per_s for spec in specs}
    if len(tflops) == len(gb_per_s) == len(speeds) == 1:
        return node
    names = [each.name for each in fields(Speeds)]
    slowest = {name: min(getattr(each, name) for each in speeds) for name in names}
    return replace(
        node,
        peak_tflops=min(tflops),
        memory_gb_per_s=min(gb_per_s),
        speeds=Speeds(**slowest),
    )
