# SPDX-License-Identifier: Apache-2.0
"""Finding the best plan: templates and copies, places, then the simulator's word.

Owns the order of the search and what is told of it. Does not own templates, copies and
bounds (`master.py`), places (`placement.py`), moves (`polish.py`) nor the judge
(`judge.py`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from hetjax.planner.certificate import certificate
from hetjax.planner.equal_shares import equal_share_plans
from hetjax.planner.infeasible import adds_up, why_infeasible
from hetjax.planner.judge import Judge
from hetjax.planner.objectives import Objective, score, within
from hetjax.planner.polish import Choices, polished
from hetjax.planner.proposals import (
    LARGE,
    Proposal,
    plans_by_rank,
    proposals,
)
from hetjax.planner.request import Request, check_request
from hetjax.planner.space import in_space
from hetjax.plans.plan import Plan
from hetjax.schedule.bound import LowerBound
from hetjax.schedule.predicted import Predicted

Progress = Callable[[str], None]  # told what is being done, a line at a time
POLISH_S = 5.0
_MOST_WORK = 30_000  # of all plans that are simulated before local search


def _quietly(line: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan as simulated, and what is known about better ones.

    `model_time_s` is the least by the planner's own estimate, `model_bound_s` the bound
    by the same estimate: both before anything is placed and simulated. `bound` is
    certified, where one is known: no plan of the request's space (`space.py`) simulates
    faster under the modelled costs, and none that this search simulated did.
    """

    request: Request
    objective: Objective
    best: Predicted
    source: str  # which part of the search gave the plan
    bound: LowerBound
    model_time_s: float | None
    model_bound_s: float | None
    search_s: float

    @property
    def model_gap(self) -> float | None:
        """How far the model's plan is above the model's bound, as a share of it."""
        if self.model_time_s is None or self.model_bound_s is None:
            return None
        return self.model_time_s / self.model_bound_s - 1

    @property
    def lower_bound_s(self) -> float | None:
        return self.bound.step_s

    @property
    def gap(self) -> float | None:
        """How far the simulated step is above the certified bound; None where none is
        known, or the plan, a given one, is not of the space."""
        if not in_space(self.request, self.best.plan):
            return None
        return self.bound.gap(self.best.simulation.step_time_s)


def find_plan(
    request: Request,
    objective: Objective | None = None,
    *,
    starts: Sequence[Plan] = (),
    polish_s: float = POLISH_S,
    progress: Progress = _quietly,
) -> Found:
    """Return the best plan that is found.

    `starts` are plans that it must not be worse than; local search may go on for
    `polish_s`. NoFeasiblePlan names what binds, and the smallest change that would
    help.
    """
    begin_s = time.monotonic()
    objective = Objective() if objective is None else objective
    check_request(request)
    if not adds_up(request):
        raise why_infeasible(request, objective)
    proposed = proposals(request, objective, progress)
    judge = Judge(request)

    def wished(predicted: Predicted) -> float:
        return score(predicted, request.cluster, objective)

    judged = [
        (predicted, source)
        for source, plan in _plans(request, proposed, starts)
        if (predicted := judge(plan)) and within(predicted, objective)
    ]
    if not judged:
        raise why_infeasible(request, objective)
    first, source = min(judged, key=lambda found: wished(found[0]))
    progress(f"{len(judged)} plans simulated; local search from the best")
    best = polished(
        first,
        lambda plan: _allowed(judge(plan), objective),
        wished,
        Choices(
            remats=request.remats,
            microbatch_sizes=request.microbatch_sizes,
            class_of=_class_of(request),
            counts={node.name: node.count for node in request.cluster.nodes},
        ),
        until_s=time.monotonic() + polish_s,
    )
    return Found(
        request=request,
        objective=objective,
        best=best,
        source=source,
        bound=certificate(request, (found for found in judge.seen.values() if found)),
        model_time_s=min((p.step_s for p in proposed), default=None),
        model_bound_s=min((p.layouts[0].bound_s for p in proposed), default=None),
        search_s=time.monotonic() - begin_s,
    )


def _plans(
    request: Request, proposed: Sequence[Proposal], starts: Sequence[Plan]
) -> Iterator[tuple[str, Plan]]:
    """Plans for the judge and where they come from; of large ones not so many."""
    large = request.cluster.num_devices > LARGE
    shares = () if large else equal_share_plans(request)
    most, work = _MOST_WORK // (8 if large else 1), 0
    for source, plan in chain(
        (("given", plan) for plan in starts),
        (("templates", plan) for plan in plans_by_rank(proposed, end=1)),
        (("equal shares", plan) for plan in shares),
        (("templates", plan) for plan in plans_by_rank(proposed, first=1)),
    ):
        if work and source != "given" and work + _work(plan) > most:
            return
        work += _work(plan)
        yield source, plan


def _work(plan: Plan) -> int:
    """Forwards of a step: what simulating it takes goes with them."""
    return sum(r.num_microbatches * len(r.stages) for r in plan.replicas)


def _allowed(predicted: Predicted | None, objective: Objective) -> Predicted | None:
    return predicted if predicted and within(predicted, objective) else None


def _class_of(request: Request) -> dict[str, str]:
    return {node.name: nodes.name for nodes in request.classes for node in nodes.nodes}
