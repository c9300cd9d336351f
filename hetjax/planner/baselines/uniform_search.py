# SPDX-License-Identifier: Apache-2.0
"""Finds the best plan with even cuts and equal microbatches, in Sailor's search space.

Owns that space and its search (Sailor, SOSP 2025, in our reading). All replicas have
the same number of stages, even blocks and equally many microbatches. A stage has the
same device class and tensor degree in all replicas. Classes follow one another along
the pipeline in any order, each with one tensor degree. Each stage has the fastest remat
that fits. If there are up to three classes, a pipeline may use all of them; if there
are more, at most two of the eight strongest. Does not own costs: plans are ranked by
the closed form.

Letters of array names: N pipelines, T tensor degrees, S stages, X and Y first stage
and end of a range of stages, U ranges of layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np

from hetjax.planner.baselines.stage_costs import (
    Candidate,
    StageCosts,
    after_s,
    best_first,
    priced,
    stage_costs,
)
from hetjax.planner.model.cuts import even_cuts
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.problem import Floats, Ints
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import ORDERS, placed
from hetjax.plans.plan import Plan

_MOST_CLASSES = 8
_MOST_STAGES = 16
_MOST_PRICED = 64  # the best plans, which are priced again, including held links
_HOPELESS = 1.2  # times the best; shapes with a larger lower bound are pruned


def uniform_search(request: PlanRequest) -> list[Plan]:
    """Return the best uniform plans. Raises NoFeasiblePlan if none fits memory."""
    costs = stage_costs(request)
    found = sorted(_found(costs), key=lambda f: f.step_s)[:_MOST_PRICED]
    return best_first("uniform-search", request, [_candidate(costs, f) for f in found])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """What all pipelines of one attempt have in common."""

    b: int
    num_stages: int
    num_replicas: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """The best pipeline of a shape with given classes, each with one tensor degree."""

    shape: _Shape
    step_s: float
    options: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts:
    """Seconds of stages X to Y on one class: their sum and the slowest, by tensor
    degree. Infinite if devices or memory do not suffice."""

    option_TS: Ints
    stage_s_TS: Floats
    fill_s_TXY: Floats
    most_s_TXY: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class _Labels:
    """Partial pipelines up to stage `end_N`: seconds of their stages and hops, of the
    slowest stage, and the options of all stages so far (-1 for later stages)."""

    fill_s_N: Floats
    most_s_N: Floats
    end_N: Ints
    options_NS: Ints


def _found(costs: StageCosts) -> Iterator[_Found]:
    best_s = np.inf
    sequences = _sequences(costs)
    classes = range(len(costs.request.classes))
    tries = [
        (shape, [_parts(costs, shape, c) for c in classes]) for shape in _shapes(costs)
    ]
    bounded = [(_least_s(shape, parts), shape, parts) for shape, parts in tries]
    for least_s, shape, parts in sorted(bounded, key=lambda t: t[0]):
        check_deadline()
        if least_s > _HOPELESS * best_s or not np.isfinite(least_s):
            continue
        for order in sequences:
            found = _best_of(costs, shape, [parts[c] for c in order])
            if found is not None:
                best_s = min(best_s, found.step_s)
                yield found


def _sequences(costs: StageCosts) -> list[tuple[int, ...]]:
    """Return the orders of classes along a pipeline."""
    strength = [
        spec.peak_tflops * nodes.num_devices
        for spec, nodes in zip(costs.specs, costs.request.classes, strict=True)
    ]
    order = sorted(range(len(strength)), key=lambda c: -strength[c])[:_MOST_CLASSES]
    longest = len(order) if len(order) <= 3 else 2
    return [seq for n in range(1, longest + 1) for seq in permutations(order, n)]


def _shapes(costs: StageCosts) -> Iterator[_Shape]:
    fewest = min(tensor * data for tensor, data in costs.tensor_meshes)
    room = sum(costs.num_seats_C(fewest))
    for b, size in costs.sizes:
        total = costs.request.global_batch // size
        for num_stages in range(1, min(costs.num_inner_layers, _MOST_STAGES) + 1):
            for num_replicas in range(1, min(room // num_stages, total) + 1):
                if total % num_replicas == 0:
                    yield _Shape(
                        b=b,
                        num_stages=num_stages,
                        num_replicas=num_replicas,
                        num_microbatches=total // num_replicas,
                    )


def _parts(costs: StageCosts, shape: _Shape, c: int) -> _Parts:
    check_deadline()
    num_stages = shape.num_stages
    meshes = costs.tensor_meshes
    chosen = [_fastest(costs, shape, c, tensor, data) for tensor, data in meshes]
    stage_s_TS = np.array([seconds_S for _, seconds_S in chosen])
    dims = len(meshes), num_stages + 1, num_stages + 1
    fill_s_TXY, most_s_TXY = np.full((2, *dims), np.inf)
    for x in range(num_stages):
        fill_s_TXY[:, x, x + 1 :] = stage_s_TS[:, x:].cumsum(axis=1)
        most_s_TXY[:, x, x + 1 :] = np.maximum.accumulate(stage_s_TS[:, x:], axis=1)
    for t, (tensor, data) in enumerate(meshes):
        most = costs.num_seats_C(tensor * data)[c] // shape.num_replicas
        x, y = np.indices(dims[1:])
        fill_s_TXY[t, y - x > most] = np.inf
    return _Parts(
        option_TS=np.array([options_S for options_S, _ in chosen]),
        stage_s_TS=stage_s_TS,
        fill_s_TXY=fill_s_TXY,
        most_s_TXY=most_s_TXY,
    )


def _fastest(
    costs: StageCosts, shape: _Shape, c: int, tensor: int, data: int
) -> tuple[Ints, Floats]:
    """Return the option with the fastest remat of each stage, and its seconds."""
    p, num_stages = costs.problem, shape.num_stages
    cuts = even_cuts(p.num_layers, num_stages)
    rows_S = p.range_IJ[cuts[:-1], cuts[1:]]
    ahead_S = np.minimum(np.arange(num_stages, 0, -1), shape.num_microbatches)
    options_R = np.array([o[c] for _, o in costs.remats_C(tensor, data) if o[c] >= 0])
    if not len(options_R):
        return np.full(num_stages, -1), np.full(num_stages, np.inf)
    at = shape.b, options_R[:, None], rows_S
    fits_RS = p.most_in_flight_BOU[at] >= ahead_S
    seconds_RS = np.where(fits_RS, p.busy_s_BOU[at], np.inf)
    best_S = seconds_RS.argmin(axis=0)
    return options_R[best_S], seconds_RS[best_S, np.arange(num_stages)]


def _least_s(shape: _Shape, parts: Sequence[_Parts]) -> float:
    """Return a lower bound on the step of the shape's pipelines, without hops."""
    least_S = np.min([part.stage_s_TS.min(axis=0) for part in parts], axis=0)
    if np.isinf(least_S).any():
        return np.inf
    return float(least_S.sum() + (shape.num_microbatches - 1) * least_S.max())


