# SPDX-License-Identifier: Apache-2.0
"""A stage's attention form: the plan's, else the requested, else the best there."""

import pytest

from hetjax.cluster.catalogue import catalogue
from hetjax.cluster.cluster import Cluster, Node, Precision
from hetjax.errors import BadInput
from hetjax.plans.attention import (
    Attention,
    Heads,
    node_attention,
    with_attentions,
    without_kernels,
)
from hetjax.plans.plan import AttentionForm, Plan, Replica, Stage

# in NVIDIA's table of compute capabilities: below 8.0
OLD = ("V100", "TITAN", "T4", "GeForce-RTX-20", "GeForce-GTX", "Quadro", "P100", "P4")
HEADS = Heads(seq_len=2048, head_sizes=[128])


def plan_of(*said: AttentionForm | None, seq_len: int = 2048) -> Plan:
    """Return a plan with one stage on each of the nodes n0, n1, ..."""
    stages = tuple(
        Stage(
            node=f"n{n}", devices=(0,), layers=(n, n + 1), launch_ahead=1, attention=a
        )
        for n, a in enumerate(said)
    )
    replica = Replica(num_microbatches=1, microbatch_size=1, stages=stages)
    return Plan(model="m", seq_len=seq_len, global_batch=1, replicas=(replica,))


def cluster_of(*devices: str) -> Cluster:
    nodes = (Node(name=f"n{n}", device=d, count=1) for n, d in enumerate(devices))
    return Cluster(name="c", nodes=tuple(nodes))


def test_every_known_device_has_the_kernel_of_its_kind():
    for name in catalogue():
        expected = "cudnn"
        if name.startswith("TPU"):
            expected = "chunked" if name in ("TPU-v2", "TPU-v3") else "splash"
        elif name.startswith((*OLD, "Instinct", "Radeon", "cpu")):
            expected = "chunked"
        node = Node(name="n", device=name, count=1)
        assert node_attention(node, "bfloat16", HEADS) == expected, name


@pytest.mark.parametrize(
    ("device", "precision", "heads", "found"),
    [
        ("A100-80-SXM", "float16", HEADS, "cudnn"),
        ("A100-80-SXM", "float32", HEADS, "chunked"),
        ("A100-80-SXM", "bfloat16", Heads(seq_len=99, head_sizes=[64]), "cudnn"),
        ("A100-80-SXM", "bfloat16", Heads(seq_len=99, head_sizes=[256]), "chunked"),
        ("A100-80-SXM", "bfloat16", Heads(seq_len=99, head_sizes=[64, 20]), "chunked"),
        ("TPU-v5e", "float32", HEADS, "splash"),
        ("TPU-v5e", "float16", HEADS, "chunked"),
        ("TPU-v5e", "bfloat16", Heads(seq_len=2000, head_sizes=[128]), "chunked"),
        ("a card of tomorrow", "bfloat16", HEADS, "chunked"),
    ],
)
def test_what_a_kernel_cannot_compute_is_computed_in_blocks(
    device: str, precision: Precision, heads: Heads, found: AttentionForm
):
    node = Node(name="n", device=device, count=1)
    assert node_attention(node, precision, heads) == found
    assert node_attention(node, precision, heads, "best") == found
    assert node_attention(node, precision, heads, "chunked") == "chunked"


def test_a_stage_is_asked_first_then_the_person_then_the_device():
    plan, cluster = plan_of("chunked", None), cluster_of("H100-80GB-HBM3", "L4")
    precisions: dict[tuple[int, int], Precision] = {
        (0, 0): "bfloat16",
        (0, 1): "bfloat16",
    }

    def forms(asked: Attention | None) -> list[AttentionForm | None]:
        told = with_attentions(plan, cluster, [128], precisions, asked)
        assert with_attentions(told, cluster, [128], precisions, "best") == told
        return [stage.attention for _, _, stage in told.stages()]

    assert forms(None) == forms("best") == ["chunked", "cudnn"]
    assert forms("xla") == ["chunked", "xla"]


@pytest.mark.parametrize(
    ("said", "asked", "device", "precision", "got", "allowed"),
    [
        ("cudnn", None, "T4", "float16", "replicas[0].stages[0]: T4 has no", "8.0"),
        (None, "cudnn", "cpu", "bfloat16", "node 'n0': cpu has no", "8.0"),
        (None, "cudnn", "L4", "float32", "it computes in float32", "float16"),
        (None, "splash", "L4", "bfloat16", "L4 has no", "TPUs from v4 on"),
        ("xla", None, "T4", "bfloat16", "T4 has no bfloat16", "chunked"),
    ],
)
def test_what_cannot_run_on_a_device_is_refused_in_three_parts(
    said: AttentionForm | None,
    asked: Attention | None,
    device: str,
    precision: Precision,
    got: str,
    allowed: str,
):
    with pytest.raises(BadInput) as caught:
        with_attentions(
            plan_of(said), cluster_of(device), [64], {(0, 0): precision}, asked
        )
    assert got in caught.value.got
    assert allowed in caught.value.allowed
    assert "--attention best" in caught.value.fix


def test_a_length_that_splash_has_no_blocks_for_is_refused():
    plan, cluster = plan_of("splash", seq_len=2000), cluster_of("TPU-v6e")
    with pytest.raises(BadInput, match="sequences of 2000 positions"):
        with_attentions(plan, cluster, [128], {(0, 0): "bfloat16"})


def test_where_cpus_stand_in_there_are_no_kernels():
    plan = plan_of("cudnn", "splash", "xla", "chunked", None)

    def forms(asked: Attention) -> list[AttentionForm | None]:
        told = without_kernels(plan, asked)
        return [stage.attention for _, _, stage in told.stages()]

    assert forms("best") == ["chunked", "chunked", "xla", "chunked", "chunked"]
    assert forms("xla") == ["xla", "xla", "xla", "chunked", "xla"]
    with pytest.raises(BadInput, match="CPUs stand in"):
        forms("cudnn")
