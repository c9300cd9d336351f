# SPDX-License-Identifier: Apache-2.0
"""Symmetric plans by rank: devices are taken in the order of the cluster file.

Owns the shapes in which all stages have one mesh and all replicas equally many stages,
the seats of such stages, and the plans with given seats. Does not own which shape a
baseline takes, nor placement without a given order (`model/seating.py`).

Letters of array names: R replicas, S stages, N seats, C device classes.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetjax.planner.baselines.stage_costs import StageCosts
from hetjax.planner.model.cuts import StageCuts
from hetjax.planner.model.problem import Ints, Option
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import Seat, UnplacedReplica, plan_of, seated
from hetjax.plans.plan import Plan, Remat

_MOST_KINDS = 4  # with more kinds, all are tried, or the fastest 1, 2 or 3


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricShape:
    """What all stages of a symmetric plan have in common, and their possible seats,
    with the class of each. `b` is the index of `size`.

    A step has `num_microbatches` over all replicas. `options_C` is the option by class,
    -1 if there is none.
    """

    seats: Sequence[Seat]
    class_N: Ints
    tensor: int
    data: int
    remat: Remat
    num_stages: int
    b: int
    size: int
    num_microbatches: int
    options_C: Ints


def kinds_in_use(costs: StageCosts) -> list[frozenset[int]]:
    """Return sets of classes that an engineer would try: all, or the fastest few."""
    rates = costs.problem.rates_C
    order = sorted(range(len(rates)), key=lambda c: -rates[c])
    nums = {*range(1, min(len(order), _MOST_KINDS)), len(order)}
    return [frozenset(order[:n]) for n in sorted(nums)]


def shapes(
    costs: StageCosts, tensor: int, data: int, classes: Container[int]
) -> Iterator[SymmetricShape]:
    """Yield every shape with these degrees for which seats and layers suffice. Seats
    are in the order of the file."""
    class_of = {
        node.name: c for c, k in enumerate(costs.request.classes) for node in k.nodes
    }
    num = tensor * data
    seats = [
        (node.name, tuple(range(first, first + num)))
        for node in costs.request.cluster.nodes
        if class_of[node.name] in classes
        for first in range(0, node.count - num + 1, num)
    ]
    class_N = np.array([class_of[node] for node, _ in seats], dtype=np.int64)
    for num_stages in range(1, min(len(seats), costs.num_inner_layers) + 1):
        for b, size in costs.sizes:
            if size % data:
                continue
            for remat, options_C in costs.remats_C(tensor, data):
                yield SymmetricShape(
                    seats=seats,
                    class_N=class_N,
                    tensor=tensor,
                    data=data,
                    remat=remat,
                    num_stages=num_stages,
                    b=b,
                    size=size,
                    num_microbatches=costs.request.global_batch // size,
                    options_C=options_C,
                )


def in_rank_order(num_replicas: int, num_stages: int) -> Ints:
    """Return the seat of each (replica, stage) in Megatron's rank order.

    Tensor varies fastest, then data, then pipeline: a stage's replicas are neighbours.
    """
    return np.arange(num_replicas * num_stages).reshape(num_stages, -1).T


def one_by_one(num_replicas: int, num_stages: int) -> Ints:
    """Return the seat of each (replica, stage); a replica's stages are neighbours."""
    return np.arange(num_replicas * num_stages).reshape(num_replicas, -1)


def alike(rows_RS: Ints) -> tuple[Ints, Ints]:
    """Return the distinct rows, and the index of each row among them."""
    rows = [row.tobytes() for row in np.ascontiguousarray(rows_RS)]
    number = {row: q for q, row in enumerate(dict.fromkeys(rows))}
    firsts = [rows.index(row) for row in number]
    return rows_RS[firsts], np.array([number[row] for row in rows])


def seated_plan(
    request: PlanRequest,
    shape: SymmetricShape,
    seats_RS: Ints,
    cuts_R: Sequence[StageCuts],
    num_microbatches_R: Sequence[int],
) -> Plan:
    """Return the 1F1B plan of these replicas; `seats_RS` are indices of seats."""
    # the seat's node determines the class
    option = Option(
        device_class=0,
        tensor=shape.tensor,
        data=shape.data,
        remat=shape.remat,
        offload=request.offloads[0],
    )
    replicas = []
    for row, cuts, count in zip(seats_RS, cuts_R, num_microbatches_R, strict=True):
        pipeline = UnplacedReplica(
            num_microbatches=count,
            microbatch_size=shape.size,
            stages=tuple((option, layers) for layers in pairwise(cuts)),
        )
        replicas.append(seated(pipeline, [shape.seats[n] for n in row]))
    return plan_of(request, replicas)
