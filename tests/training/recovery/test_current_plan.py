# SPDX-License-Identifier: Apache-2.0
"""The current plan of a run: when a node leaves, or when another plan is requested."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.errors import NoFeasiblePlan
from hetjax.plans.plan import Plan
from hetjax.training.recovery.current_plan import CurrentPlan
from hetjax.training.recovery.membership import Membership
from hetjax.training.recovery.standby_plans import StandbyPlans
from tests.training.recovery.test_standby_plans import Looks, cluster_of, plan_of

LIMIT_S = 30.0


class Planner:
    """A planner that waits for `goes_on`, and records the nodes of each request."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, cluster: Cluster, current: Plan) -> Plan:
        names = [node.name for node in cluster.nodes]
        self.asked.append("".join(names))
        self.has_begun.set()
        assert self.goes_on.wait(LIMIT_S)
        return plan_of(*names)


class Workers:
    """The workers of a controller, which compile ahead until they are `done`."""

    def __init__(self, *workers: str) -> None:
        self.workers, self.done, self.asked = workers, False, list[str]()

    def are_compiled(self, workers: Sequence[str]) -> bool:
        self.asked += workers
        return self.done


NOBODY: Any = Workers()


def run_on(
    file: Path, cluster: Cluster, planner: Any, compiles_ahead: bool = False
) -> CurrentPlan:
    file.write_text(cluster_toml(cluster))
    config: Any = SimpleNamespace(
        membership=Membership(cluster, file),
        standby_plans=StandbyPlans(planner, Looks(), 0.0),
        recovers=True,
        compiles_ahead=compiles_ahead,
        context=SimpleNamespace(worker_settings=lambda cluster, plan: {}),
    )
    return CurrentPlan(cluster, plan_of(*(n.name for n in cluster.nodes)), config)


def step(now: CurrentPlan, controller: Any = NOBODY) -> bool:
    """Do the driver's work before a step; return whether the plan changes."""
    list(now.standby(controller))
    return now.is_outdated(again=True) and now.replan(is_needed=False)


def remove_b(file: Path) -> None:
    file.write_text(cluster_toml(cluster_of("a", "c")))


@pytest.mark.parametrize("order", ["file first", "file while planning", "file later"])
def test_a_node_that_leaves_and_is_taken_out_of_the_file_ends_no_run(
    order: str, tmp_path: Path
):
    file, planner = tmp_path / "cluster.toml", Planner()
    now = run_on(file, cluster_of("a", "b", "c"), planner)
    with ThreadPoolExecutor() as threads:
        if order == "file first":
            remove_b(file)
        left = threads.submit(now.leave, "b")
        if order != "file first":
            assert planner.has_begun.wait(LIMIT_S)
        if order == "file while planning":
            remove_b(file)
        stepped = threads.submit(step, now)
        planner.goes_on.set()
        assert left.result(LIMIT_S)
        if order == "file later":
            remove_b(file)
        assert stepped.result(LIMIT_S) or step(now)
    assert not step(now)
    assert now.plan == plan_of("a", "c")
    assert planner.asked == ["ac"]


def test_the_last_node_cannot_leave_and_one_for_whose_rest_nothing_fits_stays(
    tmp_path: Path,
):
    alone = run_on(tmp_path / "alone.toml", cluster_of("a"), Planner())
    assert not alone.leave("a")

    def none(cluster: Cluster, current: Plan) -> Plan:
        asked.append(cluster)
        raise NoFeasiblePlan(got="too little memory", allowed="", fix="")

    asked: list[Cluster] = []
    pair = run_on(tmp_path / "pair.toml", cluster_of("a", "b"), none)
    for _ in range(2):  # a second attempt, as it may fit by then
        with pytest.warns(UserWarning, match="no plan for the nodes a: too"):
            assert not pair.leave("b")
    assert len(asked) == 2


def test_a_loss_after_its_node_was_missed_ends_the_run_if_nothing_fits_the_rest(
    tmp_path: Path,
):
    """Otherwise the run would start the lost worker again and again."""

    def none(cluster: Cluster, current: Plan) -> Plan:
        raise NoFeasiblePlan(got="too little memory", allowed="", fix="")

    file = tmp_path / "pair.toml"
    pair = run_on(file, cluster_of("a", "b"), none)
    file.write_text(cluster_toml(cluster_of("a")))
    with pytest.warns(UserWarning, match="no plan for the nodes a: too"):
        assert not step(pair)  # b's worker may still be at work
    assert not step(pair)
    with pytest.raises(NoFeasiblePlan, match="too little memory"):
        pair.replan(is_needed=True)


def test_a_plan_that_is_asked_for_is_gone_by_once_workers_have_compiled_it(
    tmp_path: Path,
):
    now = run_on(tmp_path / "abc.toml", cluster_of("a", "b", "c"), Planner(), True)
    first, workers = now.plan, Workers("a", "b", "c")
    now.move_to(plan_of("a", "b"))
    assert [plan for _, plan in now.standby(workers)] == [plan_of("a", "b")]  # pyright: ignore
    assert not step(now, workers) and now.plan == first
    assert {*workers.asked} == {"a", "b"}
    workers.done = True
    assert list(now.standby(workers)) == []  # pyright: ignore
    assert not now.replan(is_needed=True) and now.plan == first  # a loss just now
    assert step(now, workers) and now.plan == plan_of("a", "b")
    assert not step(now, workers)


def test_a_plan_is_not_gone_by_that_was_taken_back_or_made_for_other_nodes(
    tmp_path: Path,
):
    file, planner = tmp_path / "abc.toml", Planner()
    planner.goes_on.set()
    now = run_on(file, cluster_of("a", "b", "c"), planner)
    now.move_to(plan_of("a"))
    now.move_to(None)
    assert not step(now) and not step(now)
    now.move_to(plan_of("b"))
    remove_b(file)
    assert step(now) and now.plan == plan_of("a", "c")
    assert not step(now)
