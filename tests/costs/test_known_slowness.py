# SPDX-License-Identifier: Apache-2.0
"""Known slowness is kept in a file, and costs count it as it is there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.plan_costs import costs_of
from hetjax.costs.slowness.known import (
    AS_IT_SHOULD_BE,
    Slowness,
    parse_slowness,
    read_slowness,
    slowness,
    write_slowness,
)
from hetjax.errors import BadInput
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from tests.training.small import MODEL

SLOW = slowness({"b": 2.0}, {("a/0", "b"): 4.0})
PAIR = Cluster(
    name="pair",
    nodes=(
        Node(name="a", device="L4", count=1, zone="east"),
        Node(name="b", device="L4", count=1, zone="west"),
    ),
    links=(Link(between=("a", "b"), bandwidth_gbit_per_s=8.0, latency_ms=1.0),),
)


def test_the_file_gives_back_what_was_written_and_none_is_nothing(tmp_path: Path):
    path = tmp_path / "slow.json"
    assert read_slowness(path) == AS_IT_SHOULD_BE
    write_slowness(path, SLOW)
    assert read_slowness(path) == SLOW
    assert json.loads(path.read_text())["nodes"] == [{"name": "b", "factor": 2.0}]
    assert SLOW.factor("b") == 2.0 and SLOW.factor("a") == 1.0


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"version": 2}, "version 2"),
        ({"nodes": [{"name": "a", "factor": 0}]}, "nodes: factor = 0"),
        ({"nodes": [{"name": "a"}]}, "factor"),
        ({"links": [{"from": "a", "to": 3, "factor": 2.0}]}, "to"),
        ({"links": 1}, "links"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(changed: dict, told: str):
    text = json.dumps({"version": 1, "nodes": [], "links": []} | changed)
    with pytest.raises(BadInput) as bad:
        parse_slowness(text)
    assert told in str(bad.value)


def test_a_slow_node_takes_as_many_times_as_long_and_others_as_ever():
    slow = SLOW.applied(PAIR)
    assert slow.node("a") == PAIR.node("a")
    assert slow.links[0].bandwidth_gbit_per_s == 2.0
    zones = replace(PAIR, links=(replace(PAIR.links[0], between=("east", "west")),))
    assert SLOW.applied(zones).links[0].bandwidth_gbit_per_s == 2.0
    assert Slowness().applied(PAIR) is PAIR

    def plan_on(cluster: Cluster):
        request = PlanRequest(
            model=MODEL, cluster=cluster, seq_len=16, global_batch=8, dtype="float32"
        )
        return find_plan(request, local_work=0).best.plan

    plan = plan_on(PAIR)
    before, after = (
        costs_of(plan, MODEL, there, dtype="float32").times for there in (PAIR, slow)
    )
    for r, s, stage in plan.stages():
        factor = {"a": 1.0, "b": 2.0}[stage.node]
        ratio = after[r, s].backward_s / before[r, s].backward_s
        assert ratio == pytest.approx(factor, rel=1e-6)
