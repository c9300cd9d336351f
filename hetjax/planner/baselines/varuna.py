# SPDX-License-Identifier: Apache-2.0
"""Varuna's pipelines: depth times data degree, blind to unlike devices.

Owns the search over pipeline depth P, data degree D, microbatch size and remat (arXiv
2111.04007): no tensor parallelism, the same number of blocks in every stage, equal
microbatches, every device taken to be as slow as the slowest; a pipeline's devices are
neighbours in the file. Memory is that of the real devices. Does not own costs
(`stage_costs.py`) nor what varuna does when machines vanish.

Letters of array names: R replicas, S stages, Q distinct rows of R, C classes in use.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.baselines.ranks import (
    Seating,
    StageSlot,
    SymmetricShape,
    alike,
    layouts,
    one_by_one,
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


def varuna(request: Request) -> list[Plan]:
    """Return the best P x D plans. NoFeasiblePlan if none is in memory."""
    costs = stage_costs(request)
    if (1, 1) not in costs.meshes:
        raise NoFeasiblePlan(
            got="varuna: tensor or data degrees without 1",
            allowed="stages of one device, the only ones that varuna has",
            fix="add 1 to --tensor-degrees and --data-degrees",
        )
    return best_first("varuna", request, _candidates(costs))


def _candidates(costs: StageCosts) -> Iterator[Candidate]:
    there = seats(costs.request, 1, range(len(costs.request.classes)))
    for layout in layouts(costs, 1, 1, len(there)):
        total = costs.request.global_batch // layout.size
        for num_replicas in range(1, len(there) // layout.num_stages + 1):
            if total % num_replicas == 0:
                yield _candidate(costs, layout, there, num_replicas)


def _candidate(
    costs: StageCosts,
    layout: SymmetricShape,
    there: Sequence[StageSlot],
    num_replicas: int,
) -> Candidate:
    p, num_stages = costs.problem, layout.num_stages
    num_microbatches = costs.request.global_batch // layout.size // num_replicas
    seats_RS = one_by_one(num_replicas, num_stages)
    class_of = np.array([seat.device_class for seat in there])
    options_QS, _ = alike(layout.options_C[class_of[seats_RS]])
    cuts = even_cuts(p.num_layers, num_stages)
    each_Q = np.full(len(options_QS), num_microbatches)
    cuts_QJ = np.tile(cuts, (len(options_QS), 1))
    step_s = np.inf
    if in_memory(p, layout.b, options_QS, cuts_QJ, each_Q).all():
        in_use_C1 = np.unique(options_QS)[:, None]
        seconds_C = closed_s(
            p,
            layout.b,
            np.repeat(in_use_C1, num_stages, axis=1),
            np.tile(cuts, (len(in_use_C1), 1)),
            np.full(len(in_use_C1), num_microbatches),
            num_replicas,
        )
        step_s = float(seconds_C.max())
    seating = Seating(
        layout=layout,
        seats=there,
        seats_RS=seats_RS,
        cuts_R=[cuts] * num_replicas,
        num_microbatches_R=[num_microbatches] * num_replicas,
    )
    plan = partial(seated_plan, costs.request, seating)
    return Candidate(step_s=step_s, plan=plan)
