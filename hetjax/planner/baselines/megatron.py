# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's symmetric 3D parallelism, tuned by trying everything.

Owns the search over tensor, data and pipeline degrees, microbatch sizes and remats
(arXiv 2104.04473): equal replicas with the same number of blocks in every stage and as
many microbatches each, on all devices, or the most that the batch divides by; or
without the slowest kinds of devices, as a good engineer would try. Ranks go over the
nodes as the file has them, tensor fastest, then data, then pipeline. Devices of a data
degree above 1 share the optimizer state, as its distributed optimizer does.
Does not own costs (`stage_costs.py`): it ranks by the closed form, the slowest replica
counting.

Letters of array names: R replicas, S stages, Q distinct rows of R.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from hetjax.planner.baselines.ranks import (
    Seating,
    StageSlot,
    SymmetricShape,
    alike,
    in_rank_order,
    kinds_in_use,
    layouts,
    seated_plan,
    seats,
)
from hetjax.planner.baselines.stage_costs import (
    Candidate,
    StageCosts,
    best_first,
    closed_s,
    in_memory,
    stage_costs,
)
from hetjax.planner.model.cuts import even_cuts
from hetjax.planner.model.request import Request
from hetjax.plans.plan import Plan


def megatron(request: Request) -> list[Plan]:
    """Return the best symmetric plans. NoFeasiblePlan if none is in memory."""
    return best_first("megatron", request, _candidates(stage_costs(request)))


def _candidates(costs: StageCosts) -> Iterator[Candidate]:
    for classes, (tensor, data) in product(kinds_in_use(costs), costs.meshes):
        there = seats(costs.request, tensor * data, classes)
        for layout in layouts(costs, tensor, data, len(there)):
            yield _candidate(costs, layout, there)


def _candidate(
    costs: StageCosts, layout: SymmetricShape, there: Sequence[StageSlot]
) -> Candidate:
    p, num_stages = costs.problem, layout.num_stages
    total = costs.request.global_batch // layout.size
    room = len(there) // num_stages
    num_replicas = next(d for d in range(room, 0, -1) if total % d == 0)
    num_microbatches = total // num_replicas
    seats_RS = in_rank_order(num_replicas, num_stages)
    class_of = np.array([seat.device_class for seat in there])
    options_QS, _ = alike(layout.options_C[class_of[seats_RS]])
    cuts = even_cuts(p.num_layers, num_stages)
    cuts_QJ = np.tile(cuts, (len(options_QS), 1))
    each_Q = np.full(len(options_QS), num_microbatches)
    step_s = np.inf
    if in_memory(p, layout.b, options_QS, cuts_QJ, each_Q).all():
        seconds_Q = closed_s(p, layout.b, options_QS, cuts_QJ, each_Q, num_replicas)
        step_s = float(seconds_Q.max())
    seating = Seating(
        layout=layout,
        seats=there,
        seats_RS=seats_RS,
        cuts_R=[cuts] * num_replicas,
        num_microbatches_R=[num_microbatches] * num_replicas,
    )
    plan = partial(seated_plan, costs.request, seating)
    return Candidate(step_s=step_s, plan=plan)
