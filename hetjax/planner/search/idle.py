# SPDX-License-Identifier: Apache-2.0
"""Explains idle devices: finds the best plan that must use more of their class.

Owns the search for such plans and their comparison with the best plan. Does not own the
main search (`find.py`) nor which devices are idle (`model/seating.py`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from hetjax.planner.model.deadline import TimeUp, deadline, is_over, left_s
from hetjax.planner.model.objectives import Objective, score
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import idle_devices
from hetjax.planner.search.find import Found, Search
from hetjax.planner.search.local_search import alike, local_search, onto_idle
from hetjax.planner.search.worth import best_plan, worse_by
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

_LOCAL_WORK = 7_500  # work of local search, for each idle class


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Devices of one class that the best plan does not use.

    `instead` is the best plan found with more devices of the class; None if none that
    fits was found. `worse` is how much worse it is by the objective, as a share.
    `is_searched` is False if the time was up before the search for such plans ended.
    """

    node_class: str
    devices: Mapping[str, tuple[int, ...]]
    instead: Predicted | None
    worse: float | None
    is_searched: bool = True


def try_idle(search: Search, objective: Objective) -> frozenset[str]:
    """Search near the best plan for plans that use more of its idle devices. Return the
    classes whose search did not end in time."""
    request, incumbents = search.request, search.incumbents
    best = incumbents.best_h1f1b[objective]
    idle, searched = _idle_by_class(request, best.predicted.plan), set[str]()
    for n, node_class in enumerate(idle):
        search.progress(f"is it worth using more of {node_class}?")

        def using(plan: Plan, node_class: str = node_class) -> Predicted | None:
            more = _uses_more(request, plan, best.predicted.plan, node_class)
            return incumbents.offer(plan, best.source) if more else None

        with deadline(left_s() / (len(idle) - n)), suppress(TimeUp):
            for group in alike(best.predicted.plan, request):
                for plan in onto_idle(best.predicted.plan, group, request):
                    using(plan)
            than, plans = best.predicted.plan, incumbents.simulated()
            start = _best_using(request, objective, plans, than, node_class)
            if start is not None:
                by = partial(score, cluster=request.cluster, objective=objective)
                local_search(start, using, by, request, most_work=_LOCAL_WORK)
            if not is_over():
                searched.add(node_class)
    return frozenset(idle) - searched


def why_idle(
    found: Found, simulated: Iterable[Predicted], cut_short: Collection[str] = ()
) -> tuple[Idle, ...]:
    """Return, for each class, the devices that the plan does not use and the best plan
    that uses more of them. Classes `cut_short` (`try_idle`) were not fully searched.

    Plans are compared under the schedule of the search (`best_h1f1b`).
    """
    request, objective, plans = found.request, found.objective, list(simulated)
    ours = score(found.best_h1f1b, request.cluster, objective)
    result = []
    for node_class, devices in _idle_by_class(request, found.best.plan).items():
        instead = _best_using(request, objective, plans, found.best.plan, node_class)
        worse = None
        if instead is not None:
            worse = worse_by(ours, score(instead, request.cluster, objective))
        idle = Idle(
            node_class=node_class,
            devices=devices,
            instead=instead,
            worse=worse,
            is_searched=node_class not in cut_short,
        )
        result.append(idle)
    return tuple(result)


def _best_using(
    request: PlanRequest,
    objective: Objective,
    simulated: Iterable[Predicted],
    than: Plan,
    node_class: str,
) -> Predicted | None:
    """Return the best plan that uses more devices of the class than `than` does."""
    return best_plan(
        request,
        objective,
        simulated,
        lambda plan: _uses_more(request, plan, than, node_class),
    )


def _uses_more(request: PlanRequest, plan: Plan, than: Plan, node_class: str) -> bool:
    return (
        _used_by_class(request, plan)[node_class]
        > _used_by_class(request, than)[node_class]
    )


def _used_by_class(request: PlanRequest, plan: Plan) -> Counter[str]:
    class_of = request.class_of
    return Counter(class_of[node] for node, _ in plan.used_devices())


def _idle_by_class(
    request: PlanRequest, plan: Plan
) -> dict[str, dict[str, tuple[int, ...]]]:
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for node, devices in idle_devices(plan, request.cluster).items():
        found.setdefault(request.class_of[node], {})[node] = devices
    return found
