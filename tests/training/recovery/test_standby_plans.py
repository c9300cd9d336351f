# SPDX-License-Identifier: Apache-2.0
"""Standby plans: for which clusters, when, and that they equal the later plans."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import load_cluster
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import read_plan
from hetjax.runtime.worker.background import Warmer
from hetjax.training.layout.plan_choice import next_plan
from hetjax.training.layout.planning_process import Planning
from hetjax.training.recovery.standby_plans import StandbyPlans, likely
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import preset


def cluster_of(*names: str, spot: str = "") -> Cluster:
    nodes = (Node(name=n, device="H20", count=1, spot=n in spot) for n in names)
    return Cluster(name="lab", nodes=tuple(nodes))


def plan_of(*names: str) -> Plan:
    stages = tuple(
        Stage(node=name, devices=(0,), layers=(n, n + 1), launch_ahead=1)
        for n, name in enumerate(names)
    )
    replica = Replica(num_microbatches=1, microbatch_size=1, stages=stages)
    return Plan(model="m", seq_len=8, global_batch=1, replicas=(replica,))


def replan(cluster: Cluster, current: Plan) -> Plan:
    return plan_of(*(node.name for node in cluster.nodes))


@dataclass
class Looks:
    """Started searches, each of which finds one plan per call."""

    begun: list["Looks"] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)
    is_closed: bool = False

    def __call__(self, clusters: Sequence[Cluster], plan: Plan) -> "Looks":
        self.begun.append(Looks(clusters=[*clusters]))
        return self.begun[-1]

    def found(self) -> list[tuple[Cluster, Plan]]:
        assert not self.is_closed
        asked = self.clusters[:1]
        del self.clusters[:1]
        return [(cluster, replan(cluster, PAIR[1])) for cluster in asked]

    def close(self) -> None:
        self.is_closed = True


PAIR = cluster_of("a", "b"), plan_of("a", "b")


def until(there: Callable[[], object], limit_s: float = 10.0) -> object:
    end_s = time.monotonic() + limit_s
    while not (found := there()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return found


def test_any_one_node_of_the_plan_may_be_lost_spot_nodes_first():
    found = likely(cluster_of("a", "b", "c", "d", spot="c"), plan_of("a", "b", "c"))
    names = ["".join(node.name for node in cluster.nodes) for cluster in found]
    assert names == ["abd", "bcd", "acd"]
    assert not likely(cluster_of("a"), plan_of("a"))


def test_what_was_foreseen_is_told_once_and_is_the_plan_when_it_happens():
    asked: list[Cluster] = []

    def counting(cluster: Cluster, current: Plan) -> Plan:
        asked.append(cluster)
        return replan(cluster, current)

    foresight = StandbyPlans(counting, Looks(), 0.05)
    assert not foresight.found(*PAIR)  # too early
    time.sleep(0.05)
    told = [foresight.found(*PAIR) for _ in range(3)]
    assert [[plan for _, plan in one] for one in told] == [
        [plan_of("b")],
        [plan_of("a")],
        [],
    ]
    assert foresight.plan(cluster_of("b"), PAIR[1]) == plan_of("b")
    assert not asked
    foresight.plan(cluster_of("b", "c"), PAIR[1])
    assert asked == [cluster_of("b", "c")]


def test_a_change_ends_the_look_and_what_it_found():
    looks = Looks()
    foresight = StandbyPlans(replan, looks, 1e-9)
    foresight.found(*PAIR)
    assert foresight.found(*PAIR)
    other = cluster_of("a", "b", "c"), plan_of("a", "b", "c")
    foresight.found(*other)
    assert [look.is_closed for look in looks.begun] == [True, False]
    assert foresight.plan(cluster_of("b"), plan_of("b", "a")) == plan_of("b")
    foresight.close()
    assert all(look.is_closed for look in looks.begun)


def test_zero_or_a_single_node_never_looks_ahead():
    for after_s, now in ((0.0, PAIR), (1e-9, (cluster_of("a"), plan_of("a")))):
        looks = Looks()
        foresight = StandbyPlans(replan, looks, after_s)
        for _ in range(3):
            time.sleep(0.001)
            assert not foresight.found(*now)
        assert not looks.begun


def tiny(**changed: Any) -> tuple[RunConfig, Cluster, Plan]:
    found = preset("tiny")
    assert found.cluster is not None and found.plan is not None
    config = replace(found.config, **changed)
    return config, load_cluster(found.cluster), read_plan(found.plan)


def test_a_process_plans_as_the_run_would_and_says_nothing_where_nothing_fits():
    config, cluster, plan = tiny(planner="even")
    too_small = replace(cluster.nodes[0], memory_gib=1e-3)
    clusters = [
        replace(cluster, nodes=(too_small,), links=()),
        *likely(cluster, plan)[:1],
    ]
    planning = Planning(config, clusters, plan)
    try:
        found = until(planning.found, 60.0)
        expected = next_plan(config, model_preset("tiny"), clusters[1], plan)
        assert found == [(clusters[1], expected)]
        assert not planning.found()
    finally:
        planning.close()


def test_what_a_library_prints_beside_the_plans_is_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A solver may write to the file descriptor itself, past Python's `sys.stdout`."""
    code = "import atexit, os\natexit.register(lambda: os.write(1, b'no plan\\n'))\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    config, cluster, plan = tiny(planner="even")
    planning = Planning(config, likely(cluster, plan)[:1], plan)
    found = list[tuple[Cluster, Plan]]()
    try:
        until(lambda: found.extend(planning.found()) or planning.has_ended, 60.0)
        assert len(found + planning.found()) == 1
    finally:
        planning.close()


