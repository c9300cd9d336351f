# SPDX-License-Identifier: Apache-2.0
"""Limits that no plan meets: the error names the nearest plan, and its advice works."""

import re
from dataclasses import replace

import pytest

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.deadline import deadline
from hetjax.planner.model.objectives import Objective, Wish
from hetjax.planner.search.find import Found, find_plan
from hetjax.planner.search.limits import too_slow
from tests.planner.whole_space import two_kinds
from tests.short_runs import draws

TOKENS = 1e9


@pytest.fixture(scope="module")
def fastest() -> Found:
    return find_plan(two_kinds(), local_work=1_000)


def in_hours(hours: float, wish: Wish = "time") -> Objective:
    least = TOKENS / hours / 3600
    return Objective(wish=wish, min_tokens_per_s=least, tokens=TOKENS)


def hours_of(tokens_per_s: float) -> float:
    return TOKENS / tokens_per_s / 3600


def refused(objective: Objective) -> NoFeasiblePlan:
    with pytest.raises(NoFeasiblePlan) as raised:
        find_plan(two_kinds(), objective, local_work=1_000)
    return raised.value


@pytest.mark.parametrize("wish", draws(["time", "cost", "goodput"], short=1))
def test_a_deadline_that_is_missed_names_the_nearest_plan_and_one_that_is_kept(
    fastest: Found, wish: Wish
) -> None:
    best_hours = hours_of(fastest.best.tokens_per_s)
    error = refused(in_hours(best_hours * 0.999, wish))
    assert f"the fastest found is {best_hours:,.4g} hours" in error.got
    advice = re.fullmatch(r"give --deadline-hours ([\d.]+)", error.fix)
    assert advice is not None and best_hours <= float(advice[1]) <= best_hours * 1.001
    found = find_plan(two_kinds(), in_hours(float(advice[1]), wish), local_work=1_000)
    assert hours_of(found.best.tokens_per_s) <= float(advice[1])


def test_only_the_bound_says_that_no_plan_is_so_fast(fastest: Found) -> None:
    assert fastest.lower_bound_s is not None and fastest.gap is not None
    request = fastest.request
    most = request.global_batch * request.seq_len / fastest.lower_bound_s
    assert fastest.gap > 0.001
    never = refused(in_hours(hours_of(most) * 0.999))
    best = f"{hours_of(most):,.4g} hours at best: no plan with whole backward passes"
    assert never.allowed in (
        f"{best} is faster",
        best.replace("with whole backward passes", "without interleaved stages")
        + " is faster",
    )
    maybe = refused(in_hours(hours_of(most) * 1.001))
    assert "not known" in maybe.allowed and f"{hours_of(most):,.4g}" in maybe.allowed


def test_a_search_that_is_cut_short_advises_to_go_on(fastest: Found) -> None:
    with deadline(0.0):
        error = refused(in_hours(hours_of(fastest.best.tokens_per_s) * 0.999))
    assert error.fix.endswith(", or let the search run longer")
    assert "not known" in error.allowed


def test_a_search_that_was_cut_short_is_not_advised_to_go_on_against_a_bound(
    fastest: Found,
) -> None:
    assert fastest.lower_bound_s is not None
    request = fastest.request
    most = request.global_batch * request.seq_len / fastest.lower_bound_s
    with deadline(0.0):
        for share in (0.99, 1.01):
            wished = Objective(min_tokens_per_s=share * most)
            error = too_slow(request, wished, fastest.best, fastest.bound, "whole")
            assert ("let the search run longer" in error.fix) == (share < 1)


def test_a_price_that_is_too_low_names_the_cheapest_plan_and_node() -> None:
    request = two_kinds()
    cheapest = min(node.price_per_hour or 0.0 for node in request.cluster.nodes)
    assert cheapest > 0
    error = refused(Objective(max_usd_per_hour=cheapest / 2))
    assert f"the cheapest found costs {cheapest:g}" in error.got
    assert error.allowed == f"{cheapest:g} USD per hour or more: no node costs less"
    advice = re.fullmatch(r"give --max-usd-per-hour ([\d.]+)", error.fix)
    assert advice is not None
    within = Objective(max_usd_per_hour=float(advice[1]))
    found = find_plan(request, within, local_work=1_000).best
    assert found.usd_per_hour is not None
    assert found.usd_per_hour <= float(advice[1])


@pytest.mark.parametrize("slack", [1.5, 0.5])
def test_a_price_that_is_too_low_with_a_deadline_names_limits_that_a_plan_meets(
    fastest: Found, slack: float
) -> None:
    """With half the time of the fastest plan, no plan keeps the deadline."""
    hours = slack * hours_of(fastest.best.tokens_per_s)
    error = refused(replace(in_hours(hours), max_usd_per_hour=0.01))
    advice = dict(re.findall(r"--([\w-]+) ([\d.]+)", error.fix))
    assert ("deadline-hours" in advice) == (slack < 1)
    followed = in_hours(float(advice.get("deadline-hours", hours)))
    wished = replace(followed, max_usd_per_hour=float(advice["max-usd-per-hour"]))
    found = find_plan(two_kinds(), wished, local_work=1_000).best
    assert found.usd_per_hour is not None and wished.max_usd_per_hour is not None
    assert found.usd_per_hour <= wished.max_usd_per_hour
    assert found.tokens_per_s >= (wished.min_tokens_per_s or 0.0)


def test_both_limits_are_named_where_the_cheaper_plans_are_too_slow(
    fastest: Found,
) -> None:
    request = two_kinds()
    cheapest = min(node.price_per_hour or 0.0 for node in request.cluster.nodes)
    hours = hours_of(fastest.best.tokens_per_s)
    wished = in_hours(hours)
    error = refused(
        Objective(
            max_usd_per_hour=cheapest,
            min_tokens_per_s=wished.min_tokens_per_s,
            tokens=TOKENS,
        )
    )
    assert f"{cheapest:g} USD per hour and {hours:,.4g} hours for 1 bill" in error.got
