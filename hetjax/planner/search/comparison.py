# SPDX-License-Identifier: Apache-2.0
"""Collects the results of one planning command: the plan, and its comparisons.

Owns which searches a command makes and which results it keeps: of other planners, for
other wishes, with a node more or fewer. Does not own the searches (`find.py` and
others), options (`cli/`) nor the display of results (`report/`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.baselines.by_name import BASELINES, compared
from hetjax.planner.model.costing import memory_from, times_from
from hetjax.planner.model.deadline import (
    TimeUp,
    deadline,
    is_over,
    left_s,
)
from hetjax.planner.model.evaluator import as_planned, how_sure
from hetjax.planner.model.objectives import Objective, Wish
from hetjax.planner.model.request import PlanRequest, check_request
from hetjax.planner.search.find import LOCAL_WORK, Found, Search
from hetjax.planner.search.idle import Idle, try_idle, why_idle
from hetjax.planner.search.incumbents import Incumbent, TellProgress
from hetjax.planner.search.replan import Replanned, replan
from hetjax.planner.search.what_if import best_on_others, other_clusters
from hetjax.planner.search.worth import Worth, best_plan, worth_of_parts
from hetjax.plans.plan import Plan
from hetjax.schedule.certainty import Certainty
from hetjax.schedule.predicted import Predicted

_UNASKED = 1 / 3  # time for other planners that nobody asked for, times the search's
_LITTLE_WORK = 4_000  # forwards of a step; such a plan simulates quickly
MOST_COMPARED = 64  # devices up to which baselines are compared by default

Evaluated = Mapping[str, Predicted | NoFeasiblePlan]


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """What a command asks for besides the best plan.

    `baselines` are names; None means all of them if the cluster is small.
    """

    baselines: tuple[str, ...] | None = None
    pareto: bool = False
    what_if: bool = False
    current: Plan | None = None
    horizon_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best plan and the answers; answers to questions not asked are empty or None.

    `alone` is the result before plans of other planners were known; with them the
    search may find a better plan, or a plan at all. `moved` is the move from the
    current plan, if there is one. Parts are compared with the plan `parts_with`: the
    best under h1f1b, before a move. `bfloat16_step_s` is the plan's step if workers
    send gradients in bfloat16; None if they already do or send none, or if the plan
    does not simulate quickly. `elsewhere` has the best plan on each cluster with a node
    more or fewer, None if there is none. `left_out` names the planners and clusters for
    which there was no time. `cut_short` is whether the time was up before the search
    ended.
    """

    request: PlanRequest
    objective: Objective
    found: Found
    alone: Found | NoFeasiblePlan
    moved: Replanned | None = None
    idle: tuple[Idle, ...] = ()
    parts: tuple[Worth, ...] = ()
    parts_with: Predicted | None = None
    second: Predicted | None = None
    baselines: Evaluated | None = None
    pareto: tuple[Found, ...] = ()
    elsewhere: Mapping[str, Predicted | None] = field(default_factory=dict)
    bfloat16_step_s: float | None = None
    left_out: tuple[str, ...] = ()
    cut_short: bool = False

    @property
    def best(self) -> Predicted:
        return self.found.best

    @property
    def what_if(self) -> Mapping[str, Predicted | None]:
        """The best plan on the cluster as it is and on others; empty if none were
        asked for."""
        return {"as it is": self.best, **self.elsewhere} if self.elsewhere else {}

    @cached_property
    def certainty(self) -> Certainty:
        """The certainty of the best plan's prediction."""
        return how_sure(self.request, self.best)

    @cached_property
    def certainties(self) -> Mapping[str, Certainty]:
        """The certainty of other planners' plans, for those that simulate quickly."""
        return {
            name: how_sure(self.request, judged)
            for name, judged in (self.baselines or {}).items()
            if isinstance(judged, Predicted)
            and judged.plan.num_forwards <= _LITTLE_WORK
        }


