# SPDX-License-Identifier: Apache-2.0
"""Places pipelines on real nodes, which makes them plans.

Owns the assignment of stages to nodes. Two orders are worth trying. `together` keeps a
replica's stages on as few nodes as possible, so that activations stay inside. `across`
puts the same stage of many replicas on a node, so that gradients stay inside. Larger
stages are placed first: if each size divides the next, whatever fits by count then also
fits into the nodes. Does not own which pipelines there are
(`search/price_and_branch.py`, `baselines/`) nor which order is faster (`evaluator.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hetjax.cluster.cluster import Cluster
from hetjax.models.fingerprint import fingerprint
from hetjax.planner.model.problem import Option
from hetjax.planner.model.request import NodeClass, PlanRequest
from hetjax.plans.plan import LayerRange, Plan, Replica, Stage, StageMesh
from hetjax.plans.schedules import default_launch_ahead

SeatOrder = Literal["together", "across"]
Seat = tuple[str, tuple[int, ...]]  # a node, and the indices of the stage's devices
ORDERS: tuple[SeatOrder, ...] = ("together", "across")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnplacedReplica:
    """A replica not yet on nodes: options and layer ranges of its stages, in order."""

    num_microbatches: int
    microbatch_size: int
    stages: tuple[tuple[Option, LayerRange], ...]


def place(
    request: PlanRequest,
    pipelines: Sequence[UnplacedReplica],
    order: SeatOrder = "together",
) -> Plan | None:
    """Return a 1F1B plan on the cluster's nodes; None if the nodes' sizes do not fit.

    An option's `device_class` is an index into `request.classes`.
    """
    seats = _seats(request.classes, pipelines, order)
    if seats is None:
        return None
    replicas = [
        seated(pipeline, [seats[r, s] for s in range(len(pipeline.stages))])
        for r, pipeline in enumerate(pipelines)
    ]
    return plan_of(request, replicas)


def placed(
    request: PlanRequest,
    pipelines: Sequence[UnplacedReplica],
    orders: Sequence[SeatOrder] = ORDERS,
) -> Plan | None:
    """Return the plan by the first of these orders that fits; None if none does."""
    plans = (place(request, pipelines, order) for order in orders)
    return next((plan for plan in plans if plan is not None), None)


def plan_of(request: PlanRequest, replicas: Sequence[Replica]) -> Plan:
    """Return the request's 1F1B plan with these replicas."""
    return Plan(
        model=request.model.name,
        fingerprint=fingerprint(request.model),
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        packed=request.packed,
        replicas=tuple(replicas),
    )


def _seats(
    classes: Sequence[NodeClass], pipelines: Sequence[UnplacedReplica], order: SeatOrder
) -> dict[tuple[int, int], Seat] | None:
    """Return every stage's devices, by (replica, stage); None if they do not fit."""
    free = [{node.name: list(range(node.count)) for node in c.nodes} for c in classes]
    seats: dict[tuple[int, int], Seat] = {}
    wanted = [
        (option, r, s)
        for r, pipeline in enumerate(pipelines)
        for s, (option, _) in enumerate(pipeline.stages)
    ]
    if order == "across":
        wanted.sort(key=lambda w: (w[2], w[1]))
    wanted.sort(key=lambda w: -w[0].num_devices)
    for option, r, s in wanted:
        there = free[option.device_class]
        beside = seats.get((r, s - 1))
        node = _node(there, option.num_devices, beside and beside[0], order)
        if node is None:
            return None
        num = option.num_devices
        taken, there[node] = there[node][:num], there[node][num:]
        seats[r, s] = node, tuple(taken)
    return seats


def _node(
    free: dict[str, list[int]], num_devices: int, beside: str | None, order: SeatOrder
) -> str | None:
    """Return the first node with the least room that suffices; None if there is none.

    In order `together`, the node of the stage before goes first. So nodes in use fill
    up before further ones are used.
    """
    fits = [name for name, devices in free.items() if len(devices) >= num_devices]
    if order == "together" and beside in fits:
        return beside
    return min(fits, key=lambda name: len(free[name]), default=None)


def seated(pipeline: UnplacedReplica, seats: Sequence[Seat]) -> Replica:
    """Return the pipeline as a 1F1B replica, with each stage on its seat."""
    num_stages = len(pipeline.stages)
    return Replica(
        num_microbatches=pipeline.num_microbatches,
        microbatch_size=pipeline.microbatch_size,
        stages=tuple(
            Stage(
                node=node,
                devices=devices,
                mesh=StageMesh(data=option.data, tensor=option.tensor),
                layers=layers,
                remat=option.remat,
                offload=option.offload,
                launch_ahead=default_launch_ahead(
                    "1f1b",
                    num_stages=num_stages,
                    stage=s,
                    num_microbatches=pipeline.num_microbatches,
                ),
            )
            for s, ((option, layers), (node, devices)) in enumerate(
                zip(pipeline.stages, seats, strict=True)
            )
        ),
    )


def idle_devices(plan: Plan, cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Return the devices that the plan does not use, by node, without nodes that it
    uses fully."""
    used = plan.used_devices()
    idle = {
        node.name: tuple(d for d in range(node.count) if (node.name, d) not in used)
        for node in cluster.nodes
    }
    return {name: devices for name, devices in idle.items() if devices}
