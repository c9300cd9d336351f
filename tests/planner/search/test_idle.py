# SPDX-License-Identifier: Apache-2.0
"""Devices that are not worth using: the evidence, against every plan that uses them."""

import math
from dataclasses import replace

import pytest

from hetjax.cluster.cluster import part_of
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.deadline import deadline
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Search, find_plan
from hetjax.planner.search.idle import try_idle, why_idle
from hetjax.plans.plan import Plan
from tests.planner.whole_space import all_plans, random_request, two_kinds


def num_used(request: PlanRequest, plan: Plan, kind: str) -> int:
    (names,) = [{n.name for n in c.nodes} for c in request.classes if c.name == kind]
    used = {(s.node, d) for _, _, s in plan.stages() for d in s.devices}
    return sum(node in names for node, _ in used)


def fastest_with_more_s(request: PlanRequest, than: Plan, kind: str) -> float:
    """Return the least step time of all plans that use more devices of the kind."""
    least_s = math.inf
    for plan in all_plans(request):
        if num_used(request, plan, kind) > num_used(request, than, kind):
            try:
                found_s = evaluate_plan(request, plan).simulation.step_time_s
            except NoFeasiblePlan:
                continue
            least_s = min(least_s, found_s)
    return least_s


@pytest.mark.parametrize("seed", [7, 10])
def test_the_best_plan_that_has_to_use_them_is_slower(seed: int) -> None:
    request = random_request(seed)
    search = Search(request, [Objective()], local_work=2_500)
    search.propose()
    search.improve(search.objectives)
    try_idle(search, Objective())
    (found,) = search.found()
    ours_s = found.best.simulation.step_time_s
    all_idle = why_idle(found, search.incumbents.simulated())
    assert all_idle
    for idle in all_idle:
        assert idle.instead is not None and idle.worse is not None
        assert num_used(request, idle.instead.plan, idle.node_class) > num_used(
            request, found.best.plan, idle.node_class
        )
        instead_s = idle.instead.simulation.step_time_s
        assert idle.worse == pytest.approx(instead_s / ours_s - 1) and idle.worse >= 0
        least_s = fastest_with_more_s(request, found.best.plan, idle.node_class)
        assert ours_s <= least_s * (1 + 1e-9)
        assert least_s * (1 - 1e-9) <= instead_s <= least_s * 1.1


def test_a_kind_that_was_cut_short_is_told_from_one_that_is_not_worth_using() -> None:
    search = Search(random_request(7), [Objective()])
    search.propose()
    (found,), simulated = search.found(), list(search.incumbents.simulated())
    with deadline(0.0):
        cut_short = try_idle(search, Objective())
    idle = why_idle(found, simulated, cut_short)
    assert idle and not any(kind.is_searched for kind in idle)
    in_full = try_idle(search, Objective())
    assert all(kind.is_searched for kind in why_idle(found, simulated, in_full))


def test_where_all_is_in_use_there_is_nothing_to_show() -> None:
    search = Search(random_request(2), [Objective()])
    search.propose()
    try_idle(search, Objective())
    assert why_idle(search.found()[0], search.incumbents.simulated()) == ()


def test_idle_devices_are_those_of_the_plan_that_is_shown() -> None:
    """They are not those of the best plan under h1f1b, if that is another plan."""
    request = two_kinds()
    found = find_plan(request, local_work=0)
    alone = replace(request, cluster=part_of(request.cluster, ["fast"]))
    best = find_plan(alone, local_work=0).best
    shown = replace(found, best=best)
    with_all = evaluate_plan(
        request,
        next(plan for plan in all_plans(request) if plan.nodes == {"fast", "slow"}),
    )
    (idle,) = why_idle(replace(shown, best_h1f1b=with_all), [with_all])
    assert set(idle.devices) == {"slow"}
    assert idle.instead is with_all and idle.worse == 0.0
