# SPDX-License-Identifier: Apache-2.0
"""All that one planning command finds out: the plan, and what it is held against.

Owns which searches a command makes and what it remembers of them. Does not own the
searches (`find.py` and others), options (`cli/`) nor what is shown (`report/`).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.baselines.by_name import BASELINES, compared
from hetjax.planner.bound.certificate import held
from hetjax.planner.model.costing import times_from
from hetjax.planner.model.deadline import TimeUp, deadline, left_s
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import Request, check_request
from hetjax.planner.search.find import LOCAL_SEARCH_S, Found, Search
from hetjax.planner.search.idle import Idle, try_idle, why_idle
from hetjax.planner.search.incumbents import TellProgress
from hetjax.planner.search.pareto import WhatIf, every_wish, what_if, what_if_names
from hetjax.planner.search.replan import Replanned, replan
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

MOST_COMPARED = 64  # devices of a cluster that baselines are compared on unasked

Evaluated = Mapping[str, Predicted | NoFeasiblePlan]


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """What is asked besides the best plan.

    `baselines` are by name, None for all of them where the cluster is small.
    """

    baselines: tuple[str, ...] | None = None
    pareto: bool = False
    what_if: bool = False
    current: Plan | None = None
    horizon_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best plan and the answers; what was not asked is empty or None.

    `alone` is what was found before there were plans of others to go on from: with them
    the search may find more, or anything at all. `moved`
    is what has to move where there is a plan to move from. `left_out` names what there
    was no time for.
    """

    request: Request
    objective: Objective
    found: Found
    alone: Found | NoFeasiblePlan
    moved: Replanned | None = None
    idle: tuple[Idle, ...] = ()
    baselines: Evaluated | None = None
    pareto: tuple[Found, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Predicted:
        return self.found.best


def planned(
    request: Request,
    objective: Objective,
    questions: Questions,
    *,
    profile_path: Path | None,
    progress: TellProgress,
    local_search_s: float = LOCAL_SEARCH_S,
) -> Planned:
    """Search as asked, as far as the time goes (`model/deadline.py`).

    NoFeasiblePlan where nothing fits, TimeUp where nothing is found in time.
    """
    check_request(request)
    names = _baselines(request, questions)
    wished = every_wish(objective) if questions.pareto else (objective,)
    search = Search(request, wished, progress)
    with deadline(left_s() / (1 + bool(names) + questions.what_if)):
        alone = _alone(search, objective, local_search_s)
    with deadline(left_s() / (bool(names) + questions.what_if or 1)):
        others = _compared(request, names, progress)
        search.start_from(_plans_of(others), local_search_s)
        if isinstance(alone, NoFeasiblePlan):
            if not search.incumbents.best:
                raise alone
            search.prove()
    try_idle(search, objective)
    found = _wished(search, objective)
    moved = _moved(request, objective, questions, found)
    if moved is not None:
        bound = held(found.bound, request, [moved.best])
        found = replace(found, best=moved.best, source=moved.source, bound=bound)
    cases = tuple(what_if(request, progress)) if questions.what_if else ()
    return Planned(
        request=request,
        objective=objective,
        found=_with_times_from(found, profile_path),
        alone=alone,
        moved=moved,
        idle=why_idle(found, search.incumbents.simulated()),
        baselines=others if names else None,
        pareto=search.found() if questions.pareto else (),
        what_if=cases,
        left_out=_left_out(request, names, others, questions, cases),
    )


def _alone(
    search: Search, objective: Objective, local_search_s: float
) -> Found | NoFeasiblePlan:
    """What is found without plans of others."""
    try:
        search.run(local_search_s)
    except NoFeasiblePlan as error:
        return error
    return _wished(search, objective)


def _wished(search: Search, objective: Objective) -> Found:
    return next(f for f in search.found() if f.objective == objective)


def _compared(
    request: Request, names: Sequence[str], progress: TellProgress
) -> Evaluated:
    """What other planners find, as many as there is time for."""
    others: dict[str, Predicted | NoFeasiblePlan] = {}
    for n, name in enumerate(names):
        progress(f"planning as {', '.join(names[n:])} would")
        with deadline(left_s() / (len(names) - n)), suppress(TimeUp):
            others |= compared(request, [name])
    return others


def _plans_of(others: Evaluated) -> dict[str, Plan]:
    """What other planners found, for the search to go on from."""
    return {
        name: judged.plan
        for name, judged in others.items()
        if not isinstance(judged, NoFeasiblePlan)
    }


def _moved(
    request: Request, objective: Objective, questions: Questions, found: Found
) -> Replanned | None:
    """What to move to from the plan that runs now, if there is one."""
    if questions.current is None:
        return None
    return replan(
        request,
        questions.current,
        questions.horizon_s,
        objective,
        others={found.source: found.best.plan},
    )


def _with_times_from(found: Found, profile_path: Path | None) -> Found:
    request, best = found.request, found.best
    told = times_from(
        best.plan,
        request.cluster,
        request.dtype,
        request.profile,
        profile_path,
        best.tied,
    )
    return replace(found, best=replace(best, times_from=told))


def _left_out(
    request: Request,
    names: Sequence[str],
    others: Evaluated,
    questions: Questions,
    cases: Sequence[WhatIf],
) -> tuple[str, ...]:
    """The names of what was asked and not answered."""
    asked = what_if_names(request) if questions.what_if else []
    answered = {*others, *(case.name for case in cases)}
    return tuple(name for name in (*names, *asked) if name not in answered)


def _baselines(request: Request, questions: Questions) -> Sequence[str]:
    if questions.baselines is not None:
        return questions.baselines
    return tuple(BASELINES) if request.cluster.num_devices <= MOST_COMPARED else ()
