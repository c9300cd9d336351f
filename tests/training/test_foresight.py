# SPDX-License-Identifier: Apache-2.0
"""Plans made ahead: for which clusters, when, and that they are what comes then."""

import time
from collections.abc import Callable

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.runtime.warming import Warmer
from hetjax.training.foresight import Foresight, likely


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


def until(there: Callable[[], object]) -> object:
    end_s = time.monotonic() + 10.0
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

    foresight, now = (
        Foresight(counting, 0.05),
        (cluster_of("a", "b"), plan_of("a", "b")),
    )
    assert not foresight.found(*now)  # too early
    told = []
    until(lambda: told.extend(foresight.found(*now)) or len(told) == 2)
    assert {plan for _, plan in told} == {plan_of("a"), plan_of("b")}
    assert not foresight.found(*now)
    assert foresight.plan(cluster_of("b"), now[1]) == plan_of("b")
    assert len(asked) == 2
    foresight.plan(cluster_of("b", "c"), now[1])
    assert asked[-1] == cluster_of("b", "c")


def test_a_plan_that_was_made_from_another_is_not_used():
    foresight, now = Foresight(replan, 0.01), (cluster_of("a", "b"), plan_of("a", "b"))
    foresight.found(*now)
    until(lambda: foresight.found(*now))
    assert not foresight.found(cluster_of("a", "b", "c"), plan_of("a", "b", "c"))
    other = plan_of("b", "a")
    assert foresight.plan(cluster_of("b"), other) == plan_of("b")


def test_where_nothing_fits_there_is_nothing_to_be_ready_for():
    def refusing(cluster: Cluster, current: Plan) -> Plan:
        if cluster.nodes[0].name == "b":
            raise NoFeasiblePlan(got="memory", allowed="more", fix="add a node")
        return replan(cluster, current)

    foresight, now = (
        Foresight(refusing, 0.01),
        (cluster_of("a", "b"), plan_of("a", "b")),
    )
    foresight.found(*now)
    found = until(lambda: foresight.found(*now))
    assert found == [(cluster_of("a"), plan_of("a"))]


def test_zero_never_looks_ahead():
    foresight, now = Foresight(replan, 0.0), (cluster_of("a", "b"), plan_of("a", "b"))
    time.sleep(0.02)
    assert not foresight.found(*now) and not foresight.found(*now)


def test_what_fails_in_the_background_holds_nobody_up():
    done: list[int] = []
    warmer = Warmer()

    def fails() -> None:
        done.append(1)
        raise ValueError("no")

    warmer.add(fails)
    warmer.add(lambda: done.append(2))
    assert until(lambda: done == [1, 2])
