# SPDX-License-Identifier: Apache-2.0
"""Tries the best plans so far under every schedule that the runtime has.

The search compares plans under h1f1b. Here the best of them try other orders, mainly
zero-bubble: first a few forms for each plan, finally many for the fastest. In between
comes a local search around the best plans of a few kinds, under the forms that suit
these, since the best under h1f1b need not be the best under them. It keeps to the nodes
of each plan, as a search for these nodes alone would; then the best plan of all also
tries idle devices. Last, the most promising plans try their layers in several parts
(`in_parts.py`). Owns the choice of plans, and the limits on work, which is counted, not
timed, so that equal searches end alike. Does not own the schedules
(`schedule/search.py`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Literal

from hetjax.cluster.cluster import part_of
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.evaluator import evaluate_plan, forms_for, least_step_s
from hetjax.planner.model.objectives import Objective, promise, score, within
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.in_parts import in_parts
from hetjax.planner.search.local_search import (
    alike,
    local_search,
    onto_idle,
    unscheduled,
)
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

Forms = tuple[int, ...] | Literal["all", "usual"]
# by plan, whether the search climbed, and its forms; None if none fits
Tried = MutableMapping[tuple[Plan, bool, Forms], Predicted | None]
# limits for plans under the usual forms: the number of plans, of all their forwards,
# and of kinds whose best plan is among them
_MOST_PLANS, _MOST_FORWARDS, _MOST_UNLIKE = 40, 5_000, 16
_MOST_STARTS, _NEARLY = 3, 1.05  # starts of local search: kinds, and times the best
# rounds per start, the work of each (about 50 plans), and the forms of their schedules
_ROUNDS, _MOVED_WORK, _NUM_FORMS = 3, 8_000, 3
# most forwards of a plan for climbing, for local search, and for all forms
_CLIMBED, _MOVED, _IN_FULL = 150, 400, 2_000
# plans in several parts: the numbers of parts; the best plans, which come first, and
# the most; the most forwards in all; the share of waiting that the ranking assumes
# saved; and the least gain, which makes up for messages and programs for every part
_PARTS, _BEST_IN_PARTS, _MOST_IN_PARTS, _MOST_PARTS_FORWARDS = (2, 3, 4), 4, 24, 12_000
_SAVED, _LEAST_GAIN = 2 / 3, 0.01


def finished(
    request: PlanRequest,
    objective: Objective,
    simulated: Iterable[Predicted],
    known: Tried,
) -> Iterator[Predicted]:
    """Yield the best of these plans, by the objective, under faster schedules.

    Plans in `known` are not tried again. Raises TimeUp between two plans when the time
    is up (`model/deadline.py`).
    """
    by_wish = partial(score, cluster=request.cluster, objective=objective)
    promised = partial(promise, cluster=request.cluster, objective=objective)
    kept = [found for found in simulated if within(found, objective)]
    tried: list[tuple[Predicted, Plan]] = []
    best_s = min((found.simulation.step_time_s for found in kept), default=math.inf)
    for before in _few(request, _ranked(kept, by_wish, promised)):
        # no order makes these faster; the best plan itself may gain a little, since the
        # halves of a backward pass can take less time than the whole
        if objective.wish == "time" and before.simulation.busiest_s > best_s:
            continue
        found = _tried(request, before.plan, known, forms="usual")
        if found is not None:
            tried.append((found, before.plan))
            best_s = min(best_s, found.simulation.step_time_s)
            yield found
    if not tried:
        return
    small = [found for found, before in tried if before.num_forwards <= _MOVED]
    ends: list[Plan] = []
    for start in _starts(small, by_wish):
        end = start
        for end in _moved(request, objective, start, known):
            yield end
            tried.append((end, unscheduled(end.plan)))
        ends.append(unscheduled(end.plan))
    start, _ = min(tried, key=lambda each: by_wish(each[0]))
    end = start
    for end in _onto_idle_nodes(request, objective, start, known):
        yield end
        tried.append((end, unscheduled(end.plan)))
    if end is not start:
        ends.append(unscheduled(end.plan))
    best, fastest = min(tried, key=lambda each: by_wish(each[0]))
    for plan in dict.fromkeys([*ends, fastest]):
        if found := _in_full(request, plan, known):
            yield found
            best = min(best, found, key=by_wish)
    yield from _finished_in_parts(request, objective, best, tried, known)


def _finished_in_parts(
    request: PlanRequest,
    objective: Objective,
    best: Predicted,
    tried: Iterable[tuple[Predicted, Plan]],
    known: Tried,
) -> Iterator[Predicted]:
    """Yield the plans of `tried` in several parts that are clearly better than `best`,
    and the plan that local search leads to from the best of these.

    The best plans come first, then those that promise most: promises favour plans that
    wait for slow links.
    """
    by_wish = partial(score, cluster=request.cluster, objective=objective)
    promised = partial(promise, cluster=request.cluster, objective=objective)
    most = by_wish(best) * (1 - _LEAST_GAIN)
    near = [each for each in tried if promised(each[0], filled=1.0) < most]
    near.sort(key=lambda each: by_wish(each[0]))
    ranked = sorted(near, key=lambda each: promised(each[0], filled=_SAVED))
    plans = [*dict.fromkeys(plan for _, plan in (*near[:_BEST_IN_PARTS], *ranked))]
    better: list[Predicted] = []
    for found in _in_parts(request, plans, known):
        if within(found, objective) and by_wish(found) < most:
            yield found
            better.append(found)
    if not better:
        return
    first = last = min(better, key=by_wish)
    if first.plan.num_forwards <= _MOVED:
        work = _MOVED_WORK // 2
        for last in _moved(request, objective, first, known, work):
            yield last
    for plan in dict.fromkeys(unscheduled(each.plan) for each in (first, last)):
        if found := _in_full(request, plan, known):
            yield found


def _onto_idle_nodes(
    request: PlanRequest, objective: Objective, best: Predicted, known: Tried
) -> Iterator[Predicted]:
    """Yield better plans with some work of `best` on nodes that it leaves idle, and
    those that local search then leads to."""
    plan = unscheduled(best.plan)
    if plan.nodes == request.cluster.names or plan.num_forwards > _MOVED:
        return
    by_wish = partial(score, cluster=request.cluster, objective=objective)
    forms = forms_for(request, plan, _NUM_FORMS)
    spread = (
        p for group in alike(plan, request) for p in onto_idle(plan, group, request)
    )
    judged = (
        _judged(request, objective, each, known, forms)
        for each in islice(spread, _MOST_PLANS)
    )
    found = min(filter(None, judged), key=by_wish, default=best)
    if by_wish(found) < by_wish(best):
        yield found
        yield from _moved(request, objective, found, known)


def _moved(
    request: PlanRequest,
    objective: Objective,
    start: Predicted,
    known: Tried,
    work: float = _MOVED_WORK,
) -> Iterator[Predicted]:
    """Yield the better plan that each round of local search leads to. A round may do
    this much work, and tries the forms that suit the plan at its start: better plans
    may want others. Plans use only the nodes of the start."""
    there = replace(request, cluster=part_of(request.cluster, start.plan.nodes))
    by_wish = partial(score, cluster=request.cluster, objective=objective)
    least = partial(least_step_s, request) if objective.wish == "time" else None
    for _ in range(_ROUNDS):
        forms = forms_for(request, unscheduled(start.plan), _NUM_FORMS)

        def evaluate(plan: Plan, forms: Forms = forms) -> Predicted | None:
            return _judged(request, objective, plan, known, forms)

        moved = local_search(
            start, evaluate, by_wish, there, most_work=work, least=least
        )
        if moved is start:
            return
        yield moved
        start = moved


def _judged(
    request: PlanRequest, objective: Objective, plan: Plan, known: Tried, forms: Forms
) -> Predicted | None:
    """Return a moved plan under the fastest of these forms; None if it exceeds memory
    or a limit of the objective."""
    found = _tried(request, request.said(plan), known, forms=forms)
    return found if found is not None and within(found, objective) else None


def _in_full(request: PlanRequest, plan: Plan, known: Tried) -> Predicted | None:
    """Return the plan under all forms, and climb if it is small; None if too large."""
    if plan.num_forwards > _IN_FULL:
        return None
    return _tried(request, plan, known, climbs=plan.num_forwards <= _CLIMBED)


def _in_parts(
    request: PlanRequest, plans: Sequence[Plan], known: Tried
) -> Iterator[Predicted]:
    """Yield the first of these plans in two parts and more, within the work limit."""
    work = 0
    for plan in plans[:_MOST_IN_PARTS]:
        for num_parts in _PARTS:
            cut = in_parts(plan, num_parts)
            if cut is None or work + cut.num_forwards > _MOST_PARTS_FORWARDS:
                continue
            work += cut.num_forwards
            found = _tried(request, cut, known, forms="usual")
            if found is not None:
                yield found


def _starts(
    tried: Sequence[Predicted], by: Callable[[Predicted], float]
) -> list[Predicted]:
    """Return the best plan of every kind, if nearly as good as the best of all: moves
    seldom lead from one kind to another."""
    of_kind: dict[object, Predicted] = {}
    for found in sorted(tried, key=by):
        of_kind.setdefault(_kind(found.plan), found)
    best = min(map(by, of_kind.values()), default=0.0)
    most = best + abs(best) * (_NEARLY - 1)
    return [found for found in of_kind.values() if by(found) <= most][:_MOST_STARTS]


def _kind(plan: Plan) -> object:
    """Return the nodes of the plan, and the numbers of stages of its replicas."""
    return frozenset(plan.nodes), tuple(sorted(len(r.stages) for r in plan.replicas))


def _ranked(
    kept: Sequence[Predicted], *by: Callable[[Predicted], float]
) -> list[Predicted]:
    """Return the best by each of these; then the most promising of a few kinds and
    microbatch sizes, since schedules differ in gain between these; then all."""
    ranked = sorted(kept, key=by[-1])
    unlike: dict[object, Predicted] = {}
    for found in ranked:
        sizes = frozenset(r.microbatch_size for r in found.plan.replicas)
        unlike.setdefault((_kind(found.plan), sizes), found)
    best = [min(kept, key=each) for each in by if kept]
    return [*best, *list(unlike.values())[:_MOST_UNLIKE], *ranked]


def _tried(
    request: PlanRequest,
    plan: Plan,
    known: Tried,
    *,
    climbs: bool = False,
    forms: Forms = "all",
) -> Predicted | None:
    """Return the plan under the fastest schedule found; None if none fits memory."""
    if (plan, climbs, "all") in known:
        return known[plan, climbs, "all"]
    if (plan, climbs, forms) not in known:
        check_deadline()
        try:
            found = evaluate_plan(request, plan, "searched", climbs=climbs, forms=forms)
        except NoFeasiblePlan:
            found = None
        known[plan, climbs, forms] = found
    return known[plan, climbs, forms]


def _few(request: PlanRequest, ranked: Sequence[Predicted]) -> Iterator[Predicted]:
    """Yield the first of these that differ in `_cuts`, within the work limit."""
    seen, work = set[object](), 0
    for found in ranked:
        work_of_one = found.plan.num_forwards
        cuts = _cuts(request, found.plan)
        if cuts in seen or work + work_of_one > _MOST_FORWARDS:
            continue
        seen.add(cuts)
        work += work_of_one
        yield found
        if len(seen) == _MOST_PLANS:
            return


def _cuts(request: PlanRequest, plan: Plan) -> object:
    """Return the cuts and microbatches of replicas, without their places among equal
    nodes, and without remat, which local search chooses."""
    class_of = request.class_of
    return tuple(
        sorted(
            (
                replica.num_microbatches,
                replica.microbatch_size,
                tuple(
                    (class_of[x.node], x.mesh.tensor, x.mesh.data, x.layers)
                    for x in replica.stages
                ),
            )
            for replica in plan.replicas
        )
    )
