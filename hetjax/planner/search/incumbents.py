# SPDX-License-Identifier: Apache-2.0
"""Keeps the best simulated plans so far, by objective, and their source in the search.

Owns which plans are kept and when progress is reported. Does not own what makes a plan
better (`model/objectives.py`) nor where plans come from (`find.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.evaluator import PlanEvaluator, as_planned
from hetjax.planner.model.objectives import Objective, score, within
from hetjax.planner.search.finish import Tried, finished
from hetjax.planner.search.limits import as_fast_as_can_be
from hetjax.planner.search.local_search import unscheduled
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulation.result import shares_devices

TellProgress = Callable[[str], None]  # receives progress, one line at a time
_WORTH_TELLING = 0.99  # of the last reported step


@dataclass(frozen=True, kw_only=True, slots=True)
class Incumbent:
    """A simulated plan, and the part of the search that found it."""

    predicted: Predicted
    source: str


@dataclass(kw_only=True, eq=False)
class Incumbents:
    """The best plan so far by each objective; all objectives have the same limits.

    `best_h1f1b` is under h1f1b, by which the search compares plans. `best` also counts
    other schedules of these plans and of nearly as good ones.
    """

    evaluate: PlanEvaluator
    objectives: Sequence[Objective]
    progress: TellProgress
    best_h1f1b: dict[Objective, Incumbent] = field(default_factory=dict)
    best: dict[Objective, Incumbent] = field(default_factory=dict)
    tried: Tried = field(default_factory=dict)
    reported_s: float = float("inf")

    def offer(self, plan: Plan, source: str) -> Predicted | None:
        """Simulate the plan, and keep it if it is the best by some objective.

        None if it exceeds memory or a limit of the objectives. If there is already an
        incumbent, raises TimeUp before the simulation when the time is up.
        """
        if self.best_h1f1b:
            check_deadline()
        return self.consider(plan, source)

    def consider(self, plan: Plan, source: str) -> Predicted | None:
        """Do the same as `offer`, even when the time is up."""
        found = self.evaluate(plan)
        if found is None or not within(found, self.objectives[0]):
            return None
        self._keep(self.best_h1f1b, found, source)
        self._keep(self.best, found, source)
        self._tell()
        return found

    def consider_scheduled(self, plan: Plan, source: str) -> None:
        """Consider a plan under its own schedule and, if that does not interleave
        stages, under h1f1b."""
        self._consider_under_h1f1b(plan, source)
        with suppress(NoFeasiblePlan):
            found = as_planned(self.evaluate.request, plan)
            self.tried.setdefault((unscheduled(plan), True, "all"), found)
            if within(found, self.objectives[0]):
                self._keep(self.best, found, source)
                self._tell()

    def consider_best_under_h1f1b(self) -> None:
        """Consider the best plans under h1f1b, too, unless they interleave stages: a
        search that is cut short may have moved to them under other schedules alone."""
        for found in [*self.best.values()]:
            self._consider_under_h1f1b(found.predicted.plan, found.source)

    def _consider_under_h1f1b(self, plan: Plan, source: str) -> None:
        whole = unscheduled(plan)
        if not shares_devices(whole):
            self.consider(whole, source)

    def loosen(self) -> bool:
        """Drop a limit of speed that no plan keeps: aim for the fastest plan. Return
        whether there is such a limit, and a plan without it."""
        wished = self.objectives[0]
        if wished.min_tokens_per_s is None:
            return False
        objectives = self.objectives
        self._aim_at([as_fast_as_can_be(wished)])
        if not self.best_h1f1b:
            self._aim_at(objectives)
        return bool(self.best_h1f1b)

    def tighten(self, objectives: Sequence[Objective]) -> bool:
        """Restore the objectives with all their limits. Return whether some plan keeps
        to them under any schedule."""
        nearest = [*self.best_h1f1b.values()]
        self._aim_at(objectives)
        for found in self.under_all_schedules():
            if within(found, objectives[0]):
                self._keep(self.best, found, nearest[0].source)
        for objective in self.best:
            self.best_h1f1b.setdefault(objective, nearest[0])
        return bool(self.best)

    def _aim_at(self, objectives: Sequence[Objective]) -> None:
        """Choose the best by these objectives among the simulated plans."""
        self.objectives, self.reported_s = objectives, float("inf")
        self.best_h1f1b.clear()
        self.best.clear()
        for found in self.simulated():
            if within(found, objectives[0]):
                self._keep(self.best_h1f1b, found, "templates")
                self._keep(self.best, found, "templates")

    def least(
        self, objective: Objective, by: Callable[[Predicted], float]
    ) -> Incumbent:
        """Return the plan of least value `by` within the limits. If the best by the
        objective has the same value, return that."""
        best = self.best_h1f1b[objective]
        others = (found for found in self.simulated() if within(found, objective))
        least = min(others, key=by, default=best.predicted)
        if by(least) < by(best.predicted):
            return Incumbent(predicted=least, source=best.source)
        return best

    def finish(self) -> None:
        """Try the best plans under other schedules. Raises TimeUp when time is up."""
        for objective in self.objectives:
            source = self.best_h1f1b[objective].source
            plans = finished(
                self.evaluate.request, objective, self.simulated(), self.tried
            )
            for found in plans:
                if within(found, objective):
                    self._keep(self.best, found, source)
                    self._tell()

    def _keep(
        self,
        best: dict[Objective, Incumbent],
        found: Predicted,
        source: str,
    ) -> None:
        cluster = self.evaluate.request.cluster
        for objective in self.objectives:
            by = partial(score, cluster=cluster, objective=objective)
            if objective not in best or by(found) < by(best[objective].predicted):
                best[objective] = Incumbent(predicted=found, source=source)

    def simulated(self) -> Iterator[Predicted]:
        """Yield all plans that were simulated under h1f1b."""
        return (found for found in self.evaluate.seen.values() if found is not None)

    def under_all_schedules(self) -> Iterator[Predicted]:
        """Yield the plans of `simulated`, and all results under other schedules."""
        tried = (found for found in self.tried.values() if found is not None)
        return chain(self.simulated(), tried)

    def _tell(self) -> None:
        """Report progress if the best step has changed enough."""
        step_s = self.best[self.objectives[0]].predicted.simulation.step_time_s
        if step_s < self.reported_s * _WORTH_TELLING or step_s > self.reported_s:
            self.reported_s = step_s
            self.progress(
                f"best so far {step_s * 1e3:.4g} ms, of {len(self.evaluate.seen)} plans"
            )
