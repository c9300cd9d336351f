# SPDX-License-Identifier: Apache-2.0
"""Builds plans of equal pipelines, each over the same share of every node class.

Where links between classes are slow, gradients cost more to send over them than
activations. If all pipelines cross them at the same layer, every gradient is summed on
one side. The templates' model assumes that sums are equally fast everywhere, so these
plans are built separately. HARP's dynamic program finds one pipeline over a share; the
plan has one copy per share. Owns the shares. Does not own the program
(`baselines/hapt.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.baselines.hapt import hapt
from hetjax.planner.model.request import NodeClass, PlanRequest
from hetjax.planner.model.seating import Seat
from hetjax.plans.plan import Plan, Stage

_MOST_DEVICES = 256  # of a share; with more, planning takes too long for a search


def equal_share_plans(request: PlanRequest) -> Iterator[Plan]:
    """Yield plans of 1, 2, 4, ... equal pipelines, where classes divide evenly."""
    num = 1
    while num <= request.global_batch:
        shares = [_share(nodes, num) for nodes in request.classes]
        if request.global_batch % num == 0 and all(shares):
            yield from _plans(request, num, [share for share in shares if share])
        num *= 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """The first share of a class: whole nodes, or a part of a node."""

    nodes: tuple[Node, ...]
    of: NodeClass

    def seat(self, node: str, devices: tuple[int, ...], n: int) -> Seat:
        """Return the seat in the n-th share that corresponds to a seat of the first."""
        at = [own.name for own in self.nodes].index(node)
        per_node = self.of.devices_per_node // self.nodes[0].count
        here = n * len(self.nodes) + at if per_node == 1 else n // per_node
        first = 0 if per_node == 1 else n % per_node * self.nodes[0].count
        return self.of.nodes[here].name, tuple(first + device for device in devices)


def _share(nodes: NodeClass, num: int) -> _Share | None:
    """Return the first share; None if the class has no `num` equal shares."""
    count = len(nodes.nodes)
    if count % num == 0:
        return _Share(nodes=nodes.nodes[: count // num], of=nodes)
    parts, left = divmod(num, count)
    part = None if left else _part(nodes.nodes[0], parts)
    return None if part is None else _Share(nodes=(part,), of=nodes)


def _part(node: Node, parts: int) -> Node | None:
    """Return the first of `parts` equal parts of a node: whole hosts, or a part of one
    host; None if there are none."""
    devices, left = divmod(node.count, parts)
    hosts = max(node.hosts // parts, 1)
    alike = node.hosts % parts == 0 or parts % node.hosts == 0
    return None if left or not alike else replace(node, count=devices, hosts=hosts)


def _plans(request: PlanRequest, num: int, shares: list[_Share]) -> Iterator[Plan]:
    nodes = tuple(node for share in shares for node in share.nodes)
    largest = max(node.count for node in nodes)
    if (
        largest < min(request.degrees)
        or sum(node.count for node in nodes) > _MOST_DEVICES
    ):
        return
    ends = {node.name for node in nodes} | {node.zone for node in nodes}
    links = tuple(x for x in request.cluster.links if set(x.between) <= ends)
    cluster = Cluster(name=request.cluster.name, nodes=nodes, links=links)
    part = replace(request, cluster=cluster, global_batch=request.global_batch // num)
    try:
        found = hapt(part, more_orders=True)
    except NoFeasiblePlan:
        return
    share_of = {node.name: share for share in shares for node in share.nodes}
    for plan in found:
        yield replace(
            plan,
            global_batch=request.global_batch,
            schedule="1f1b",
            replicas=tuple(
                replace(r, stages=tuple(_moved(s, share_of, n) for s in r.stages))
                for n in range(num)
                for r in plan.replicas
            ),
        )


def _moved(stage: Stage, share_of: dict[str, _Share], n: int) -> Stage:
    """Return the stage moved to the n-th share."""
    node, devices = share_of[stage.node].seat(stage.node, stage.devices, n)
    return replace(stage, node=node, devices=devices)
