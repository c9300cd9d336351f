# SPDX-License-Identifier: Apache-2.0
"""All that one planning command finds out: the plan, and what it is held against.

Owns which searches a command makes and what it remembers of them. Does not own the
searches (`planner/`), options (`plan_cli.py`) nor what is shown (`plan_tables.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.baselines.table import BASELINES, compared
from hetjax.planner.find import POLISH_S, Found, Progress, find_plan
from hetjax.planner.objectives import Objective
from hetjax.planner.pareto import WhatIf, pareto, what_if
from hetjax.planner.replan import Replanned, replan
from hetjax.planner.request import Request, check_request
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted
from hetjax.training.costing import times_from

MOST_COMPARED = 64  # devices of a cluster that baselines are compared on unasked

Judged = Mapping[str, Predicted | NoFeasiblePlan]


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

    `found` is None where a plan was asked for that has to be moved to (`moved`).
    """

    request: Request
    objective: Objective
    best: Predicted
    source: str
    search_s: float
    found: Found | None = None
    moved: Replanned | None = None
    baselines: Judged | None = None
    pareto: tuple[Found, ...] = ()
    what_if: tuple[WhatIf, ...] = ()


def planned(
    request: Request,
    objective: Objective,
    questions: Questions,
    *,
    profile_path: Path | None,
    progress: Progress,
) -> Planned:
    """Search as asked. NoFeasiblePlan where nothing fits."""
    check_request(request)
    names = _baselines(request, questions)
    if names:
        progress(f"planning as {', '.join(names)} would")
    others = compared(request, names) if names else None
    first = _searched(request, objective, questions, _plans_of(others), progress)
    told = times_from(
        first.best.plan,
        request.cluster,
        request.dtype,
        request.profile,
        profile_path,
        first.best.tied,
    )
    if questions.what_if:
        progress("planning with a node more or fewer")
    return replace(
        first,
        best=replace(first.best, times_from=told),
        baselines=others,
        what_if=what_if(request) if questions.what_if else (),
    )


def _plans_of(others: Judged | None) -> list[Plan]:
    """What other planners found, for the search to start from too."""
    found = others.values() if others else ()
    return [judged.plan for judged in found if not isinstance(judged, NoFeasiblePlan)]


def _searched(
    request: Request,
    objective: Objective,
    questions: Questions,
    starts: Sequence[Plan],
    progress: Progress,
) -> Planned:
    if questions.current is not None:
        progress("planning from where things are")
        moved = replan(
            request, questions.current, questions.horizon_s, polish_s=POLISH_S
        )
        return Planned(
            request=request,
            objective=objective,
            best=moved.best,
            source=moved.source,
            search_s=moved.search_s,
            moved=moved,
        )
    if not questions.pareto:
        return _of(find_plan(request, objective, starts=starts, progress=progress))
    progress("planning for time, cost and goodput")
    every = pareto(request, objective)
    wished = next(f for f in every if f.objective.wish == objective.wish)
    return replace(_of(wished), pareto=every)


def _of(found: Found) -> Planned:
    return Planned(
        request=found.request,
        objective=found.objective,
        best=found.best,
        source=found.source,
        search_s=found.search_s,
        found=found,
    )


def _baselines(request: Request, questions: Questions) -> Sequence[str]:
    if questions.baselines is not None:
        return questions.baselines
    return tuple(BASELINES) if request.cluster.num_devices <= MOST_COMPARED else ()
