# SPDX-License-Identifier: Apache-2.0
"""Schedules other than h1f1b: which plans try them, and in which order."""

from dataclasses import replace
from typing import Any

import pytest

from hetjax.cluster.cluster import part_of
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search import finish
from hetjax.planner.search.find import Search
from hetjax.planner.search.local_search import local_search
from hetjax.schedule.predicted import Predicted
from tests.planner.whole_space import two_kinds


def test_idle_nodes_are_tried_last(monkeypatch: pytest.MonkeyPatch):
    whole, wished = two_kinds(), Objective()
    part = replace(whole, cluster=part_of(whole.cluster, {"fast"}))
    search = Search(part, [wished])
    search.propose()
    starts = list(search.incumbents.simulated())
    tried_on: list[set[str]] = []

    def watched(start: Any, by: Any, wish: Any, there: PlanRequest, **more: Any) -> Any:
        tried_on.append({node.name for node in there.cluster.nodes})
        return local_search(start, by, wish, there, **more)

    monkeypatch.setattr(finish, "local_search", watched)
    alone = [found.plan for found in finish.finished(part, wished, starts, {})]
    searches, tried_on[:] = [*tried_on], []
    among = [found.plan for found in finish.finished(whole, wished, starts, {})]
    # as a search for the one node alone, and then from its best plan with both
    assert searches and all(nodes == {"fast"} for nodes in searches)
    assert tried_on[: len(searches)] == searches
    assert {"fast", "slow"} in tried_on[len(searches) :]
    assert {*alone} <= {*among}
    assert any(plan.nodes == {"fast", "slow"} for plan in among)


def test_the_best_plans_are_cut_in_parts_however_little_they_promise(
    monkeypatch: pytest.MonkeyPatch,
):
    request, wished = two_kinds(), Objective()
    search = Search(request, [wished])
    search.propose()
    found = sorted(search.incumbents.simulated(), key=lambda each: step_s(each))
    assert len(found) > 8
    cut: list[Any] = []
    monkeypatch.setattr(finish, "promise", lambda each, **_: -step_s(each))
    monkeypatch.setattr(
        finish, "_in_parts", lambda request, plans, known: cut.extend(plans) or ()
    )
    tried = [(each, each.plan) for each in found]
    assert not [*finish._finished_in_parts(request, wished, found[0], tried, {})]
    plans = [each.plan for each in found]
    assert cut == [*plans[:4], *reversed(plans[4:])]


def step_s(found: Predicted) -> float:
    return found.simulation.step_time_s


def test_a_best_plan_that_never_waits_is_tried_too():
    """The halves of its backward passes may take less time than the whole."""
    request, wished = two_kinds(), Objective()
    search = Search(request, [wished])
    search.propose()
    busy = [
        found
        for found in search.incumbents.simulated()
        if found.simulation.busiest_s == step_s(found)
    ]
    best = min(busy, key=step_s)
    tried = [*finish.finished(request, wished, [best], {})]
    assert tried and step_s(tried[0]) <= step_s(best)
