# SPDX-License-Identifier: Apache-2.0
"""A cluster that is no worse never gets a slower plan."""

from dataclasses import replace
from functools import cache

import pytest

from experiments.planner.metamorphic import ALLOWED, VARIATIONS, step_s, varied
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.models.presets import model_preset
from hetjax.planner.model.request import PlanRequest
from tests.short_runs import rows_drawn

NEW = Node(name="new", device="A100-SXM4-40GB", count=2, zone="east")
OLD = Node(name="old", device="V100-SXM2-32GB", count=1, zone="west")
OTHER = replace(OLD, name="other", zone="east")
TRUNK = Link(between=("east", "west"), bandwidth_gbit_per_s=1.0, latency_ms=1.0)
CLUSTERS = {
    "one zone": Cluster(name="one", nodes=(replace(NEW, count=1), OTHER)),
    "two zones": Cluster(name="two", nodes=(NEW, OLD, OTHER), links=(TRUNK,)),
}


def request_for(cluster: Cluster) -> PlanRequest:
    return PlanRequest(
        model=model_preset("tiny"),
        cluster=cluster,
        seq_len=64,
        global_batch=8,
        microbatch_sizes=(2,),
        tensor_degrees=(1,),
        remats=("none",),
    )


@cache
def drawn_s(name: str) -> float | None:
    return step_s(request_for(CLUSTERS[name]))


CASES = [(name, variation) for name in CLUSTERS for variation in VARIATIONS]


@pytest.mark.parametrize(("name", "variation"), rows_drawn(CASES, short=6))
def test_no_better_cluster_gets_a_slower_plan(name: str, variation: str):
    before_s = drawn_s(name)
    after_s = step_s(varied(request_for(CLUSTERS[name]), variation, seed=0))
    assert before_s is not None and after_s is not None
    assert after_s <= before_s * (1 + ALLOWED)
