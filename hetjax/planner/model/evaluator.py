# SPDX-License-Identifier: Apache-2.0
"""Evaluates plans with the simulator, on real nodes, within memory.

Owns the pricing of a plan just as `simulate` does it, with launch-aheads that suit the
plan. Does not own the simulation (`schedule/`) nor the choice of plans to simulate.
"""

from dataclasses import dataclass, field, replace

from hetjax.cluster.cluster import Cluster
from hetjax.costs.costs import Costs
from hetjax.costs.plan_costs import costs_of, usd_per_hour
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.request import PlanRequest
from hetjax.plans.plan import Plan
from hetjax.schedule.bound import computing_bound_s
from hetjax.schedule.certainty import Certainty, certainty_of
from hetjax.schedule.predicted import Predicted, predict
from hetjax.schedule.search import Forms, fastest_forms, may_split, with_schedule
from hetjax.schedule.simulation.result import shares_devices
from hetjax.stage.partition import tied_holders


def evaluate_plan(
    request: PlanRequest,
    plan: Plan,
    schedule: str = "h1f1b",
    *,
    climbs: bool = True,
    forms: Forms = "all",
) -> Predicted:
    """Simulate the plan under a schedule (a name of `schedule/search.py`, which also
    explains `climbs` and `forms`).

    Stages without precision or attention get those of the request. Raises
    NoFeasiblePlan if the plan needs more memory than there is.
    """
    plan = request.said(plan)
    costs = _costs(request, plan, halves=may_split(schedule))
    tied = tied_holders(plan, request.model)
    plan = with_schedule(plan, schedule, costs, tied, climbs=climbs, forms=forms)
    price = usd_per_hour(plan, request.cluster, request.usd_per_kwh)
    return predict(plan, costs, tied, usd_per_hour=price)


def forms_for(request: PlanRequest, plan: Plan, most: int) -> tuple[int, ...]:
    """Return the forms of schedules that suit a plan best (`schedule/search.py`)."""
    plan = request.said(plan)
    costs = _costs(request, plan, halves=True)
    return fastest_forms(plan, costs, tied_holders(plan, request.model), most)


def as_planned(request: PlanRequest, plan: Plan) -> Predicted:
    """Simulate a plan in the order of actions that it has. Raises NoFeasiblePlan if it
    needs more memory than there is."""
    plan = request.said(plan)
    costs = _costs(request, plan, halves=True)
    price = usd_per_hour(plan, request.cluster, request.usd_per_kwh)
    tied = tied_holders(plan, request.model)
    return predict(plan, costs, tied, usd_per_hour=price)


def how_sure(request: PlanRequest, predicted: Predicted) -> Certainty:
    """Return the certainty of the prediction for a plan of the request."""
    plan = predicted.plan
    halves = may_split(plan.schedule) or bool(plan.programs)

    def costs_on(cluster: Cluster) -> Costs:
        return _costs(replace(request, cluster=cluster), plan, halves=halves)

    profile = request.profile
    return certainty_of(
        predicted,
        request.cluster,
        costs_on,
        measured=frozenset() if profile is None else profile.devices,
        calibration=request.calibration,
    )


def least_step_s(request: PlanRequest, plan: Plan) -> float:
    """Return a time that the plan's step takes at least, whatever its schedule. This
    takes a small part of the time of `evaluate_plan`.

    Raises BadInput if the profile lacks a layer.
    """
    plan = request.said(plan)
    costs = _costs(request, plan, halves=False, counts_memory=False)
    return computing_bound_s(plan, costs)


def _costs(
    request: PlanRequest, plan: Plan, *, halves: bool, counts_memory: bool = True
) -> Costs:
    return costs_of(
        plan,
        request.model,
        request.cluster,
        request.profile,
        dtype=request.dtype,
        optimizer=request.optimizer,
        gradient_wire=request.gradient_wire,
        halves=halves,
        counts_memory=counts_memory,
        compiled=request.compiled,
    )


@dataclass(frozen=True, slots=True)
class PlanEvaluator:
    """Evaluates each plan once, under `schedule`. If that does not allow stages that
    share devices, such plans get the fastest usual form of a schedule that does."""

    request: PlanRequest
    schedule: str = "h1f1b"
    seen: dict[Plan, Predicted | None] = field(default_factory=dict)

    def __call__(self, plan: Plan) -> Predicted | None:
        """Return the simulated plan; None if it exceeds memory."""
        plan = self.request.said(plan)
        if plan not in self.seen:
            shares = shares_devices(plan)
            name, forms = ("searched", "usual") if shares else (self.schedule, "all")
            try:
                self.seen[plan] = evaluate_plan(
                    self.request, plan, name, climbs=not shares, forms=forms
                )
            except NoFeasiblePlan:
                self.seen[plan] = None
        return self.seen[plan]
