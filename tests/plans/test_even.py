# SPDX-License-Identifier: Apache-2.0
"""The even split is symmetric, even, valid, and uses what it can."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput
from hetjax.plans.even import even_plan
from hetjax.plans.plan import Plan
from hetjax.plans.validation import validate_plan
from tests.plans.strategies import clusters

SIZES = {"heads": {4}, "mlp": {8}}


def cluster_of(*counts: int) -> Cluster:
    nodes = [Node(name=f"n{i}", device="cpu", count=c) for i, c in enumerate(counts)]
    return Cluster(name="test", nodes=tuple(nodes))


def even(cluster: Cluster, **changes: Any) -> Plan:
    defaults: dict[str, Any] = {"num_layers": 6, "seq_len": 8, "global_batch": 8}
    return even_plan(cluster, model="m", tensor_sizes=SIZES, **(defaults | changes))


@given(
    cluster=clusters(),
    num_layers=st.integers(1, 9),
    num_microbatches=st.integers(1, 24),
    microbatch_size=st.integers(1, 3),
    tensor=st.sampled_from([None, 1, 2, 4]),
    pipeline=st.none() | st.integers(1, 6),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_an_even_plan_is_valid_symmetric_and_even_on_any_cluster(
    cluster, num_layers, num_microbatches, microbatch_size, tensor, pipeline, schedule
):
    room = sum(node.count // (tensor or 1) for node in cluster.nodes)
    arguments = {
        "num_layers": num_layers,
        "global_batch": num_microbatches * microbatch_size,
        "microbatch_size": microbatch_size,
        "tensor": tensor,
        "pipeline": pipeline,
        "schedule": schedule,
    }
    if room < (pipeline or 1) or num_layers < (pipeline or 1):
        with pytest.raises(BadInput):
            even(cluster, **arguments)
        return
    plan = even(cluster, **arguments)
    validate_plan(plan, cluster, num_layers, SIZES, 8)
    shapes = {
        (
            r.num_microbatches,
            r.microbatch_size,
            tuple((s.layers, s.mesh, s.launch_ahead) for s in r.stages),
        )
        for r in plan.replicas
    }
    assert len(shapes) == 1
    depths = [hi - lo for lo, hi in (s.layers for s in plan.replicas[0].stages)]
    assert max(depths) - min(depths) <= 1
    assert {s.mesh.tensor for _, _, s in plan.stages()} == {tensor or 1}
    if pipeline is not None:
        assert len(depths) == pipeline


@given(
    cluster=clusters(),
    num_layers=st.integers(1, 9),
    num_microbatches=st.integers(1, 24),
)
def test_the_default_uses_the_most_devices_and_then_the_fewest_stages(
    cluster, num_layers, num_microbatches
):
    plan = even(cluster, num_layers=num_layers, global_batch=num_microbatches)
    choices = [
        (replicas * stages, -stages)
        for replicas in range(1, cluster.num_devices + 1)
        for stages in range(1, num_layers + 1)
        if replicas * stages <= cluster.num_devices and num_microbatches % replicas == 0
    ]
    stages = len(plan.replicas[0].stages)
    assert (len(plan.replicas) * stages, -stages) == max(choices)


def test_ranks_go_over_tensor_then_data_then_pipeline():
    plan = even(cluster_of(4, 5), tensor=2, pipeline=2, global_batch=6)
    placed = [[(s.node, s.devices) for s in r.stages] for r in plan.replicas]
    assert placed == [
        [("n0", (0, 1)), ("n1", (0, 1))],
        [("n0", (2, 3)), ("n1", (2, 3))],
    ]
    assert [s.layers for s in plan.replicas[0].stages] == [(0, 3), (3, 6)]
    assert [s.launch_ahead for s in plan.replicas[0].stages] == [2, 1]
    assert plan.replicas[0].num_microbatches == 3


@pytest.mark.parametrize(
    ("changes", "got", "allowed", "fix"),
    [
        (
            {"tensor": 3},
            "tensor = 3 does not divide 'heads' of size 4",
            "tensor degrees 1, 2, 4",
            "change tensor to one of these",
        ),
        (
            {"tensor": 4},
            "tensor = 4, but the largest node has 3 devices",
            "tensor <= 3",
            "lower tensor, or give another --cluster",
        ),
        (
            {"pipeline": 6},
            "pipeline = 6, with 6 layers and room for 5 stages",
            "pipeline from 1 to 5",
            "lower pipeline or tensor, or give another --cluster",
        ),
        (
            {"microbatch_size": 3},
            "global_batch = 8 with microbatch_size = 3",
            "a global_batch that is a multiple of microbatch_size",
            "write global_batch as 9, or change microbatch_size",
        ),
        (
            {"global_batch": 0},
            "global_batch = 0",
            "global_batch >= 1",
            "set global_batch to 1 or more",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_three_parts(changes, got, allowed, fix):
    with pytest.raises(BadInput) as caught:
        even(cluster_of(3, 2), **changes)
    assert caught.value.got == got
    assert caught.value.allowed == allowed
    assert caught.value.fix == fix
