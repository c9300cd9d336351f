# SPDX-License-Identifier: Apache-2.0
"""Finds AutoHet's plans (arXiv 2512.20953) by our reconstruction of its two stages.

Owns the reconstruction; the paper's own equations are not public:

1. Device grouping: units (tensor groups of equal devices) form D data-parallel groups
   that each hold one replica. The power of the weakest group is maximised. A group of P
   units that computes K microbatches has effective power K / (K + P - 1) * sum of its
   units' powers. Units of a class are alike, so a group is a mix: its number of units
   of each class. The search over the least power solves an integer program (CVXPY,
   HiGHS) at each value.
2. Mapping and partition of each group: devices of large memory come first. Within
   memory, cuts minimise the sum of stages and hops plus K - 1 times the slowest stage.

All groups have equally many microbatches. Tensor degree (one for all layers, the
paper's first observation), microbatch size, remat and D are enumerated outside; those
with the most promising powers are solved. A unit's power is the sequences per second
that it would compute alone. Does not own cuts (`model/cuts.py`) nor costs.

Letters of array names: N mixes of units, C device classes, S stages, A microbatches
in flight from 0, I and J first layer and end of a range.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from math import comb

import cvxpy as cp
import numpy as np
from numpy.typing import NDArray

from hetjax.planner.baselines.stage_costs import (
    Candidate,
    StageCosts,
    best_first,
    priced,
    stage_costs,
)
from hetjax.planner.model.cuts import StageCuts, fastest_cuts
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.problem import Floats, Ints
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import placed
from hetjax.planner.model.solver import solve
from hetjax.plans.plan import Plan

_MOST_TRIED = 8  # groupings that are solved
_MOST_MIXES = 1500
_MOST_DEEP = 16  # units of a group


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixes:
    """Mixes on which a replica fits, with their effective powers."""

    units_NC: Ints
    power_N: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """Mixes with the number of groups of each, and the power of the weakest group."""

    groups: tuple[tuple[tuple[int, ...], int], ...]
    least_power: float


def mixes(units_C: Sequence[int], most_units: int) -> Ints:
    """Return every mix of up to `most_units` units from up to four classes.

    No mix has more than `_MOST_DEEP` units. If there are too many mixes, they are
    limited to fewer units, or to fewer classes each.
    """
    num_classes, most = len(units_C), min(most_units, _MOST_DEEP, sum(units_C))
    kinds, deep = min(num_classes, 4), most
    while kinds > 1 and _num_mixes(num_classes, kinds, deep) > _MOST_MIXES:
        kinds, deep = (kinds, deep - 1) if deep > 8 else (kinds - 1, most)
    found = [
        mix
        for n in range(1, kinds + 1)
        for chosen in combinations(range(num_classes), n)
        for mix in _mixes_of(units_C, chosen, deep)
    ]
    return np.array(found, dtype=np.int64).reshape(-1, num_classes)


def _num_mixes(num_classes: int, kinds: int, deep: int) -> int:
    return sum(comb(num_classes, n) * comb(deep, n) for n in range(1, kinds + 1))


def _mixes_of(
    units_C: Sequence[int], chosen: Sequence[int], deep: int
) -> list[tuple[int, ...]]:
    """Return the mixes with at least one unit of each chosen class and no others."""
    counts = [range(1, min(units_C[c], deep) + 1) for c in chosen]
    found = []
    for units in product(*counts):
        if sum(units) <= deep:
            row = [0] * len(units_C)
            for c, num in zip(chosen, units, strict=True):
                row[c] = num
            found.append(tuple(row))
    return found


def effective_power(units_NC: Ints, power_C: Floats, num_microbatches: int) -> Floats:
    """Return K / (K + P - 1) times the sum of the units' powers: without the bubble."""
    depth_N = units_NC.sum(axis=1)
    return num_microbatches / (num_microbatches + depth_N - 1) * (units_NC @ power_C)


