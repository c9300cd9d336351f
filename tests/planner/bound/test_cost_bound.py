# SPDX-License-Identifier: Apache-2.0
"""The bound on cost: no plan of a small space is cheaper, and some come near it."""

from dataclasses import replace
from math import inf
from random import Random

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.plan_costs import costs_of, usd_per_hour
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.cost_bound import least_usd_per_million_tokens
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.schedule.bound import ROUNDING, prefix_bound_s
from tests.planner.whole_space import all_plans, random_request, two_kinds
from tests.short_runs import draws


def priced(seed: int) -> PlanRequest:
    """Return a random small request in which at least some nodes have a price."""
    request, r = random_request(seed), Random(f"prices {seed}")
    nodes = tuple(
        replace(
            node, price_per_hour=r.choice([None, r.uniform(0.1, 9.0)]) if n else 1.0
        )
        for n, node in enumerate(request.cluster.nodes)
    )
    return replace(request, cluster=replace(request.cluster, nodes=nodes))


def cheapest_usd(request: PlanRequest) -> float:
    """Return the least USD per million tokens over all plans; inf if none fits."""
    best = inf
    for plan in all_plans(request):
        usd = usd_per_hour(plan, request.cluster)
        if usd is None:
            continue
        costs = costs_of(
            plan,
            request.model,
            request.cluster,
            None,
            dtype=request.dtype,
            optimizer=request.optimizer,
        )
        tokens = request.global_batch * request.seq_len
        if usd / 3600 * prefix_bound_s(plan, costs) / tokens * 1e6 >= best:
            continue
        try:
            found = evaluate_plan(request, plan).usd_per_million_tokens
        except NoFeasiblePlan:
            continue
        assert found is not None
        best = min(best, found)
    return best


@pytest.mark.parametrize("seed", draws([0, 6, 9, 1, 2, 3, 7, 11], short=3))
def test_the_cheapest_of_all_plans_is_above_the_bound_by_less_than_a_twelfth(
    seed: int,
) -> None:
    """So this test would detect a bound that is a twelfth too high."""
    request = priced(seed)
    least, cheapest = least_usd_per_million_tokens(request), cheapest_usd(request)
    assert least is not None
    assert least <= cheapest * (1 + ROUNDING) < 13 / 12 * least


@pytest.mark.parametrize("seed", draws([4, 5, 8, 10, 12, 13], short=1))
def test_no_plan_is_cheaper_than_the_bound(seed: int) -> None:
    request = priced(seed)
    least = least_usd_per_million_tokens(request)
    assert least is None or least <= cheapest_usd(request) * (1 + ROUNDING)


def test_electricity_bounds_as_the_same_price_does():
    """A device of 300 W at 0.25 USD per kWh costs 0.075 USD an hour."""
    (fast, slow), request = two_kinds().cluster.nodes, two_kinds()
    watts = replace(fast, device="RTX-A6000", price_per_hour=None)
    paid = replace(watts, price_per_hour=watts.count * 0.075)

    def least(node: Node) -> float | None:
        cluster = Cluster(name="one", nodes=(node, slow))
        return least_usd_per_million_tokens(
            replace(request, cluster=cluster, usd_per_kwh=0.25)
        )

    assert least(watts) == pytest.approx(least(paid))


@pytest.mark.parametrize("usd", [None, 0.0])
def test_there_is_no_bound_where_nothing_costs_anything(usd: float | None):
    request = two_kinds()
    nodes = tuple(replace(n, price_per_hour=usd) for n in request.cluster.nodes)
    free = replace(request, cluster=replace(request.cluster, nodes=nodes))
    assert least_usd_per_million_tokens(free) is None


def test_a_search_by_cost_has_a_gap_of_cost_and_others_have_none():
    request = two_kinds()
    found = find_plan(request, Objective(wish="cost"), local_work=2_500)
    usd = found.best.usd_per_million_tokens
    assert found.least_usd and usd and found.cost_gap is not None
    assert found.least_usd <= usd * (1 + ROUNDING)
    assert found.cost_gap == pytest.approx(usd / found.least_usd - 1)
    assert find_plan(request, local_work=500).cost_gap is None