def _best_of(
    costs: StageCosts, shape: _Shape, parts: Sequence[_Parts]
) -> _Found | None:
    labels = _Labels(
        fill_s_N=np.zeros(1),
        most_s_N=np.zeros(1),
        end_N=np.zeros(1, dtype=np.int64),
        options_NS=np.full((1, shape.num_stages), -1),
    )
    for n, part in enumerate(parts):
        labels = _longer(costs, shape, labels, part, last=n == len(parts) - 1)
    if not len(labels.end_N):
        return None
    p, cuts = costs.problem, even_cuts(costs.problem.num_layers, shape.num_stages)
    rows_NS = np.tile(p.range_IJ[cuts[:-1], cuts[1:]], (len(labels.end_N), 1))
    step_s_N = labels.fill_s_N + (shape.num_microbatches - 1) * labels.most_s_N
    step_s_N += after_s(p, shape.b, labels.options_NS, rows_NS, shape.num_replicas)
    best = int(step_s_N.argmin())
    options = tuple(labels.options_NS[best].tolist())
    return _Found(shape=shape, step_s=float(step_s_N[best]), options=options)


def _longer(
    costs: StageCosts, shape: _Shape, labels: _Labels, part: _Parts, *, last: bool
) -> _Labels:
    """Append stages of one class: up to the end if it is `last`, else to before it."""
    num_stages = shape.num_stages
    fill_s_TNY = labels.fill_s_N[:, None] + part.fill_s_TXY[:, labels.end_N]
    ends = np.arange(num_stages + 1)
    possible_Y = ends == num_stages if last else ends < num_stages
    t, n, y = np.nonzero(np.isfinite(fill_s_TNY) & possible_Y)
    first = labels.end_N[n]
    stages = np.arange(num_stages)
    own_NS = (stages >= first[:, None]) & (stages < y[:, None])
    options_NS = np.where(own_NS, part.option_TS[t], labels.options_NS[n])
    return _Labels(
        fill_s_N=fill_s_TNY[t, n, y] + 2 * _hops_s(costs, shape, options_NS, first, y),
        most_s_N=np.maximum(labels.most_s_N[n], part.most_s_TXY[t, first, y]),
        end_N=y,
        options_NS=options_NS,
    )


def _hops_s(
    costs: StageCosts, shape: _Shape, options_NS: Ints, first: Ints, end: Ints
) -> Floats:
    """Return the seconds of the hops into stages `first` to `end`."""
    p = costs.problem
    cuts = even_cuts(p.num_layers, shape.num_stages)
    kinds = p.kind_J[list(cuts[1:-1])]
    hop_s_NS = p.hop_s_BKOO[shape.b, kinds, options_NS[:, :-1], options_NS[:, 1:]]
    into = np.arange(1, shape.num_stages)
    own_NS = (into >= first[:, None]) & (into < end[:, None])
    return (hop_s_NS * own_NS).sum(axis=1)


def _candidate(costs: StageCosts, found: _Found) -> Candidate:
    shape = found.shape
    cuts = even_cuts(costs.problem.num_layers, shape.num_stages)
    pipeline, step_s = priced(
        costs,
        shape.b,
        found.options,
        cuts,
        shape.num_microbatches,
        shape.num_replicas,
    )
    pipelines = [pipeline] * shape.num_replicas
    # a stage's replicas are next to each other where possible
    plan = partial(placed, costs.request, pipelines, ORDERS[::-1])
    return Candidate(step_s=step_s, plan=plan)
