# SPDX-License-Identifier: Apache-2.0
"""Ranks: devices in the order of the cluster file, and symmetric plans on them.

Owns the seats that equal stages can have, the layouts in which all stages have one mesh
and all replicas as many stages, and plans that say who sits where. Does not own which
layout a baseline takes, nor placement where order is not the point
(`model/seating.py`).

Letters of array names: R replicas, S stages, C device classes.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetjax.planner.baselines.stage_costs import StageCosts
from hetjax.planner.model.cuts import StageCuts
from hetjax.planner.model.problem import Ints, Option
from hetjax.planner.model.request import Request
from hetjax.planner.model.seating import UnplacedReplica, plan_of, seated
from hetjax.plans.plan import Plan, Remat, Replica

_MOST_KINDS = 4  # with more of them, all or the fastest 1, 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSlot:
    """Devices of one node that a stage can have."""

    device_class: int
    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricShape:
    """What all stages of a symmetric plan have in common; `b` is the index of `size`.

    `options_C` gives the option by class, -1 where there is none.
    """

    tensor: int
    data: int
    remat: Remat
    num_stages: int
    b: int
    size: int
    options_C: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Seating:
    """Who sits where: indices into `seats`, and what each replica does there."""

    layout: SymmetricShape
    seats: Sequence[StageSlot]
    seats_RS: Ints
    cuts_R: Sequence[StageCuts]
    num_microbatches_R: Sequence[int]


def kinds_in_use(costs: StageCosts) -> list[frozenset[int]]:
    """Return classes to use, as an engineer would try: all, or the fastest few only."""
    rates = costs.rates_C
    order = sorted(range(len(rates)), key=lambda c: -rates[c])
    nums = {*range(1, min(len(order), _MOST_KINDS)), len(order)}
    return [frozenset(order[:n]) for n in sorted(nums)]


def seats(
    request: Request, num_devices: int, classes: Container[int]
) -> list[StageSlot]:
    """Return all places for stages of so many devices, in the order of the file."""
    class_of = {
        node.name: c for c, nodes in enumerate(request.classes) for node in nodes.nodes
    }
    return [
        StageSlot(
            device_class=class_of[node.name],
            node=node.name,
            devices=tuple(range(first, first + num_devices)),
        )
        for node in request.cluster.nodes
        if class_of[node.name] in classes
        for first in range(0, node.count - num_devices + 1, num_devices)
    ]


def layouts(
    costs: StageCosts, tensor: int, data: int, num_seats: int
) -> Iterator[SymmetricShape]:
    """Yield every layout with these degrees that there are seats and layers for."""
    for num_stages in range(1, min(num_seats, costs.num_inner_layers) + 1):
        for b, size in costs.sizes:
            if size % data:
                continue
            for remat, options_C in costs.remats_C(tensor, data):
                yield SymmetricShape(
                    tensor=tensor,
                    data=data,
                    remat=remat,
                    num_stages=num_stages,
                    b=b,
                    size=size,
                    options_C=options_C,
                )


def in_rank_order(num_replicas: int, num_stages: int) -> Ints:
    """Return the seat of each (replica, stage) as Megatron ranks them.

    Tensor fastest, then data, then pipeline: a stage's replicas are neighbours.
    """
    return np.arange(num_replicas * num_stages).reshape(num_stages, -1).T


def one_by_one(num_replicas: int, num_stages: int) -> Ints:
    """Return the seat of each (replica, stage) where a replica's are neighbours."""
    return np.arange(num_replicas * num_stages).reshape(num_replicas, -1)


def alike(rows_RS: Ints) -> tuple[Ints, Ints]:
    """Return the distinct rows and, for every row, which of them it is."""
    rows = [row.tobytes() for row in np.ascontiguousarray(rows_RS)]
    number = {row: q for q, row in enumerate(dict.fromkeys(rows))}
    firsts = [rows.index(row) for row in number]
    return rows_RS[firsts], np.array([number[row] for row in rows])


def seated_plan(request: Request, seating: Seating) -> Plan:
    """Return the 1F1B plan of these replicas."""
    num_replicas = len(seating.seats_RS)
    return plan_of(request, [_replica(seating, r) for r in range(num_replicas)])


def _replica(seating: Seating, r: int) -> Replica:
    layout = seating.layout
    held = [seating.seats[int(seat)] for seat in seating.seats_RS[r]]
    # a seat's class is known by its node
    way = Option(
        device_class=0, tensor=layout.tensor, data=layout.data, remat=layout.remat
    )
    pipeline = UnplacedReplica(
        num_microbatches=seating.num_microbatches_R[r],
        microbatch_size=layout.size,
        stages=tuple((way, layers) for layers in pairwise(seating.cuts_R[r])),
    )
    return seated(pipeline, [(seat.node, seat.devices) for seat in held])
