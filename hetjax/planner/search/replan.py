# SPDX-License-Identifier: Apache-2.0
"""Finds a new plan for a changed cluster, counting the cost of moving state.

Owns the plans that reuse what survives there: whole replicas, or stages with new cuts.
Both are quick to find and seldom the best. Owns the trade between a faster step and a
longer move. Does not own how layers are cut (`model/cuts.py`), the search (`find.py`)
nor the state that a move fetches (`costs/network/moved_state.py`).

Letters of array names as in `model/problem.py`; S stages of one pipeline.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hetjax.costs.network.moved_state import fetched_bytes, fetching_s
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.cuts import balanced_cuts
from hetjax.planner.model.deadline import TimeUp, check_deadline
from hetjax.planner.model.evaluator import PlanEvaluator, as_planned
from hetjax.planner.model.objectives import Objective, score, within
from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import UnplacedReplica, plan_of, seated
from hetjax.planner.model.simplicity import AS_GOOD, simplest, simplified
from hetjax.planner.model.terms.terms import search_problem
from hetjax.planner.search.find import find_plan
from hetjax.planner.search.first.proposals import plans_by_rank, proposals
from hetjax.planner.search.in_parts import in_one_part
from hetjax.planner.search.local_search import local_search
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.schedules import SCHEDULES
from hetjax.schedule.predicted import Predicted

_TIME = Objective()
_NO_PLANS: Mapping[str, Plan] = {}
_WORK = 5_000  # of a local search: about a second
_LEAST_GAIN = 1e-9  # if a move takes longer than the horizon


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """The plan to continue with; `move_s` is the time until its state is in place."""

    best: Predicted
    source: str
    moved_bytes: float
    move_s: float
    search_s: float


def replan(
    request: PlanRequest,
    current: Plan,
    horizon_s: float = 3600.0,
    objective: Objective = _TIME,
    *,
    others: Mapping[str, Plan] = _NO_PLANS,
    as_simple: bool = False,
) -> Replanned:
    """Return the plan that gets most done before the horizon: the time that its move
    leaves, divided by its score. `as_simple`: the simplest of equally good plans, also
    by larger microbatches.

    `request.cluster` is the present cluster. Time matters more than the last percent,
    so only tensor degrees in use are tried; if no plan with these fits, `find_plan`
    searches everything. If some node of the cluster has no stage of the current plan, a
    local search starts from the best plan. `others` are further plans to choose from,
    by name, as they are or under another schedule. Raises NoFeasiblePlan if nothing
    fits.
    """
    begin_s = time.monotonic()
    # a plan with split backward passes may keep them, if memory allows
    schedules = ["h1f1b", *["zero-bubble"] * SCHEDULES[current.schedule].splits]
    evaluators = [PlanEvaluator(request, schedule) for schedule in schedules]

    def judge(plan: Plan) -> list[Predicted]:
        found = (evaluate(plan) for evaluate in evaluators)
        return [x for x in found if x is not None and within(x, objective)]

    def gain(found: Predicted) -> float:
        _, move_s = _move(request, current, found.plan)
        left_s = max(horizon_s - move_s, 0.0)
        return left_s / score(found, request.cluster, objective)

    choices = _choices(request, current, objective, others, judge)
    if not request.cluster.names <= current.nodes:
        _, start = max(choices, key=lambda each: gain(each[1]))
        for evaluate in evaluators:
            near = _nearby(start, evaluate, gain, request, objective)
            choices.append(("local search", near))
    source, best = max(choices, key=lambda each: gain(each[1]))
    if as_simple:
        source, best = _simplest(request, choices, gain, judge)
    moved_bytes, move_s = _move(request, current, best.plan)
    return Replanned(
        best=best,
        source=source,
        moved_bytes=moved_bytes,
        move_s=move_s,
        search_s=time.monotonic() - begin_s,
    )


def _choices(
    request: PlanRequest,
    current: Plan,
    objective: Objective,
    others: Mapping[str, Plan],
    judge: Callable[[Plan], list[Predicted]],
) -> list[tuple[str, Predicted]]:
    """Return the plans to choose from, with their sources; at least one.

    When the time is up, one is enough. Raises NoFeasiblePlan.
    """
    choices: list[tuple[str, Predicted]] = []
    for plans in (
        _left(request, current),
        _templates(request, current),
        others.items(),
    ):
        with suppress(TimeUp):
            for source, plan in plans:
                choices += [(source, found) for found in judge(plan)]
                if choices:
                    check_deadline()
    as_they_are = dict(others)
    if _is_there(request, current):
        as_they_are["the current plan"] = current
    for source, plan in as_they_are.items():  # under their own schedules and programs
        with suppress(NoFeasiblePlan):
            found = as_planned(request, plan)
            if within(found, objective):
                choices.append((source, found))
    if not choices:
        found = find_plan(request, objective, local_work=0)
        choices.append((found.source, found.best))
    return choices


def _simplest(
    request: PlanRequest,
    choices: Sequence[tuple[str, Predicted]],
    gain: Callable[[Predicted], float],
    judge: Callable[[Plan], list[Predicted]],
) -> tuple[str, Predicted]:
    """Return the simplest plan that is as good as the best choice, and its source."""
    gains = [gain(found) for _, found in choices]
    source, start = choices[simplest([found.plan for _, found in choices], gains)]

    def as_good(plan: Plan) -> Predicted | None:
        found = max(judge(plan), key=gain, default=None)
        least = max(gains) * (1 - AS_GOOD)
        return found if found is not None and gain(found) >= least else None

    return source, simplified(start, request.microbatch_sizes, as_good)


def _nearby(
    start: Predicted,
    evaluate: PlanEvaluator,
    gain: Callable[[Predicted], float],
    request: PlanRequest,
    objective: Objective,
) -> Predicted:
    """Return the plan of most gain that a short local search finds, or the start."""

    def judged(plan: Plan) -> Predicted | None:
        check_deadline()
        found = evaluate(plan)
        return found if found is not None and within(found, objective) else None

    by = lambda found: 1 / max(gain(found), _LEAST_GAIN)  # noqa: E731
    with suppress(TimeUp):
        return local_search(start, judged, by, request, most_work=_WORK)
    return start


def _is_there(request: PlanRequest, current: Plan) -> bool:
    """Return whether the current plan can continue as it is."""
    return request.global_batch == current.global_batch and all(
        stages_there(request, replica) == replica.stages for replica in current.replicas
    )


def _left(request: PlanRequest, current: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield plans made of what survives of the current plan."""
    kept = survivors(request, current)
    if kept is not None:
        yield "the surviving replicas", kept
    cut_anew = repaired(request, current)
    if cut_anew is not None:
        yield "the surviving stages", cut_anew


