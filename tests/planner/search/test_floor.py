# SPDX-License-Identifier: Apache-2.0
"""No answer is worse than a plan for fewer devices, however little time there is."""

import random
from dataclasses import replace
from itertools import product

import pytest

from hetjax.cluster.cluster import Cluster, Link, Node, part_of
from hetjax.errors import NoFeasiblePlan
from hetjax.models.presets import model_preset
from hetjax.planner.baselines.equal_shares import equal_share_plans
from hetjax.planner.model.deadline import TimeUp, deadline, left_s, overtime
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Search, find_plan
from hetjax.planner.search.first import first_plans
from hetjax.planner.search.first.floor import floor
from hetjax.planner.search.first.parts import parts_alone, parts_without
from hetjax.plans.plan import Plan
from tests.planner.whole_space import two_kinds
from tests.short_runs import rows_drawn

SEEDS = (10, *range(10), 11)  # 10: three nodes of two kinds in two halls
KINDS = ("A100-SXM4-40GB", "V100-PCIE-32GB", "T4", "H20")


def two_halls(rng: random.Random, num_nodes: int) -> PlanRequest:
    """Return nodes of some kinds in two zones, with a link of any speed."""
    kinds = rng.sample(KINDS, rng.randint(1, 3))
    nodes = tuple(
        Node(
            name=f"n{at}",
            device=rng.choice(kinds),
            count=rng.choice([1, 2, 4, 8]),
            zone=rng.choice(["hall", "annex"]),
        )
        for at in range(num_nodes)
    )
    zones = {node.zone for node in nodes}
    link = Link(
        between=("hall", "annex"),
        bandwidth_gbit_per_s=rng.choice([0.1, 1.0, 10.0, 100.0]),
        latency_ms=rng.choice([0.1, 5.0]),
    )
    cluster = Cluster(
        name="halls", nodes=nodes, links=(link,) if len(zones) == 2 else ()
    )
    return PlanRequest(
        model=model_preset("gpt2-124m"),
        cluster=cluster,
        seq_len=512,
        global_batch=rng.choice([16, 32]),
        microbatch_sizes=(2,),
        tensor_degrees=(1,),
    )


def step_s(request: PlanRequest) -> float:
    """Return the step time of the plan that users get, under any schedule."""
    try:
        return find_plan(request, local_work=0).best.simulation.step_time_s
    except NoFeasiblePlan:
        return float("inf")


def names(parts: list[PlanRequest]) -> list[set[str]]:
    return [{node.name for node in part.cluster.nodes} for part in parts]


@pytest.mark.parametrize(
    ("seed", "num_nodes"), rows_drawn([(1, 2), *product(SEEDS, (3, 10))], short=1)
)
def test_no_part_is_faster_than_the_whole(seed: int, num_nodes: int):
    rng = random.Random(1000 * num_nodes + seed)
    request = two_halls(rng, num_nodes)
    whole_s, nodes = step_s(request), request.cluster.nodes
    for kept in (
        [n for n in nodes if n.device == nodes[0].device],  # a kind
        [n for n in nodes if n.zone == nodes[0].zone],  # a zone
        [n for n in nodes if n.device != nodes[0].device],  # all but a kind
    ):
        if kept:
            cluster = part_of(request.cluster, [node.name for node in kept])
            part_s = step_s(replace(request, cluster=cluster))
            assert whole_s <= part_s * 1.005, [node.name for node in kept]


def test_a_node_beside_another_gets_the_equal_pipelines_that_it_gets_alone():
    """A slow network makes one node of the two worth searching by itself."""
    one = Node(name="n0", device="RTX-4090", count=4, network_gbit_per_s=0.1)
    request = PlanRequest(
        model=model_preset("gpt2-124m"),
        cluster=Cluster(name="two", nodes=(one, replace(one, name="n1"))),
        seq_len=512,
        global_batch=16,
        microbatch_sizes=(4,),
        tensor_degrees=(1,),
        data_degrees=(1,),
    )
    simulated = []
    for cluster in (request.cluster, part_of(request.cluster, ["n0"])):
        search = Search(replace(request, cluster=cluster), [Objective()])
        search.propose()
        simulated.append(
            {
                found.plan.replicas
                for found in search.incumbents.simulated()
                if len(found.plan.replicas) == 2 and found.plan.nodes == {"n0"}
            }
        )
    beside, alone = simulated
    assert alone and alone <= beside


def test_parts_are_kinds_zones_and_classes_each_once():
    def node(name: str, device: str, zone: str) -> Node:
        return Node(name=name, device=device, count=2, zone=zone)

    cluster = Cluster(
        name="c",
        nodes=(
            node("a", "T4", "hall"),
            node("b", "T4", "annex"),
            node("c", "H20", "annex"),
            node("d", "H20", "annex"),
        ),
        links=(
            Link(between=("hall", "annex"), bandwidth_gbit_per_s=1.0, latency_ms=1),
        ),
    )
    request = replace(two_halls(random.Random(0), 3), cluster=cluster)
    assert names(parts_alone(request)) == [
        {"a", "b"},
        {"c", "d"},
        {"a"},
        {"b", "c", "d"},
        {"b"},
        {"c"},
    ]
    # without the class b, and without a node of the class of c and d
    assert names(parts_without(request)) == [{"a", "c", "d"}, {"a", "b", "c"}]
    alone = replace(request, cluster=part_of(cluster, ["a"]))
    assert parts_alone(alone) == parts_without(alone) == []


