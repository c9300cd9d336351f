# SPDX-License-Identifier: Apache-2.0
"""A plan's costs on a cluster: who sends how much to whom, measured times first."""

import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.analytic import analytic_costs
from hetjax.costs.profile import Measurement, Profile
from hetjax.models.counts import parameter_count
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from tests.costs.small_models import SEQ_LEN, WIDTH, family

CLUSTER = Cluster(
    name="two",
    nodes=(
        Node(name="a", device="A100-SXM4-80GB", count=4, zone="east"),
        Node(name="b", device="V100-SXM2-32GB", count=2, zone="west"),
    ),
    links=(Link(between=("east", "west"), bandwidth_gbit_per_s=5.0, latency_ms=1.0),),
)


def two_replicas(model: Model) -> Plan:
    """(a0, a1 with TP 2) beside (a2, b0), cut at different layers."""

    def stage(node: str, devices: tuple[int, ...], layers: tuple[int, int]) -> Stage:
        mesh = StageMesh(tensor=len(devices))
        return Stage(
            node=node, devices=devices, mesh=mesh, layers=layers, launch_ahead=1
        )

    first = stage("a", (0, 1), (0, 3)), stage("b", (0,), (3, 6))
    second = stage("a", (2,), (0, 4)), stage("b", (1,), (4, 6))
    return Plan(
        model=model.name,
        seq_len=SEQ_LEN,
        global_batch=8,
        replicas=tuple(
            Replica(num_microbatches=2, microbatch_size=2, stages=stages)
            for stages in (first, second)
        ),
    )


def test_messages_are_activations_one_for_each_tensor_rank_that_receives():
    model = family("llama")
    costs = analytic_costs(two_replicas(model), model, CLUSTER)
    activation = 2 * SEQ_LEN * WIDTH * 2
    assert costs.message_bytes[(0, 0), (0, 1)] == activation
    assert costs.message_bytes[(0, 1), (0, 0)] == 2 * activation
    assert costs.message_bytes[(1, 1), (1, 0)] == activation
    assert "east>west" in costs.routes[(0, 0), (0, 1)].trunks
    assert "west>east" in costs.routes[(0, 1), (0, 0)].trunks
    assert all(
        trunk in costs.trunks for way in costs.routes.values() for trunk in way.trunks
    )


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_reductions_carry_every_gradient_once(name: str):
    model = family(name)
    costs = analytic_costs(two_replicas(model), model, CLUSTER)
    total = 4 * sum(parameter_count(layer) for layer in model.layers)
    ranges = {group for group in costs.reductions if not isinstance(group, str)}
    assert ranges == {(0, 3), (3, 4), (4, 6)}
    assert {g for g in costs.reductions if isinstance(g, str)} == (
        {"embedding.table"} if name == "gpt" else set()
    )
    of_two = sum(r.hop_bytes for r in costs.reductions.values() if len(r.hops) == 2)
    table = 4 * 256 * WIDTH if name == "gpt" else 0
    assert of_two == total - table  # 2 (D - 1) / D is 1 for two holders
    if name == "gpt":
        shared = costs.reductions["embedding.table"]
        assert len(shared.hops) == 4
        assert shared.hop_bytes == 1.5 * table


def test_memory_is_that_of_the_device():
    model = family("llama")
    costs = analytic_costs(two_replicas(model), model, CLUSTER)
    assert costs.memory_bytes[0, 0] == 80 * 2**30
    assert costs.memory_bytes[1, 1] == 32 * 2**30
    assert costs.memory[0, 0].static_bytes < costs.memory[1, 0].static_bytes


def test_measured_times_go_before_estimates_on_the_devices_that_were_measured():
    model = family("llama")
    plan = two_replicas(model)
    kinds = ("embedding", "block", "block", "block", "block", "head")
    profile = Profile(
        model=model.name,
        seq_len=SEQ_LEN,
        dtype="bfloat16",
        layers=kinds,
        measurements=tuple(
            Measurement(
                device="V100-SXM2-32GB",
                kind=kind,
                tensor=1,
                microbatch_size=2,
                forward_s=1.0,
                backward_s=2.0,
                update_s=0.5,
            )
            for kind in ("embedding", "block", "head")
        ),
    )
    estimated = analytic_costs(plan, model, CLUSTER)
    known = analytic_costs(plan, model, CLUSTER, profile=profile)
    assert known.times[0, 1].forward_s == 3.0
    assert known.times[0, 1].backward_s == 6.0
    assert known.times[0, 0] == estimated.times[0, 0]
    assert known.memory == estimated.memory
