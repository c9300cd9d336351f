# SPDX-License-Identifier: Apache-2.0
"""Searches for the best plan: templates and counts, then placement, then simulation.

Owns the order of the search, its progress reports, and the guarantee that it can end at
any time with a plan: once there is one, the deadline (`model/deadline.py`) is checked
before each further plan. Does not own the first plans (`first_plans.py`), moves
(`local_search.py`), the evaluation of plans (`model/evaluator.py`) nor what makes a
plan better (`model/objectives.py`).
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial

from hetjax.planner.bound.certificate import Space, certified_bound, held, space_of
from hetjax.planner.bound.cost_bound import least_usd_per_million_tokens
from hetjax.planner.model.deadline import (
    TimeUp,
    deadline,
    is_over,
    left_s,
)
from hetjax.planner.model.evaluator import PlanEvaluator, least_step_s
from hetjax.planner.model.objectives import Objective, promise, score
from hetjax.planner.model.request import PlanRequest, check_request
from hetjax.planner.search.first.first_plans import FirstPlans
from hetjax.planner.search.incumbents import Incumbent, Incumbents, TellProgress
from hetjax.planner.search.infeasible import adds_up, why_infeasible
from hetjax.planner.search.limits import too_slow
from hetjax.planner.search.local_search import local_search
from hetjax.plans.plan import Plan
from hetjax.schedule.bound import ROUNDING, LowerBound
from hetjax.schedule.predicted import Predicted

LOCAL_WORK = 25_000  # work of local search (`local_search.py`), for each objective
_DEEP_SEARCH_S = 30.0  # limit for very deep models, whose searches would take hours
_WITH: dict[Space, str] = {
    "split": "with split backward passes",
    "interleaved": "with several stages on the same devices",
}
_PROPOSED_SHARE, _PROVED_SHARE = 0.6, 0.5  # of the remaining time, if it is limited


def _quietly(line: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan as simulated, and the bounds on better plans.

    `model_time_s` is the least step time by the planner's own estimate, `model_bound_s`
    the bound by the same estimate: both before placement and simulation. `bound` is
    certified, where one is known: no plan of the best plan's `space` simulates faster
    under the modelled costs (`bound/certificate.py`), and no simulated plan did.
    `best_h1f1b` is the best plan under h1f1b, which splits no backward pass.
    `whole_bound` is the bound of plans with whole backward passes. `split_bound` is the
    bound of plans that are not interleaved, given if the best plan is. `least_usd` is a
    lower bound on the USD per million tokens (`bound/cost_bound.py`), if the wish is
    cost.
    """

    request: PlanRequest
    objective: Objective
    best: Predicted
    source: str  # the part of the search that found the plan
    bound: LowerBound
    best_h1f1b: Predicted
    whole_bound: LowerBound
    model_time_s: float | None
    model_bound_s: float | None
    search_s: float
    split_bound: LowerBound | None = None
    least_usd: float | None = None

    @property
    def model_gap(self) -> float | None:
        """How far the model's plan is above the model's bound, as a share of that."""
        if self.model_time_s is None or self.model_bound_s is None:
            return None
        return self.model_time_s / self.model_bound_s - 1

    @cached_property
    def space(self) -> Space | None:
        """The space of the best plan, which its bound covers."""
        return space_of(self.request, self.best.plan)

    @property
    def lower_bound_s(self) -> float | None:
        return self.bound.step_s

    @property
    def gap(self) -> float | None:
        """How far the simulated step is above the certified bound. None if no bound is
        known, or if the plan was given and is outside the space."""
        if self.space is None:
            return None
        return self.bound.gap(self.best.simulation.step_time_s)

    @property
    def whole_gap(self) -> float | None:
        """The gap of `best_h1f1b`; None if no bound is known that covers it."""
        if space_of(self.request, self.best_h1f1b.plan) != "whole":
            return None
        return self.whole_bound.gap(self.best_h1f1b.simulation.step_time_s)

    @property
    def cost_gap(self) -> float | None:
        """How far the USD per million tokens are above their bound. None if bound or
        price is unknown, or if the plan is outside the space."""
        usd = self.best.usd_per_million_tokens
        if self.least_usd is None or usd is None or self.space is None:
            return None
        if not self.least_usd:
            return None if usd else 0.0
        gap = usd / self.least_usd - 1
        return 0.0 if abs(gap) <= ROUNDING else gap


