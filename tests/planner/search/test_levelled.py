# SPDX-License-Identifier: Apache-2.0
"""A node that is a little faster than its like still takes an equal part."""

from dataclasses import replace

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.speeds import Speeds
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Search
from hetjax.planner.search.first.levelled import levelled
from hetjax.schedule.predicted import Predicted
from tests.planner.whole_space import small_model, two_kinds

SLOW = Node(
    name="n0",
    device="made-up",
    count=2,
    peak_tflops=0.05,
    memory_gib=1.0,
    memory_gb_per_s=50.0,
    intra_node_gb_per_s=5.0,
    network_gbit_per_s=0.5,
    precision="float32",
)


def _request(*nodes: Node) -> PlanRequest:
    named = tuple(replace(node, name=f"n{n}") for n, node in enumerate(nodes))
    cluster = Cluster(name="alike", nodes=named)
    return two_kinds(cluster=cluster, model=small_model(4))


def _first_best(request: PlanRequest) -> Predicted:
    search = Search(request, [Objective()])
    search.propose()
    return search.incumbents.best_h1f1b[search.objectives[0]].predicted


def test_nodes_that_differ_only_in_speed_become_as_slow_as_the_slowest():
    fast = replace(SLOW, peak_tflops=0.06, memory_gb_per_s=40.0)
    measured = replace(SLOW, speeds=Speeds(products=0.9, memory=1.1))
    found = levelled(_request(SLOW, fast, measured))

    assert found is not None
    assert [node.name for node in found.cluster.nodes] == ["n0", "n1", "n2"]
    assert {node.peak_tflops for node in found.cluster.nodes} == {0.05}
    assert {node.memory_gb_per_s for node in found.cluster.nodes} == {40.0}
    assert {node.speeds for node in found.cluster.nodes} == {Speeds(products=0.9)}
    assert len(found.classes) == 1


def test_nodes_that_differ_in_more_than_speed_stay_as_they_are():
    others = (
        replace(SLOW, count=1, peak_tflops=0.06),
        replace(SLOW, memory_gib=2.0, peak_tflops=0.06),
        replace(SLOW, network_gbit_per_s=1.0, peak_tflops=0.06),
        replace(SLOW, zone="east", peak_tflops=0.06),
        replace(SLOW, price_per_hour=1.0, peak_tflops=0.06),
        replace(SLOW, device="another", peak_tflops=0.06),
    )

    assert levelled(_request(SLOW, *others)) is None
    assert levelled(_request(SLOW, SLOW)) is None


def test_a_node_that_is_faster_than_its_like_makes_no_plan_slower():
    faster = _request(SLOW, SLOW, SLOW, replace(SLOW, peak_tflops=0.055))
    alike = _first_best(_request(SLOW, SLOW, SLOW, SLOW))

    there = evaluate_plan(faster, alike.plan).simulation.step_time_s
    assert _first_best(faster).simulation.step_time_s <= there
    assert there <= alike.simulation.step_time_s
