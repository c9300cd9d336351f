# SPDX-License-Identifier: Apache-2.0
"""Why devices stay idle or do not: the best plan that has to use more of their kind,
and the best without a kind that is used.

Owns that plans with more are looked for, and that both are held against the best. Does
not own the search (`find.py`) nor which devices are idle (`model/seating.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from hetjax.planner.model.deadline import TimeUp, deadline, left_s
from hetjax.planner.model.objectives import Objective, score, within
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import idle_devices
from hetjax.planner.search.find import Found, Search
from hetjax.planner.search.local_search import alike, local_search, onto_idle
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

_LOCAL_WORK = 7_500  # of local search, for each kind that is idle


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Devices of one class that the best plan does without.

    `instead` is the best plan found with more devices of the class, None if none was
    found that fits; `worse` how much worse it is by what is wished, as a share.
    """

    kind: str
    devices: Mapping[str, tuple[int, ...]]
    instead: Predicted | None
    worse: float | None


@dataclass(frozen=True, kw_only=True)
class Without:
    """A class that the best plan uses.

    `instead` is the best plan found without it, which is `worse` by what is wished, as
    a share.
    """

    kind: str
    instead: Predicted
    worse: float


def try_idle(search: Search, objective: Objective) -> None:
    """Search near the best plan for those that use more of what it leaves idle."""
    request, incumbents = search.request, search.incumbents
    best = incumbents.best[objective]
    idle = _idle_by_class(request, best.predicted.plan)
    for n, kind in enumerate(idle):
        search.progress(f"is it worth using more of {kind}?")

        def using(plan: Plan, kind: str = kind) -> Predicted | None:
            more = _uses_more(request, plan, best.predicted.plan, kind)
            return incumbents.offer(plan, best.source) if more else None

        with deadline(left_s() / (len(idle) - n)), suppress(TimeUp):
            for group in alike(best.predicted.plan, request):
                for plan in onto_idle(best.predicted.plan, group, request):
                    using(plan)
            than, plans = best.predicted.plan, incumbents.simulated()
            start = _best_using(request, objective, plans, than, kind)
            if start is not None:
                local_search(start, using, objective, request, most_work=_LOCAL_WORK)


def why_idle(found: Found, simulated: Iterable[Predicted]) -> tuple[Idle, ...]:
    """Return what is known of all that the plan does without.

    How much worse others are, is judged under the schedule of the search (`whole`).
    """
    request, objective, plans = found.request, found.objective, list(simulated)
    ours = score(found.whole, request.cluster, objective)
    result = []
    for kind, devices in _idle_by_class(request, found.best.plan).items():
        instead = _best_using(request, objective, plans, found.best.plan, kind)
        worse = None
        if instead is not None:
            worse = score(instead, request.cluster, objective) / ours - 1
        result.append(Idle(kind=kind, devices=devices, instead=instead, worse=worse))
    return tuple(result)


def without_kinds(found: Found, simulated: Iterable[Predicted]) -> tuple[Without, ...]:
    """Return what is known of plans without one of the classes that the best one uses.

    Plans that do not promise to come near are not simulated, so of many there is
    nothing to say. Judged as in `why_idle`.
    """
    request, objective, plans = found.request, found.objective, list(simulated)
    ours = score(found.whole, request.cluster, objective)
    result = []
    for kind in _used_by_class(request, found.best.plan):
        instead = _best(
            request,
            objective,
            plans,
            lambda plan, kind=kind: not _used_by_class(request, plan)[kind],
        )
        if instead is not None:
            worse = score(instead, request.cluster, objective) / ours - 1
            result.append(Without(kind=kind, instead=instead, worse=worse))
    return tuple(result)


def _best_using(
    request: PlanRequest,
    objective: Objective,
    simulated: Iterable[Predicted],
    than: Plan,
    kind: str,
) -> Predicted | None:
    """The best of those that use more devices of the class than a plan does."""
    return _best(
        request,
        objective,
        simulated,
        lambda plan: _uses_more(request, plan, than, kind),
    )


def _best(
    request: PlanRequest,
    objective: Objective,
    simulated: Iterable[Predicted],
    counts: Callable[[Plan], bool],
) -> Predicted | None:
    """The best plan within the limits that counts."""
    return min(
        (f for f in simulated if within(f, objective) and counts(f.plan)),
        key=lambda found: score(found, request.cluster, objective),
        default=None,
    )


def _uses_more(request: PlanRequest, plan: Plan, than: Plan, kind: str) -> bool:
    return _used_by_class(request, plan)[kind] > _used_by_class(request, than)[kind]


def _used_by_class(request: PlanRequest, plan: Plan) -> Counter[str]:
    class_of = request.class_of
    used = {(stage.node, d) for _, _, stage in plan.stages() for d in stage.devices}
    return Counter(class_of[node] for node, _ in used)


def _idle_by_class(
    request: PlanRequest, plan: Plan
) -> dict[str, dict[str, tuple[int, ...]]]:
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for node, devices in idle_devices(plan, request.cluster).items():
        found.setdefault(request.class_of[node], {})[node] = devices
    return found
