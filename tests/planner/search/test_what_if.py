# SPDX-License-Identifier: Apache-2.0
"""Clusters with a node more or fewer: their best plans, against every plan for them."""

import math
from dataclasses import replace
from typing import Any

import pytest

from hetjax.cluster.cluster import Cluster
from hetjax.planner.model.evaluator import as_planned
from hetjax.planner.model.objectives import Objective
from hetjax.planner.search import what_if
from hetjax.planner.search.find import Search
from hetjax.planner.search.what_if import best_on_others, other_clusters
from hetjax.schedule.simulation.result import shares_devices
from tests.planner.whole_space import fastest_s, random_request

SEEDS = [14, 28]


def searched(seed: int) -> Search:
    search = Search(random_request(seed), [Objective()], local_work=2_500)
    search.run(proves=False)
    return search


def num_nodes(cluster: Cluster) -> int:
    return len(cluster.nodes)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_for_a_node_more_or_fewer_is_faster(seed: int) -> None:
    search = searched(seed)
    clusters = dict(other_clusters(search.request))
    now = search.request.cluster
    changes = [num_nodes(cluster) - num_nodes(now) for cluster in clusters.values()]
    kinds = len(search.request.classes)
    assert sorted(changes) == [-1] * kinds + [1] * kinds
    found = best_on_others(search, Objective(), clusters)
    assert list(found) == list(clusters)
    (ours,) = search.found()
    for name, best in found.items():
        request = replace(search.request, cluster=clusters[name])
        least_s = fastest_s(request)
        if best is None:
            assert least_s == math.inf
            continue
        step_s = best.simulation.step_time_s
        assert as_planned(request, best.plan).simulation.step_time_s == step_s
        assert step_s <= least_s * 1.001, name
        if num_nodes(clusters[name]) > num_nodes(now):
            assert step_s <= ours.best.simulation.step_time_s
        else:
            assert step_s >= ours.best.simulation.step_time_s


def test_a_faster_plan_for_fewer_nodes_becomes_the_best_plan() -> None:
    search = searched(SEEDS[0])
    request = search.request
    slowest = max(
        search.incumbents.simulated(), key=lambda found: found.simulation.step_time_s
    )
    begun = Search(request, [Objective()], local_work=0)
    begun.incumbents.consider(slowest.plan, "the slowest")
    found = best_on_others(begun, Objective(), dict(other_clusters(request)))
    fewer = [f for name, f in found.items() if f and name.endswith("fewer")]
    steps_s = [best.simulation.step_time_s for best in fewer]
    (ours,) = begun.found()
    assert min(steps_s) < slowest.simulation.step_time_s
    assert ours.best_h1f1b.plan.schedule in ("1f1b", "h1f1b")
    assert not ours.best_h1f1b.plan.programs
    assert ours.best.simulation.step_time_s <= min(steps_s)


def test_a_search_that_ends_early_is_left_out_and_more_nodes_are_no_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = searched(SEEDS[0])
    slowest = max(
        search.incumbents.simulated(), key=lambda found: found.simulation.step_time_s
    )
    clusters = dict(other_clusters(search.request))
    ends_early, ended = next(iter(clusters)), list[bool]()

    def finds_a_slow_plan(other: Any, objective: Any, name: str, there: Cluster) -> Any:
        ended.append(name == ends_early)
        fits = slowest.plan.nodes <= {node.name for node in there.nodes}
        return slowest if fits else None

    monkeypatch.setattr(what_if, "_best_on", finds_a_slow_plan)
    monkeypatch.setattr(what_if, "is_over", lambda: ended[-1])
    found = best_on_others(search, Objective(), clusters)
    assert [*found] == [name for name in clusters if name != ends_early]
    (ours,) = search.found()
    least_s = ours.best.simulation.step_time_s
    more = [best for name, best in found.items() if "more" in name and best]
    assert more and all(each.simulation.step_time_s <= least_s for each in more)


def test_a_search_for_one_more_node_knows_the_present_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = searched(SEEDS[0])
    (ours,) = search.found()

    slowest = max(
        search.incumbents.simulated(), key=lambda found: found.simulation.step_time_s
    )

    def finds_a_slow_plan(other: Search, *, proves: bool) -> None:
        other.incumbents.consider(slowest.plan, "the slowest")

    monkeypatch.setattr(Search, "run", finds_a_slow_plan)
    more = {n: c for n, c in other_clusters(search.request) if "more" in n}
    found = best_on_others(search, Objective(), more)
    assert list(found) == list(more)
    for best in found.values():
        assert best is not None
        assert best.simulation.step_time_s <= ours.best.simulation.step_time_s


@pytest.mark.parametrize("interleaves", [False, True])
def test_a_plan_with_a_schedule_is_not_taken_for_one_under_h1f1b(
    interleaves: bool,
) -> None:
    search, objective = searched(SEEDS[0]), Objective()
    scheduled = next(
        found
        for found in search.incumbents.under_all_schedules()
        if found.plan.programs and shares_devices(found.plan) == interleaves
    )
    slowest = max(
        search.incumbents.simulated(), key=lambda found: found.simulation.step_time_s
    )
    begun = Search(search.request, [objective]).incumbents
    begun.consider(slowest.plan, "the slowest")
    begun.consider_scheduled(scheduled.plan, "another search")
    whole, fastest = (
        begun.best_h1f1b[objective].predicted,
        begun.best[objective].predicted,
    )
    assert not whole.plan.programs and not shares_devices(whole.plan)
    assert fastest.simulation.step_time_s <= scheduled.simulation.step_time_s