def planned(
    request: PlanRequest,
    objective: Objective,
    questions: Questions,
    *,
    profile_path: Path | None,
    progress: TellProgress,
    local_work: float = LOCAL_WORK,
) -> Planned:
    """Answer the questions, as far as time allows (`model/deadline.py`).

    Raises NoFeasiblePlan if nothing fits, TimeUp if nothing is found in time.
    """
    check_request(request)
    names = _baselines(request, questions)
    clusters = dict(other_clusters(request)) if questions.what_if else {}
    wished = every_wish(objective) if questions.pareto else (objective,)
    search = Search(request, wished, progress, local_work)
    # other planners get as much time as the search only if they are asked for
    for_others = bool(names) * (1.0 if questions.baselines else _UNASKED)
    with deadline(left_s() / (1 + for_others + questions.what_if)):
        alone = _alone(search, objective)
    share = for_others / (for_others + questions.what_if) if for_others else 1.0
    with deadline(left_s() * share):
        others = _compared(request, names, progress)
        better = {n: p.plan for n, p in others.items() if isinstance(p, Predicted)}
        search.start_from(better)
        if isinstance(alone, NoFeasiblePlan):
            if not search.incumbents.best_h1f1b:
                raise alone
            search.prove()
    cut_short = try_idle(search, objective)
    search.finish()
    elsewhere = best_on_others(search, objective, clusters)
    search.prove_wider()
    found = unmoved = search.found_by(objective)
    moved = None
    if questions.current is not None:
        current, ours = questions.current, {found.source: found.best.plan}
        moved = replan(request, current, questions.horizon_s, objective, others=ours)
        moved_to = Incumbent(predicted=moved.best, source=moved.source)
        found = search.found_by(objective, moved_to)
    asked, answered = (*names, *clusters), {*others, *elsewhere}
    simulated = search.incumbents.under_all_schedules()
    found = _with_times_from(found, profile_path)
    return Planned(
        request=request,
        objective=objective,
        found=found,
        alone=alone,
        moved=moved,
        idle=why_idle(found, search.incumbents.simulated(), cut_short),
        parts=worth_of_parts(
            unmoved,
            found.best.plan,
            search.incumbents.simulated(),
            search.first.searched,
        ),
        parts_with=unmoved.best_h1f1b,
        second=_second(found, simulated),
        baselines=others if names else None,
        pareto=search.found() if questions.pareto else (),
        elsewhere=elsewhere,
        bfloat16_step_s=_bfloat16_step_s(found),
        left_out=tuple(name for name in asked if name not in answered),
        cut_short=is_over(),
    )


def _bfloat16_step_s(found: Found) -> float | None:
    """Return the step with gradients sent in bfloat16; None if that changes nothing, or
    if the plan does not simulate quickly."""
    request, best = found.request, found.best
    halved = replace(request, gradient_wire="bfloat16")
    if request.gradient_wire == "bfloat16" or best.plan.num_forwards > _LITTLE_WORK:
        return None
    predicted = as_planned(halved, best.plan)
    if predicted.costs.reductions == best.costs.reductions:
        return None
    return predicted.simulation.step_time_s


def _second(found: Found, simulated: Iterable[Predicted]) -> Predicted | None:
    """Return the best plan by the objective with other cuts or kinds of devices."""
    cluster, objective = found.request.cluster, found.objective
    taken = _layout(found.best.plan, cluster)
    return best_plan(
        found.request,
        objective,
        simulated,
        lambda plan: _layout(plan, cluster) != taken,
    )


def _layout(plan: Plan, cluster: Cluster) -> Counter[tuple[object, ...]]:
    """Return the cuts of replicas, without their places among equal nodes."""
    kinds = {node.name: canonical_name(node.device) for node in cluster.nodes}
    return Counter(
        tuple((kinds[x.node], x.mesh, x.layers) for x in replica.stages)
        for replica in plan.replicas
    )


def _alone(search: Search, objective: Objective) -> Found | NoFeasiblePlan:
    """Return what the search finds without plans of other planners."""
    try:
        search.run()
    except NoFeasiblePlan as error:
        return error
    return search.found_by(objective)


def _compared(
    request: PlanRequest, names: Sequence[str], progress: TellProgress
) -> Evaluated:
    """Return the results of as many other planners as there is time for."""
    others: dict[str, Predicted | NoFeasiblePlan] = {}
    for n, name in enumerate(names):
        progress(f"planning as {', '.join(names[n:])} would")
        with deadline(left_s() / (len(names) - n)), suppress(TimeUp):
            others |= compared(request, [name])
    return others


def _with_times_from(found: Found, profile_path: Path | None) -> Found:
    request, best = found.request, found.best
    times = times_from(
        best.plan,
        request.cluster,
        request.dtype,
        request.profile,
        profile_path,
        best.tied,
        request.calibration,
    )
    times = memory_from(times, best.costs)
    return replace(found, best=replace(best, times_from=times))


def _baselines(request: PlanRequest, questions: Questions) -> Sequence[str]:
    if questions.baselines is not None:
        return questions.baselines
    return tuple(BASELINES) if request.cluster.num_devices <= MOST_COMPARED else ()


def every_wish(objective: Objective) -> tuple[Objective, ...]:
    """Return an objective for every wish, within the same limits."""
    return tuple(replace(objective, wish=wish) for wish in get_args(Wish))
