# SPDX-License-Identifier: Apache-2.0
"""Finds Whale's plans for unlike devices: work in proportion to FLOP/s.

Owns the search (Whale, ATC 2022). It tries Megatron's degrees. A replica's number of
microbatches is proportional to the FLOP/s that it can use. Blocks are even, or layers
are proportional to the stages' FLOP/s, with the stages of large memory first; layers
move on from stages whose device is full. A replica's devices are neighbours in the
file, or in Megatron's rank order. All kinds of devices are used, or only the fastest.
Speeds are the catalogue's peaks, as Whale knows nothing else. Does not own costs
(`stage_costs.py`): plans are ranked by the closed form, as for `megatron`.

Letters of array names: R replicas, S stages, Q distinct rows of R, I and J first layer
and end of a range, C device classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from hetjax.costs.graph.flops import forward_flops
from hetjax.planner.baselines import ranks
from hetjax.planner.baselines.stage_costs import (
    Candidate,
    StageCosts,
    best_first,
    closed_s,
    in_memory,
    shared_out,
    stage_costs,
)
from hetjax.planner.model.cuts import StageCuts, balanced_cuts, even_cuts
from hetjax.planner.model.problem import Floats, Ints
from hetjax.planner.model.request import PlanRequest
from hetjax.plans.plan import Plan


def whale(request: PlanRequest) -> list[Plan]:
    """Return the best FLOP-proportional plans. Raises NoFeasiblePlan if none fits."""
    return best_first("whale", request, _candidates(_speeds(stage_costs(request))))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Speeds:
    """Whale's inputs: FLOPs of layers 0 to J, FLOP/s and memory of a device."""

    costs: StageCosts
    flops_J: Floats
    flops_per_s_C: Floats
    memory_C: Floats


def _speeds(costs: StageCosts) -> _Speeds:
    request = costs.request
    flops = forward_flops(request.model, request.seq_len)
    return _Speeds(
        costs=costs,
        flops_J=np.cumsum([0.0, *flops]),
        flops_per_s_C=np.array([spec.peak_tflops * 1e12 for spec in costs.specs]),
        memory_C=np.array([spec.memory_gib for spec in costs.specs]),
    )


def _candidates(speeds: _Speeds) -> Iterator[Candidate]:
    costs, best_s = speeds.costs, np.inf
    every = [
        (_ideal_s(costs, shape), shape)
        for classes, mesh in product(ranks.kinds_in_use(costs), costs.meshes)
        for shape in ranks.shapes(costs, *mesh, classes)
    ]
    for ideal_s, shape in sorted(every, key=lambda t: t[0]):
        if ideal_s > best_s:
            break
        most = len(shape.seats) // shape.num_stages
        num_replicas = min(most, shape.num_microbatches)
        distinct = num_replicas > 1 < shape.num_stages
        for order in (ranks.in_rank_order, ranks.one_by_one)[: 1 + distinct]:
            seats_RS = order(num_replicas, shape.num_stages)
            for proportional in (False, True):
                found = _candidate(speeds, shape, seats_RS, proportional)
                best_s = min(best_s, found.step_s)
                yield found


def _ideal_s(costs: StageCosts, shape: ranks.SymmetricShape) -> float:
    """Return the seconds of a step in which every seat computes all the time."""
    p, num_C = costs.problem, np.bincount(shape.class_N)
    used = np.flatnonzero(num_C)
    busy_s_C = p.busy_s_BOU[shape.b, shape.options_C[used], p.range_IJ[0, -1]]
    rate = float((num_C[used] * shape.size / busy_s_C).sum())
    return costs.request.global_batch / rate if rate > 0 else np.inf


def _candidate(
    speeds: _Speeds, shape: ranks.SymmetricShape, seats_RS: Ints, proportional: bool
) -> Candidate:
    p, request = speeds.costs.problem, speeds.costs.request
    classes_RS = shape.class_N[seats_RS]
    if proportional:
        order_RS = (-speeds.memory_C[classes_RS]).argsort(axis=1, kind="stable")
        seats_RS = np.take_along_axis(seats_RS, order_RS, axis=1)
    classes_QS, which_R = ranks.alike(shape.class_N[seats_RS])
    cuts_Q = [_cuts(speeds, shape, row, proportional) for row in classes_QS]
    if any(cuts is None for cuts in cuts_Q):
        return Candidate(step_s=np.inf, plan=lambda: None)
    cuts_QJ = np.array(cuts_Q)
    rate_Q = _usable_flops_per_s(speeds, classes_QS, cuts_QJ)
    microbatches_R = shared_out(shape.num_microbatches, rate_Q[which_R].tolist())
    most_Q = np.zeros(len(rate_Q), dtype=np.int64)
    np.maximum.at(most_Q, which_R, microbatches_R)
    rows, step_s = (shape.b, shape.options_C[classes_QS], cuts_QJ, most_Q), np.inf
    if in_memory(p, *rows).all():
        step_s = float(closed_s(p, *rows, len(which_R)).max())
    cuts_R = [tuple(cuts_QJ[q].tolist()) for q in which_R]
    plan = partial(ranks.seated_plan, request, shape, seats_RS, cuts_R, microbatches_R)
    return Candidate(step_s=step_s, plan=plan)


def _cuts(
    speeds: _Speeds, shape: ranks.SymmetricShape, classes_S: Ints, proportional: bool
) -> StageCuts | None:
    """Return even cuts, or the cuts within memory that minimise the largest load."""
    p, num_stages = speeds.costs.problem, len(classes_S)
    if not proportional:
        return even_cuts(p.num_layers, num_stages)
    flops_IJ = speeds.flops_J[None, :] - speeds.flops_J[:, None]
    load_SIJ = flops_IJ / speeds.flops_per_s_C[classes_S][:, None, None]
    in_flight_SIJ = p.most_in_flight_BOU[
        shape.b, shape.options_C[classes_S][:, None, None], p.range_IJ
    ]
    ahead_S = np.minimum(np.arange(num_stages, 0, -1), shape.num_microbatches)
    fits_SIJ = (p.range_IJ >= 0) & (in_flight_SIJ >= ahead_S[:, None, None])
    return balanced_cuts(np.where(fits_SIJ, load_SIJ, np.inf))


def _usable_flops_per_s(speeds: _Speeds, classes_QS: Ints, cuts_QJ: Ints) -> Floats:
    """Return the model's FLOPs over the time of the most loaded stage, counting one
    device per stage."""
    flops_QS = np.diff(speeds.flops_J[cuts_QJ], axis=1)
    slowest_s_Q = (flops_QS / speeds.flops_per_s_C[classes_QS]).max(axis=1)
    return speeds.flops_J[-1] / slowest_s_Q