def test_a_process_that_fails_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fails = tmp_path / "python"
    fails.write_text("#!/bin/sh\nprintf '1\n2\n3\n4\n' >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fails))
    config, cluster, plan = tiny()
    planning = Planning(config, likely(cluster, plan), plan)
    try:
        with pytest.warns(UserWarning, match="planning ahead failed: 2; 3; 4"):
            until(lambda: planning.found() or planning.has_ended)
        assert not planning.found()
    finally:
        planning.close()


def test_a_run_that_ends_leaves_nothing_that_plans():
    before, others = {*threading.enumerate()}, {*children()}
    config, cluster, plan = tiny()
    foresight = StandbyPlans(replan, partial(Planning, config), 1e-9)
    foresight.found(cluster, plan)
    time.sleep(0.001)
    foresight.found(cluster, plan)
    (child,) = {*children()} - others  # those of earlier tests may be ending
    # in a thread, a search would abort the process when its interpreter ends
    assert {*threading.enumerate()} <= before
    foresight.close()
    assert child not in children()


def children() -> list[str]:
    """Return the processes that plan ahead for this one."""
    task = Path(f"/proc/{os.getpid()}/task")
    pids = [pid for one in task.glob("*/children") for pid in one.read_text().split()]
    found: list[str] = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"hetjax.training.layout.planning_process" in command:
                found.append(pid)
    return found


def test_what_fails_in_the_background_holds_nobody_up():
    done: list[int] = []
    warmer = Warmer()

    def fails() -> None:
        done.append(1)
        raise ValueError("no")

    warmer.add(fails)
    warmer.add(lambda: done.append(2))
    assert until(lambda: done == [1, 2])
    assert until(lambda: warmer.is_done)


def test_what_waits_in_the_background_is_not_done_until_it_is_or_is_forgotten():
    go_on, begun = threading.Event(), threading.Event()

    def compile_() -> None:
        begun.set()
        go_on.wait()

    warmer = Warmer()
    assert warmer.is_done
    warmer.add(compile_)
    warmer.add(compile_)
    begun.wait()
    warmer.clear()
    assert not warmer.is_done
    go_on.set()
    assert until(lambda: warmer.is_done)
