# SPDX-License-Identifier: Apache-2.0
"""Runs a contest of planners: even split, fastest kind alone, published ones, and ours.

Owns the list of contestants, the rule that all plan the same request, and the split of
a limited time among them. Does not own the searches (`find.py`, `baselines/`) nor the
display of results (`report/race/race.py`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import part_of
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.baselines.by_name import BASELINES, compared
from hetjax.planner.baselines.stage_costs import no_plan
from hetjax.planner.bound.column_generation import compute_bound_s
from hetjax.planner.model.deadline import (
    TimeUp,
    check_deadline,
    deadline,
    is_over,
    left_s,
)
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.terms import bound_problem
from hetjax.planner.search.find import Search
from hetjax.planner.search.first.first_plans import even_plans
from hetjax.schedule.predicted import Predicted

EVEN, ALONE, OURS = "even split", "fastest kind alone", "hetjax"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A planner, and its description or publication.

    `plan` raises NoFeasiblePlan if nothing fits, TimeUp if it finds nothing in time
    (`model/deadline.py`).
    """

    about: str
    plan: Callable[[PlanRequest], Predicted]


Judged = Predicted | NoFeasiblePlan | None  # None: there was no time


def contest(
    request: PlanRequest, begins: Callable[[str], None] = lambda name: None
) -> Iterator[tuple[str, Judged]]:
    """Yield the result of each of `CONTESTANTS`, by name; `begins` is called before.

    The remaining time is split equally between the remaining contestants, so unused
    time goes to later ones.
    """
    for n, (name, contestant) in enumerate(CONTESTANTS.items()):
        begins(name)
        judged: Judged = None
        with deadline(left_s() / (len(CONTESTANTS) - n)), suppress(TimeUp):
            try:
                judged = contestant.plan(request)
            except NoFeasiblePlan as error:
                judged = error
        yield name, judged


def _even(request: PlanRequest) -> Predicted:
    """Return the fastest split that gives every device the same share."""
    found: list[Predicted] = []
    for plan in even_plans(request):
        if found and is_over():
            break
        with suppress(NoFeasiblePlan):  # over memory
            found.append(evaluate_plan(request, plan, "1f1b"))
    if not found:
        raise no_plan(EVEN, request)
    return min(found, key=_step_s)


def _alone(request: PlanRequest) -> Predicted:
    """Return our best plan on devices of a single kind, whichever kind is fastest.

    Kinds that could not be faster even by computing all the time are not searched.
    """
    parts = _by_kind(request)
    bounds_s = [compute_bound_s(bound_problem(part, part.degrees)) for part in parts]
    found: list[Predicted] = []
    for bound_s, part in sorted(zip(bounds_s, parts, strict=True), key=itemgetter(0)):
        if found and (is_over() or bound_s >= min(map(_step_s, found))):
            break
        with suppress(NoFeasiblePlan, TimeUp):  # the part is too small, or time is up
            found.append(_ours(part))
    if not found:
        check_deadline()
        raise no_plan(ALONE, request)
    return min(found, key=_step_s)


def _by_kind(request: PlanRequest) -> list[PlanRequest]:
    """Return the request for the nodes of each kind alone."""
    nodes: defaultdict[str, list[str]] = defaultdict(list)
    for node in request.cluster.nodes:
        nodes[canonical_name(node.device)].append(node.name)
    return [
        replace(request, cluster=part_of(request.cluster, names))
        for names in nodes.values()
    ]


def _published(name: str, request: PlanRequest) -> Predicted:
    judged = compared(request, [name])[name]
    if isinstance(judged, NoFeasiblePlan):
        raise judged
    return judged


def _ours(request: PlanRequest) -> Predicted:
    """Return hetjax's plan, found without the plans of the others."""
    search = Search(request, [Objective()])
    search.propose()
    search.improve(search.objectives)
    search.finish()
    return search.found()[0].best


def _step_s(found: Predicted) -> float:
    return found.simulation.step_time_s


CONTESTANTS: Mapping[str, Contestant] = {
    EVEN: Contestant(about="the same share for every device", plan=_even),
    ALONE: Contestant(about="planned by hetjax, all others idle", plan=_alone),
    **{
        baseline.title: Contestant(about=baseline.paper, plan=partial(_published, name))
        for name, baseline in BASELINES.items()
    },
    OURS: Contestant(about="this library", plan=_ours),
}