def find_plan(
    request: PlanRequest,
    objective: Objective | None = None,
    *,
    local_work: float = LOCAL_WORK,
    progress: TellProgress = _quietly,
) -> Found:
    """Return the best plan found. Local search may do `local_work`; work is counted,
    not timed, so equal requests get equal plans.

    Raises NoFeasiblePlan, which names the binding limit and the smallest change that
    would help. Inside `deadline`, return the best plan by the end of that time, or
    raise TimeUp if there is none.
    """
    search = Search(request, [objective or Objective()], progress, local_work)
    search.run()
    return search.found()[0]


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector 25 times less often. Its scans of all that JAX holds
    took a third of the time, and a search makes few reference cycles."""
    usual = gc.get_threshold()
    gc.set_threshold(25 * usual[0], *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def usual_search_s(request: PlanRequest, progress: TellProgress = _quietly) -> float:
    """Return the default time limit of a search: infinity, except for very deep models,
    which is reported to `progress`."""
    num_layers = len(request.model.layers)
    if not request.is_deep:
        return math.inf
    progress(
        f"{num_layers:,} layers: the search ends with its best plan "
        f"after {_DEEP_SEARCH_S:g} s"
    )
    return _DEEP_SEARCH_S


class Search:
    """A search for the best plans by objectives that differ only in the wish.

    Everything found so far stays available at any time.
    """

    def __init__(
        self,
        request: PlanRequest,
        objectives: Sequence[Objective],
        progress: TellProgress = _quietly,
        local_work: float = LOCAL_WORK,
    ) -> None:
        self.request, self.objectives, self.progress = request, objectives, progress
        self.local_work = local_work
        self.incumbents = Incumbents(
            evaluate=PlanEvaluator(request), objectives=objectives, progress=progress
        )
        self.first = FirstPlans(request, self.incumbents)
        self.bounds: dict[Space, LowerBound] = {}
        self.least_usd: float | None = None
        self.begin_s = time.monotonic()

    def run(self, *, proves: bool = True) -> None:
        """Run the whole search. Raises the errors of `propose`.

        Without `proves` there are no bounds. If time is not limited, the plans are the
        same.
        """
        with _rare_collections():
            self._run(proves)

    def _run(self, proves: bool) -> None:
        with deadline(left_s() * _PROPOSED_SHARE):
            self.propose()
        if proves:
            with deadline(left_s() * _PROVED_SHARE):
                self.prove()
        self.improve(self.incumbents.objectives)
        self.finish()
        if proves:
            self.prove_wider()
        self._keep_to_limits()

    def propose(self) -> None:
        """Simulate the plans that the model proposes.

        Raises NoFeasiblePlan if nothing fits, TimeUp if nothing is found in time.
        """
        check_request(self.request)
        if not adds_up(self.request):
            raise why_infeasible(self.request, self.objectives[0])
        self.first.simulate()

    def prove(self) -> None:
        """Prove how much better any plan could be, as far as time allows."""
        self.progress("proving how much better any plan could be")
        if any(objective.wish == "cost" for objective in self.objectives):
            with suppress(TimeUp):
                self.least_usd = least_usd_per_million_tokens(self.request)
        simulated = self.incumbents.simulated()
        self.bounds["whole"] = certified_bound(self.request, simulated)

    def prove_wider(self) -> None:
        """Prove bounds for split backward passes or for stages that share devices, if
        the best plan has them."""
        best = self.incumbents.best.values()
        there = {space_of(self.request, found.predicted.plan) for found in best}
        wider: list[Space] = []
        if there & {"split", "interleaved"}:  # interleaved plans are compared, too
            wider.append("split")
        if "interleaved" in there:
            wider.append("interleaved")
        for space in wider:
            if space in self.bounds:
                continue
            self.progress(f"proving the same for plans {_WITH[space]}")
            simulated = self.incumbents.under_all_schedules()
            self.bounds[space] = certified_bound(self.request, simulated, space)

    def _keep_to_limits(self) -> None:
        """Raise NoFeasiblePlan if the fastest plan misses the limit of speed."""
        if self.incumbents.objectives == self.objectives:
            return
        (fastest,) = self.incumbents.best.values()
        wished, found = self.objectives[0], fastest.predicted
        space = space_of(self.request, found.plan) or "whole"
        bound = self._held(space, found)
        if not self.incumbents.tighten(self.objectives):
            raise too_slow(self.request, wished, found, bound, space)

    def start_from(self, plans: Mapping[str, Plan]) -> None:
        """Consider plans of other planners, by name, and improve those that are better
        than the best so far.

        It considers them even after the deadline, so that the search never ends with a
        plan worse than one that it knows.
        """
        self.improve(self._bettered(self.incumbents.consider, plans))

    def improve_on(self, plans: Mapping[str, Plan]) -> None:
        """Consider plans of other searches, by name, under their schedules, and improve
        those that are better than the best so far."""
        if better := self._bettered(self.incumbents.consider_scheduled, plans):
            self.improve(better)
            self.finish()

    def _bettered(
        self, consider: Callable[[Plan, str], object], plans: Mapping[str, Plan]
    ) -> list[Objective]:
        """Consider the plans; return the objectives by which the best has changed."""
        best = self.incumbents.best_h1f1b
        before = dict(best)
        for source, plan in plans.items():
            consider(plan, source)
        return [o for o in best if best[o] != before.get(o)]

    def improve(self, objectives: Sequence[Objective]) -> None:
        """Search locally around the best plans by these objectives, and around those
        that promise most under other schedules."""
        ways = [(wished, by) for wished in objectives for by in (score, promise)]
        for n, (objective, judge) in enumerate(ways):
            self.progress(f"local search by {objective.wish}")
            with deadline(left_s() / (len(ways) - n)), suppress(TimeUp):
                by = partial(judge, cluster=self.request.cluster, objective=objective)
                start = self.incumbents.least(objective, by)
                by_step = judge is score and objective.wish == "time"
                local_search(
                    start.predicted,
                    partial(self.incumbents.offer, source=start.source),
                    by,
                    self.request,
                    most_work=self.local_work,
                    least=partial(least_step_s, self.request) if by_step else None,
                )

    def finish(self) -> None:
        """Try the best plans under other schedules."""
        self.progress("trying other schedules")
        with suppress(TimeUp):
            self.incumbents.finish()
        if is_over():
            self.incumbents.consider_best_under_h1f1b()

    def found(self) -> tuple[Found, ...]:
        """Return the results so far, for each objective."""
        return tuple(map(self.found_by, self.objectives))

    def found_by(
        self, objective: Objective, moved_to: Incumbent | None = None
    ) -> Found:
        """Return the results so far for one objective: of its best plan, or of a plan
        that a run moves to."""
        best = moved_to or self.incumbents.best[objective]
        best_h1f1b = moved_to or self.incumbents.best_h1f1b[objective]
        proposed = self.first.proposed
        space = space_of(self.request, best.predicted.plan)
        return Found(
            request=self.request,
            objective=objective,
            best=best.predicted,
            source=best.source,
            bound=self._held(space or "whole", best.predicted),
            best_h1f1b=best_h1f1b.predicted,
            whole_bound=self._held("whole", best_h1f1b.predicted),
            model_time_s=min((p.step_s for p in proposed), default=None),
            model_bound_s=min((p.bound_s for p in proposed), default=None),
            search_s=time.monotonic() - self.begin_s,
            split_bound=self.bounds.get("split") if space == "interleaved" else None,
            least_usd=self.least_usd if objective.wish == "cost" else None,
        )

    def _held(self, space: Space, best: Predicted) -> LowerBound:
        """Return the bound of the space, compared with all plans simulated so far."""
        bound = self.bounds.get(space, LowerBound(why="none was searched for"))
        simulated = (best, *self.incumbents.under_all_schedules())
        return held(bound, self.request, simulated, space)