def _templates(request: PlanRequest, current: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield the model's proposals with the tensor degrees in use."""
    in_use = {stage.mesh.tensor for _, _, stage in current.stages()}
    degrees = tuple(sorted(in_use & set(request.degrees))) or request.degrees
    same = replace(request, tensor_degrees=degrees)
    proposed = list(proposals(same, whole=True, quick=True))
    for plan in plans_by_rank(proposed):
        yield "templates", plan


def survivors(request: PlanRequest, current: Plan) -> Plan | None:
    """Return the plan of the replicas that lost no device; None if there is none.

    They take over the lost microbatches in proportion to their own.
    """
    whole = [
        replica
        for replica in current.replicas
        if stages_there(request, replica) == replica.stages
    ]
    left = request.global_batch - sum(
        r.num_microbatches * r.microbatch_size for r in whole
    )
    counts = handed_out(
        [r.num_microbatches for r in whole],
        [r.microbatch_size for r in whole],
        left,
        lambda n, count: count / whole[n].num_microbatches,
    )
    if not counts or left < 0:
        return None
    replicas = tuple(
        replace(replica, num_microbatches=count)
        for replica, count in zip(whole, counts, strict=True)
    )
    return replace(
        current,
        global_batch=request.global_batch,
        schedule="1f1b",
        replicas=replicas,
        programs={},
        predicted=None,
    )


def _move(request: PlanRequest, current: Plan, plan: Plan) -> tuple[float, float]:
    """Return the bytes of state that a move fetches, and how many seconds it takes."""
    model = request.model
    fetched = fetched_bytes(model, current, plan)
    return sum(fetched.values()), fetching_s(model, request.cluster, current, plan)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cut:
    """A pipeline on the surviving seats, and its times."""

    stages: tuple[Stage, ...]
    pipeline: UnplacedReplica
    fill_s: float
    slowest_s: float

    def time_s(self, num_microbatches: int) -> float:
        return self.fill_s + (num_microbatches - 1) * self.slowest_s


def repaired(request: PlanRequest, current: Plan) -> Plan | None:
    """Return the plan of the stages that lost no device, with new cuts and microbatch
    counts, and all layers of a device in one part.

    None if they cannot hold the model, or if microbatches cannot make up the batch.
    """
    replicas = in_one_part(current).replicas
    left = [(replica, stages_there(request, replica)) for replica in replicas]
    meshes = [stage.mesh for _, stages in left for stage in stages]
    if not meshes:
        return None
    used = replace(
        request,
        tensor_degrees=tuple(sorted({mesh.tensor for mesh in meshes})),
        data_degrees=tuple(sorted({mesh.data for mesh in meshes})),
        microbatch_sizes=tuple(sorted({r.microbatch_size for r, _ in left})),
    )
    alone = sum(1 for _, stages in left if stages) == 1
    p = search_problem(used, used.degrees, num_replicas=1 if alone else np.inf)
    cuts = [_cut(request, p, r, stages) for r, stages in left if stages]
    found = [cut for cut in cuts if cut is not None]
    counts = handed_out(
        [0] * len(found),
        [cut.pipeline.microbatch_size for cut in found],
        request.global_batch,
        lambda n, count: found[n].time_s(count),
    )
    if not counts:
        return None
    return plan_of(
        request,
        [
            seated(
                replace(cut.pipeline, num_microbatches=count),
                [(stage.node, stage.devices) for stage in cut.stages],
            )
            for cut, count in zip(found, counts, strict=True)
            if count
        ],
    )


def stages_there(request: PlanRequest, replica: Replica) -> tuple[Stage, ...]:
    """Return the replica's stages whose devices are all present."""
    counts = {node.name: node.count for node in request.cluster.nodes}
    return tuple(s for s in replica.stages if max(s.devices) < counts.get(s.node, 0))


def _cut(
    request: PlanRequest, p: Problem, replica: Replica, stages: tuple[Stage, ...]
) -> _Cut | None:
    """Return the cuts whose slowest stage is fastest; None if none fits memory."""
    class_of = {n.name: c for c, k in enumerate(request.classes) for n in k.nodes}
    b = p.microbatch_sizes.index(replica.microbatch_size)
    shapes = [(o.device_class, o.tensor, o.data) for o in p.options]
    own = [(class_of[s.node], s.mesh.tensor, s.mesh.data) for s in stages]
    options = [
        np.array([n for n, shape in enumerate(shapes) if shape == mine]) for mine in own
    ]
    times = [_times(p, b, o, len(stages) - s) for s, o in enumerate(options)]
    cuts = balanced_cuts(np.stack([seconds_IJ for seconds_IJ, _ in times]))
    if cuts is None:
        return None
    ranges = list(pairwise(cuts))
    seconds = [times[s][0][at] for s, at in enumerate(ranges)]
    chosen = [int(times[s][1][at]) for s, at in enumerate(ranges)]
    return _Cut(
        stages=stages,
        pipeline=UnplacedReplica(
            num_microbatches=1,
            microbatch_size=replica.microbatch_size,
            stages=tuple(
                (p.options[o], at) for o, at in zip(chosen, ranges, strict=True)
            ),
        ),
        fill_s=float(sum(seconds)),
        slowest_s=float(max(seconds)),
    )


def _times(p: Problem, b: int, options_O: Ints, ahead: int) -> tuple[Floats, Ints]:
    """Return the least seconds of a stage by range of layers, and the option."""
    rows_IJ = np.maximum(p.range_IJ, 0)
    seconds_OIJ = p.busy_s_BOU[b, options_O][:, rows_IJ]
    held_OIJ = p.most_in_flight_BOU[b, options_O][:, rows_IJ]
    fits_OIJ = (held_OIJ >= ahead) & (p.range_IJ >= 0) & ~np.isnan(seconds_OIJ)
    seconds_OIJ = np.where(fits_OIJ, seconds_OIJ, np.inf)
    return seconds_OIJ.min(axis=0), options_O[seconds_OIJ.argmin(axis=0)]


def handed_out(
    counts: Sequence[int],
    sizes: Sequence[int],
    num_sequences: int,
    done_s: Callable[[int, int], float],
) -> list[int]:
    """Return `counts` plus microbatches for `num_sequences`. Each in turn goes to the
    pipeline that ends first, by `done_s(pipeline, count)`. Empty if they do not add up.
    """
    counts, left = list(counts), num_sequences
    while left > 0:
        fits = [n for n, size in enumerate(sizes) if size <= left]
        if not fits:
            return []
        n = min(fits, key=lambda n: done_s(n, counts[n] + 1))
        counts[n] += 1
        left -= sizes[n]
    return counts
