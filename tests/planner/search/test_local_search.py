# SPDX-License-Identifier: Apache-2.0
"""Moves that a quick bound rules out: the bound holds, and no better plan is lost."""

import math
from functools import partial

import pytest

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.evaluator import PlanEvaluator, evaluate_plan, least_step_s
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search import local_search as local_search_module
from hetjax.planner.search.local_search import local_search, reordered, swapped
from hetjax.plans.plan import Plan, StageMesh
from hetjax.schedule.predicted import Predicted
from tests.planner.whole_space import all_plans, random_request, two_kinds
from tests.planner.wide_space import Seat, plan_of, replica_of
from tests.short_runs import draws

_NUM_PLANS = 25  # of each request


def step_s(found: Predicted) -> float:
    return found.simulation.step_time_s


def some_plans(request: PlanRequest) -> list[Plan]:
    plans = list(all_plans(request))
    return plans[:: max(len(plans) // _NUM_PLANS, 1)]


@pytest.mark.parametrize("seed", draws(range(12), short=3))
@pytest.mark.parametrize("schedule", ["gpipe", "h1f1b", "zero-bubble", "searched"])
def test_no_schedule_is_faster_than_the_least_step(schedule: str, seed: int) -> None:
    request, ratios = random_request(seed), list[float]()
    for plan in some_plans(request):
        try:
            found = evaluate_plan(request, plan, schedule)
        except NoFeasiblePlan:
            continue
        ratios.append(step_s(found) / least_step_s(request, plan))
    assert min(ratios) >= 1 - 1e-9
    assert min(ratios) < 1.5  # a bound of nothing would rule nothing out


@pytest.mark.parametrize("seed", draws([5, 9, 6, 11], short=2))
def test_moves_that_are_ruled_out_change_nothing_but_the_work(seed: int) -> None:
    request, found, seen = random_request(seed), list[Predicted](), list[int]()
    for least in (None, partial(least_step_s, request)):
        evaluate = PlanEvaluator(request)
        starts = (evaluate(plan) for plan in all_plans(request))
        start = max(filter(None, starts), key=step_s)
        evaluate.seen.clear()
        found.append(
            local_search(start, evaluate, step_s, request, most_work=1e9, least=least)
        )
        seen.append(len(evaluate.seen))
    assert found[0].plan == found[1].plan
    assert seen[1] < seen[0]


def test_plans_that_are_ruled_out_count_as_work_and_ask_for_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request, asked = random_request(9), list[Plan]()
    evaluate = PlanEvaluator(request)
    start = next(filter(None, map(evaluate, all_plans(request))))

    def rules_all_out(plan: Plan) -> float:
        asked.append(plan)
        return math.inf

    def searched(most_work: float) -> int:
        asked.clear()
        end = local_search(
            start, evaluate, step_s, request, most_work=most_work, least=rules_all_out
        )
        assert end is start
        return len(asked)

    of_plan = start.plan.num_forwards + 100
    assert 1 <= searched(0.25 * of_plan) <= 4 < searched(1e9)
    monkeypatch.setattr(local_search_module, "is_over", lambda: len(asked) == 3)
    assert searched(1e9) == 3


def test_unlike_stages_trade_places_with_their_layers_and_without() -> None:
    request = two_kinds()
    seats = [
        Seat(node=node, devices=(0,), mesh=StageMesh(), remat="none")
        for node in ("fast", "slow")
    ]
    replica = replica_of(8, 1, seats, [(0, 3), (3, 4)])
    moved = [
        [(stage.node, stage.layers) for stage in plan.replicas[0].stages]
        for move in (reordered, swapped)
        for plan in move(plan_of(request, [replica]), [0], request)
    ]
    assert moved == [
        [("slow", (0, 1)), ("fast", (1, 4))],
        [("slow", (0, 3)), ("fast", (3, 4))],
    ]


def test_stages_trade_places_before_any_is_cut_onto_idle_devices() -> None:
    """A node of many idle devices would use up the work before the others are tried."""
    request = two_kinds()
    seats = [
        Seat(node=node, devices=(0,), mesh=StageMesh(), remat="none")
        for node in ("fast", "slow")
    ]
    start = PlanEvaluator(request)(
        plan_of(request, [replica_of(8, 1, seats, [(0, 3), (3, 4)])])
    )
    assert start is not None
    tried: list[Plan] = []
    local_search(start, tried.append, step_s, request, most_work=math.inf)
    nodes = [[stage.node for stage in plan.replicas[0].stages] for plan in tried]
    longer = [n for n, names in enumerate(nodes) if len(names) > 2]
    assert longer
    assert (
        max(n for n, names in enumerate(nodes) if names == ["slow", "fast"]) < longer[0]
    )