def balanced_groups(
    there: Mixes, units_C: Sequence[int], num_groups: int, most_power: float = np.inf
) -> Grouping | None:
    """Return `num_groups` groups that maximise the power of the weakest.

    `most_power` is an upper bound on that power, if known; a good one saves solving.

    Units stay idle if that makes the weakest group stronger; otherwise as much power as
    possible is used. None if there are too few units.
    """
    powers = np.unique(there.power_N)
    low, step = -1, 1
    high = int(np.searchsorted(powers, most_power * (1 + 1e-9))) - 1
    while low < high:
        # the best is near the upper limit: begin there, with longer and longer steps
        middle = max((low + high + 1) // 2, high - step)
        if _most_groups(there, units_C, powers[middle]) >= num_groups:
            low = middle
        else:
            high, step = middle - 1, 4 * step
    if low < 0:
        return None
    counts_N = _fullest(there, units_C, powers[low], num_groups)
    return Grouping(
        groups=tuple(
            (tuple(there.units_NC[n].tolist()), int(counts_N[n]))
            for n in np.flatnonzero(counts_N)
        ),
        least_power=float(there.power_N[counts_N > 0].min()),
    )


def _most_groups(there: Mixes, units_C: Sequence[int], least_power: float) -> int:
    """Return how many groups of at least that power there can be."""
    units_NC = _smallest(there.units_NC[there.power_N >= least_power])
    counts_N = cp.Variable(len(units_NC), integer=True)
    within = [counts_N >= 0, units_NC.T @ counts_N <= np.array(units_C)]
    _solve(cp.Problem(cp.Maximize(cp.sum(counts_N)), [*within]))
    return int(_whole(counts_N).sum())


def _smallest(units_NC: Ints) -> Ints:
    """Return the mixes that contain no other of the mixes."""
    holds_NN = (units_NC[:, None] >= units_NC).all(axis=2)
    return units_NC[holds_NN.sum(axis=1) == 1]


def _fullest(
    there: Mixes, units_C: Sequence[int], least_power: float, num_groups: int
) -> Ints:
    strong = np.flatnonzero(there.power_N >= least_power)
    counts_N = cp.Variable(len(strong), integer=True)
    limits = [
        counts_N >= 0,
        there.units_NC[strong].T @ counts_N <= np.array(units_C),
        cp.sum(counts_N) == num_groups,
    ]
    used = there.power_N[strong] / there.power_N.max()
    _solve(cp.Problem(cp.Maximize(used @ counts_N), limits))
    found_N = np.zeros(len(there.power_N), dtype=np.int64)
    found_N[strong] = _whole(counts_N)
    return found_N


def _solve(problem: cp.Problem) -> None:
    check_deadline()
    solve(problem)
    assert problem.status in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE), problem.status


def _whole(counts_N: cp.Variable) -> Ints:
    assert counts_N.value is not None
    return np.rint(counts_N.value).astype(np.int64)


def autohet(request: PlanRequest) -> list[Plan]:
    """Return the best plans by grouping, then cuts. Raises NoFeasiblePlan if none is
    possible."""
    costs = stage_costs(request)
    tasks = sorted(_tasks(costs), key=lambda task: task.promised_s)
    candidates: list[Candidate] = []
    for task in tasks[:_MOST_TRIED]:
        grouping = balanced_groups(
            task.mixes, task.units_C, task.num_groups, task.most_power
        )
        if grouping is not None:
            candidates.append(_candidate(costs, task, grouping))
    return best_first("autohet", request, candidates)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Task:
    """One grouping to solve. The weakest group has at most `most_power`, which means a
    step of about `promised_s`."""

    b: int
    options_C: Ints
    units_C: tuple[int, ...]
    num_groups: int
    num_microbatches: int
    mixes: Mixes
    most_power: float
    promised_s: float


def _tasks(costs: StageCosts) -> Iterator[_Task]:
    for tensor, data in costs.tensor_meshes:
        units_C = costs.num_seats_C(tensor * data)
        units_NC = mixes(units_C, costs.num_inner_layers)
        for b, size in costs.sizes:
            if size % data == 0:
                for _, options_C in costs.remats_C(tensor, data):
                    yield from _tasks_at(costs, b, options_C, units_C, units_NC)