def test_a_kind_within_a_zone_is_a_part_as_it_is_of_the_kind_and_of_the_zone():
    nodes = tuple(
        Node(name=name, device=device, count=count, zone=zone)
        for name, device, count, zone in (
            ("a", "T4", 2, "hall"),
            ("b", "H20", 2, "hall"),
            ("c", "H20", 4, "hall"),
            ("d", "H20", 2, "annex"),
        )
    )
    link = Link(between=("hall", "annex"), bandwidth_gbit_per_s=1.0, latency_ms=1)
    cluster = Cluster(name="c", nodes=nodes, links=(link,))
    whole = replace(two_halls(random.Random(0), 3), cluster=cluster)
    kind, zone = (
        replace(whole, cluster=part_of(cluster, kept)) for kept in ("bcd", "abc")
    )
    for part in (whole, kind, zone):
        assert {"b", "c"} in names(parts_alone(part))


@pytest.mark.parametrize(
    "limit_s", [0.0, pytest.param(0.05, marks=pytest.mark.nightly)]
)
def test_without_time_the_fastest_kind_is_planned_all_the_same(limit_s: float):
    nodes = (
        Node(name="new", device="H100-80GB-HBM3", count=8),
        Node(name="old", device="T4", count=4),
    )
    request = replace(
        two_halls(random.Random(0), 3), cluster=Cluster(name="c", nodes=nodes)
    )
    alone_s = step_s(replace(request, cluster=part_of(request.cluster, ["new"])))
    with deadline(limit_s):
        found = find_plan(request)
    assert found.best.simulation.step_time_s <= alone_s * 1.1


def test_shares_by_speed_are_simulated_before_a_second_part_is_looked_at():
    nodes = tuple(Node(name=kind, device=kind, count=2) for kind in KINDS[:3])
    request = replace(
        two_halls(random.Random(0), 3), cluster=Cluster(name="c", nodes=nodes)
    )
    seen: list[set[Plan]] = []

    def note(line: str) -> None:
        if line.endswith("by the model"):
            seen.append({*search.incumbents.evaluate.seen})
        if len(seen) == 2:
            limit.stop()

    search = Search(request, [Objective()], note)
    with deadline() as limit:
        search.propose()
    shares = {*map(request.said, equal_share_plans(request))}
    assert shares and not shares & seen[0] and shares <= seen[1]


def test_without_time_what_computes_most_for_its_price_is_planned_for_cost():
    nodes = (
        Node(name="new", device="H100-80GB-HBM3", count=8, price_per_hour=20.0),
        Node(name="own", device="GeForce-RTX-4090", count=2, price_per_hour=0.1),
    )
    request = replace(
        two_halls(random.Random(0), 3), cluster=Cluster(name="c", nodes=nodes)
    )
    with deadline(0.0):
        found = find_plan(request, Objective(wish="cost"))
    assert found.best.plan.nodes == {"own"}


def test_overtime_is_over_when_somebody_wants_the_end():
    with deadline(0.0) as limit:
        assert left_s() == 0
        with overtime():
            assert left_s() == float("inf")
            with deadline(0.0):
                assert left_s() == 0
            limit.stop()
            assert left_s() == 0
        limit.is_stopped = False
        assert left_s() == 0


def test_a_search_that_is_stopped_looks_at_no_part():
    with deadline() as limit, pytest.raises(TimeUp):
        limit.stop()
        next(floor(two_halls(random.Random(0), 3)))


def test_the_nodes_of_the_best_plan_are_searched_however_little_it_promises(
    monkeypatch: pytest.MonkeyPatch,
):
    wished, two = Objective(), two_kinds()
    fast, slow = two.cluster.nodes
    slow_ones = [replace(slow, name=f"slow-{at}") for at in range(3)]
    whole = replace(two, cluster=Cluster(name="four", nodes=(fast, *slow_ones)))
    first = Search(whole, [wished]).first
    for node in whole.cluster.nodes:
        part = replace(whole, cluster=part_of(whole.cluster, {node.name}))
        for plan in equal_share_plans(part):
            first.incumbents.offer(plan, "parts")
    assert first.incumbents.best_h1f1b[wished].predicted.plan.nodes == {"fast"}
    monkeypatch.setattr(
        first_plans, "promise", lambda found, *_: 1.0 + ("fast" in found.plan.nodes)
    )
    searched = [
        {node.name for node in part.cluster.nodes} for part in first._promising_parts()
    ]
    assert {"fast"} in searched and {"slow-0"} in searched
