# SPDX-License-Identifier: Apache-2.0
"""Searches that are stopped: nested limits, and the best plan at the end."""

import math
import time
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from hetjax.planner.bound import certificate, partial_pipelines
from hetjax.planner.bound.certificate import proved
from hetjax.planner.model.deadline import (
    SearchWork,
    TimeUp,
    check_deadline,
    check_stopped,
    deadline,
    left_s,
)
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms import terms
from hetjax.planner.search.find import Found, Search
from tests.planner.whole_space import two_kinds
from tests.short_runs import draws


def test_a_limit_inside_another_ends_with_it() -> None:
    assert math.isinf(left_s())
    with deadline() as outer:
        with deadline(60.0):
            assert 50.0 < left_s() <= 60.0
            check_deadline()
            outer.stop()
            with pytest.raises(TimeUp):
                check_deadline()
        with deadline(0.0), pytest.raises(TimeUp):
            check_deadline()
    assert math.isinf(left_s())


def ends_after(monkeypatch: pytest.MonkeyPatch, num_checks: int) -> None:
    """Make the time run out at one of the checks of the dynamic program."""
    asked = count()

    def counted() -> None:
        if next(asked) >= num_checks:
            raise TimeUp

    monkeypatch.setattr(partial_pipelines, "check_deadline", counted)


@pytest.mark.parametrize("num_checks", draws([0, 5, 100, 1, 20, 300], short=3))
def test_wherever_a_search_ends_it_has_a_plan_and_a_true_bound(
    num_checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = two_kinds()
    whole = proved(request).step_s
    assert whole is not None
    ends_after(monkeypatch, num_checks)
    search = Search(request, [Objective()], local_work=0)
    search.run()
    (found,) = search.found()
    assert found.lower_bound_s is not None
    assert 0 < found.lower_bound_s <= whole * (1 + 1e-9)
    assert found.best.simulation.step_time_s >= whole * (1 - 1e-9)


def test_a_search_without_time_is_over_with_its_first_plan() -> None:
    begin_s = time.monotonic()
    with deadline(0.0):
        search = Search(two_kinds(), [Objective()])
        search.run()
    (found,) = search.found()
    assert found.source == "parts"  # the search always finishes its first plan
    assert time.monotonic() - begin_s < 5.0


def test_plans_of_others_are_gone_on_from_where_they_are_better() -> None:
    request = two_kinds()
    best = Search(request, [Objective()], local_work=2_500)
    best.run()
    (far,) = best.found()
    with deadline(0.0):
        search = Search(request, [Objective()])
        search.run()
    (near,) = search.found()
    assert near.best.simulation.step_time_s > far.best.simulation.step_time_s
    best.start_from({"worse": near.best.plan})
    assert best.found()[0].source == far.source
    with deadline(0.0):  # no other plan is better, however late
        search.start_from({"better": far.best.plan})
    (found,) = search.found()
    assert found.source == "better"
    assert found.best.plan.replicas == far.best.plan.replicas


@pytest.mark.parametrize("share", draws([0.1, 0.3, 0.02, 0.5, 0.8], short=2))
def test_the_same_work_finds_the_same_plan_whatever_the_time(share: float) -> None:
    request = two_kinds()

    def searched(
        seconds: float, planned: tuple[int, ...] = ()
    ) -> tuple[Found, SearchWork]:
        with deadline(seconds, planned) as limit:
            search = Search(request, [Objective()], local_work=2_500)
            search.run()
        return search.found()[0], limit.work

    begin_s = time.monotonic()
    _, whole = searched(math.inf)
    takes_s = time.monotonic() - begin_s
    assert whole.ended == []
    found, work = searched(takes_s * share)
    assert work.ended and work.checks < whole.checks
    again, same = searched(math.inf, work.done)
    assert same.checks == work.checks
    assert again.best.plan == found.best.plan and again.source == found.source
    assert again.lower_bound_s == found.lower_bound_s


def test_work_that_is_typed_ends_a_search_and_stopping_it_ends_it_before() -> None:
    with deadline(planned=(3,)) as limit:
        assert [math.isinf(left_s()) for _ in range(5)] == [True] * 3 + [False] * 2
        assert limit.work.done == (5,)
    with deadline(planned=(2, 9)) as outer:
        assert math.isinf(left_s())
        with deadline():
            assert left_s() == left_s() == 0.0  # the second check ends the inner one
        assert math.isinf(left_s())
        outer.stop()
        assert left_s() == 0.0


def test_a_search_that_is_stopped_before_its_first_plan_looks_at_no_more_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = count()
    usual = terms.kept_bytes

    def stopping(*given: Any) -> tuple[float, ...]:
        next(looked)
        limit.stop()
        return usual(*given)

    monkeypatch.setattr(terms, "kept_bytes", stopping)
    request = replace(two_kinds(), seq_len=8)  # not cached yet
    with deadline() as limit, pytest.raises(TimeUp):
        Search(request, [Objective()]).run()
    assert next(looked) <= len(request.model.layers)


def test_a_search_that_is_stopped_after_it_has_its_plan_and_says_that_none_is_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopping(request: PlanRequest, *given: Any, **named: Any) -> Problem:
        limit.stop()
        check_stopped()
        raise AssertionError("it went on")

    monkeypatch.setattr(certificate, "bound_problem", stopping)
    with deadline() as limit:
        search = Search(two_kinds(), [Objective()], local_work=0)
        search.run()
    (found,) = search.found()
    assert found.lower_bound_s is None and "search stopped" in found.bound.why