def _tasks_at(
    costs: StageCosts, b: int, options_C: Ints, units_C: tuple[int, ...], units_NC: Ints
) -> Iterator[_Task]:
    p, size = costs.problem, costs.problem.microbatch_sizes[b]
    whole = p.range_IJ[0, -1]
    power_C = np.where(options_C >= 0, size / p.busy_s_BOU[b, options_C, whole], 0.0)
    total = costs.request.global_batch // size
    units_NC = units_NC[_fits(costs, b, options_C, units_NC, total)]
    if not len(units_NC):
        return
    shallowest = int(units_NC.sum(axis=1).min())
    for num_groups in range(1, min(sum(units_C) // shallowest, total) + 1):
        check_deadline()
        if total % num_groups:
            continue
        num_microbatches = total // num_groups
        power_N = effective_power(units_NC, power_C, num_microbatches)
        bubble = num_microbatches / (num_microbatches + shallowest - 1)
        average = float(np.dot(power_C, units_C)) / num_groups * bubble
        most_power = min(average, float(power_N.max()))
        yield _Task(
            b=b,
            options_C=options_C,
            units_C=units_C,
            num_groups=num_groups,
            num_microbatches=num_microbatches,
            mixes=Mixes(units_NC=units_NC, power_N=power_N),
            most_power=most_power,
            promised_s=num_microbatches * size / most_power
            + _sync_s(costs, b, options_C, units_C, num_groups),
        )


def _sync_s(
    costs: StageCosts,
    b: int,
    options_C: Ints,
    units_C: tuple[int, ...],
    num_groups: int,
) -> float:
    """Estimate a gradient sum: a stage's share of the model, with equal groups."""
    p, depth = costs.problem, max(sum(units_C) / num_groups, 1.0)
    options = options_C[options_C >= 0]
    whole_s = float(p.after_s_ABOU[0, b, options, p.range_IJ[0, -1]].max())
    return (1 - 1 / num_groups) * whole_s / depth


def _stages_S(costs: StageCosts, units_C: Ints) -> Ints:
    """Return the classes of a group's stages: large memory first, since early stages
    hold more microbatches."""
    memory = [-spec.memory_gib for spec in costs.specs]
    order = np.array(sorted(range(len(memory)), key=memory.__getitem__))
    return np.repeat(order, units_C[order])


def _fits(
    costs: StageCosts, b: int, options_C: Ints, units_NC: Ints, num_microbatches: int
) -> NDArray[np.bool_]:
    """Return for each mix whether its stages, filled in order, hold all layers."""
    num_layers = costs.problem.num_layers
    stages_N = [_stages_S(costs, units_C) for units_C in units_NC]
    deepest = max(map(len, stages_N), default=0)
    reach_CAI = _reach(costs, b, options_C, deepest)
    layer_N, stuck_N = np.zeros((2, len(units_NC)), dtype=np.int64)
    for s in range(deepest):
        has = np.array([n for n, stages in enumerate(stages_N) if s < len(stages)])
        classes = np.array([stages_N[n][s] for n in has])
        ahead = np.array([min(len(stages_N[n]) - s, num_microbatches) for n in has])
        to_N = reach_CAI[classes, ahead, layer_N[has]]
        stuck_N[has] |= (to_N == layer_N[has]) & (to_N < num_layers)
        layer_N[has] = to_N
    return (layer_N == num_layers) & (stuck_N == 0)


def _reach(costs: StageCosts, b: int, options_C: Ints, deepest: int) -> Ints:
    """Return the last end of a stage that begins at layer I with A in flight."""
    p = costs.problem
    most_CIJ = p.most_in_flight_BOU[b, options_C][:, p.range_IJ]
    most_CIJ = np.where(p.range_IJ >= 0, most_CIJ, 0)
    fits_ACIJ = most_CIJ >= np.arange(1, deepest + 1)[:, None, None, None]
    ends_ACI = np.arange(p.num_layers + 1) + fits_ACIJ.sum(axis=3)
    return np.moveaxis(np.concatenate([0 * ends_ACI[:1], ends_ACI]), 0, 1)


def _candidate(costs: StageCosts, task: _Task, grouping: Grouping) -> Candidate:
    step_s, pipelines = 0.0, []
    for units, num in grouping.groups:
        classes_S = _stages_S(costs, np.array(units))
        cuts = _cuts(costs, task, classes_S)
        if cuts is None:
            return Candidate(step_s=np.inf, plan=lambda: None)
        pipeline, seconds = priced(
            costs,
            task.b,
            task.options_C[classes_S].tolist(),
            cuts,
            task.num_microbatches,
            task.num_groups,
        )
        step_s = max(step_s, seconds)
        pipelines += [pipeline] * num
    # a group's stages are next to each other where possible
    return Candidate(step_s=step_s, plan=partial(placed, costs.request, pipelines))


def _cuts(costs: StageCosts, task: _Task, classes_S: Ints) -> StageCuts | None:
    """Return the cuts with the least closed form; hops do not depend on them."""
    p, at = costs.problem, (task.b, task.options_C[classes_S])
    ahead_S = np.minimum(np.arange(len(classes_S), 0, -1), task.num_microbatches)
    stage_s_SU = np.where(
        p.most_in_flight_BOU[at] >= ahead_S[:, None], p.busy_s_BOU[at], np.inf
    )
    stage_s_SIJ = np.where(p.range_IJ >= 0, stage_s_SU[:, p.range_IJ], np.inf)
    return fastest_cuts(stage_s_SIJ, task.num_microbatches)
