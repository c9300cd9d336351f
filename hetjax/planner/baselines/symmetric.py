# SPDX-License-Identifier: Apache-2.0
"""Finds even plans: Megatron-LM's symmetric 3D parallelism, and Varuna's pipelines.

Owns both exhaustive searches. All replicas are equal: the same number of blocks in
every stage, and equally many microbatches.

* Megatron-LM (arXiv 2104.04473) tries all tensor, data and pipeline degrees, microbatch
  sizes and remats. It uses the most replicas that the devices allow and that compute
  equal shares of the batch; it also tries to leave out the slowest kinds, as a good
  engineer would. Ranks follow the nodes in the order of the file, tensor fastest, then
  data, then pipeline. With a data degree above 1, devices share the optimizer state, as
  its distributed optimizer does. Plans are ranked by the closed form of the slowest
  replica.
* Varuna (arXiv 2111.04007) has no tensor parallelism, and any pipeline depth and number
  of replicas. It assumes that every device is as slow as the slowest. A pipeline's
  devices are neighbours in the file. Memory is that of the real devices.

Does not own costs (`stage_costs.py`) nor Varuna's reaction to vanishing machines.

Letters of array names: R replicas, S stages, Q distinct rows of R.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.baselines import ranks
from hetjax.planner.baselines.stage_costs import (
    Candidate,
    StageCosts,
    best_first,
    closed_s,
    in_memory,
    stage_costs,
)
from hetjax.planner.model.cuts import even_cuts
from hetjax.planner.model.problem import Ints
from hetjax.planner.model.request import PlanRequest
from hetjax.plans.plan import Plan


def megatron(request: PlanRequest) -> list[Plan]:
    """Return the best symmetric plans. Raises NoFeasiblePlan if none fits memory."""
    return best_first("megatron", request, _megatron(stage_costs(request)))


def varuna(request: PlanRequest) -> list[Plan]:
    """Return the best plans of stages of one device. Raises NoFeasiblePlan if none fits
    memory."""
    costs = stage_costs(request)
    if (1, 1) not in costs.meshes:
        raise NoFeasiblePlan(
            got="varuna without tensor or data degree 1",
            allowed="stages of one device: varuna has no others",
            fix="allow degree 1 for tensor (--tensor 1,2, say) and data",
        )
    return best_first("varuna", request, _varuna(costs))


def _megatron(costs: StageCosts) -> Iterator[Candidate]:
    for classes, mesh in product(ranks.kinds_in_use(costs), costs.meshes):
        for shape in ranks.shapes(costs, *mesh, classes):
            most, total = len(shape.seats) // shape.num_stages, shape.num_microbatches
            num_replicas = next(d for d in range(most, 0, -1) if total % d == 0)
            seats_RS = ranks.in_rank_order(num_replicas, shape.num_stages)
            yield _candidate(costs, shape, seats_RS)


def _varuna(costs: StageCosts) -> Iterator[Candidate]:
    for shape in ranks.shapes(costs, 1, 1, range(len(costs.request.classes))):
        for num_replicas in range(1, len(shape.seats) // shape.num_stages + 1):
            if shape.num_microbatches % num_replicas == 0:
                seats_RS = ranks.one_by_one(num_replicas, shape.num_stages)
                yield _candidate(costs, shape, seats_RS, blind=True)


def _candidate(
    costs: StageCosts,
    shape: ranks.SymmetricShape,
    seats_RS: Ints,
    *,
    blind: bool = False,
) -> Candidate:
    """Return the candidate with even cuts and shares. If `blind`, every device counts
    as slow as the slowest."""
    p, (num_replicas, num_stages) = costs.problem, seats_RS.shape
    cuts = even_cuts(p.num_layers, num_stages)
    count = shape.num_microbatches // num_replicas
    options_QS, _ = ranks.alike(shape.options_C[shape.class_N[seats_RS]])
    cuts_1J, counts_1, step_s = np.array([cuts]), np.array([count]), np.inf
    if in_memory(p, shape.b, options_QS, cuts_1J, counts_1).all():
        if blind:
            in_use = np.unique(options_QS)
            options_QS = np.repeat(in_use[:, None], num_stages, axis=1)
        seconds_Q = closed_s(p, shape.b, options_QS, cuts_1J, counts_1, num_replicas)
        step_s = float(seconds_Q.max())
    rows = [cuts] * num_replicas, [count] * num_replicas
    plan = partial(ranks.seated_plan, costs.request, shape, seats_RS, *rows)
    return Candidate(step_s=step_s, plan=plan)
