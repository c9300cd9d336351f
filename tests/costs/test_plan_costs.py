# SPDX-License-Identifier: Apache-2.0
"""A plan's costs on a cluster: bytes on each link, and measured times first."""

from dataclasses import replace

import pytest

from hetjax.cluster.catalogue import Precision
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.costs import Costs
from hetjax.costs.measured.layer_profile import Measurement, Profile, check_values
from hetjax.costs.network.wire_bytes import Transport
from hetjax.costs.plan_costs import costs_of
from hetjax.errors import BadInput
from hetjax.models.model import Model, parameter_count
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.plans.precision import Dtype, with_precisions
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


@pytest.mark.parametrize("transport", ["sockets", "transfer", "in-process"])
def test_messages_cross_once_between_workers_and_within_one_to_every_tensor_rank(
    transport: Transport,
):
    model = family("llama")
    costs = costs_of(two_replicas(model), model, CLUSTER, transport=transport)
    activation = 2 * SEQ_LEN * WIDTH * 2
    copies = 2 if transport == "in-process" else 1
    assert costs.message_bytes[(0, 0), (0, 1)] == activation
    assert costs.message_bytes[(0, 1), (0, 0)] == copies * activation
    assert costs.message_bytes[(1, 1), (1, 0)] == activation
    assert "east>west" in costs.routes[(0, 0), (0, 1)].trunks
    assert "west>east" in costs.routes[(0, 1), (0, 0)].trunks
    assert all(
        trunk in costs.trunks for way in costs.routes.values() for trunk in way.trunks
    )


def in_precisions(plan: Plan, *precisions: Precision | None) -> Plan:
    """Return the plan with these precisions for its stages, in order."""
    left = iter(precisions)
    return replace(
        plan,
        replicas=tuple(
            replace(
                replica,
                stages=tuple(replace(x, precision=next(left)) for x in replica.stages),
            )
            for replica in plan.replicas
        ),
    )


def test_messages_travel_in_the_precision_of_their_sender():
    model = family("llama")
    plan = in_precisions(
        two_replicas(model), "bfloat16", "float32", "float32", "float16"
    )
    sent = costs_of(plan, model, CLUSTER).message_bytes
    elements = 2 * SEQ_LEN * WIDTH
    assert sent == {
        ((0, 0), (0, 1)): 2 * elements,  # activations, in bf16
        ((0, 1), (0, 0)): 4 * elements,  # their gradients, in fp32
        ((1, 0), (1, 1)): 4 * elements,
        ((1, 1), (1, 0)): 2 * elements,
    }


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, ("bfloat16", "float16")),  # A100, V100
        ("best", ("bfloat16", "float16")),
        ("float32", ("float32", "float32")),
    ],
)
def test_a_plan_costs_the_same_whether_or_not_it_says_what_is_asked_for(
    asked: Dtype | None, found: tuple[Precision, Precision]
):
    model = family("llama")
    plan = two_replicas(model)
    costs = costs_of(plan, model, CLUSTER, dtype=asked)
    said = with_precisions(plan, CLUSTER, asked)
    assert [stage.precision for _, _, stage in said.stages()] == [*found, *found]
    for other in (None, "float32", "bfloat16"):
        assert costs_of(said, model, CLUSTER, dtype=other) == costs


def v100_profile(model: Model, dtype: Precision) -> Profile:
    """Return a profile in which a V100 takes 1 s forward and 2 s backward per layer."""
    return Profile(
        model=model.name,
        seq_len=SEQ_LEN,
        dtype=dtype,
        layers=("embedding", *("block",) * 4, "head"),
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


def test_a_stage_says_no_other_precision_than_its_device_was_measured_in():
    model = family("llama")
    profile = v100_profile(model, "float16")
    check_values(profile)
    plan = in_precisions(two_replicas(model), "bfloat16", None, "bfloat16", None)
    costs = costs_of(plan, model, CLUSTER, profile)  # A100: as the plan says
    assert costs.message_bytes[(0, 1), (0, 0)] == 2 * 2 * SEQ_LEN * WIDTH
    with pytest.raises(BadInput, match="measured in float16"):
        costs_of(
            in_precisions(plan, None, "float32", None, None), model, CLUSTER, profile
        )


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("transport", ["sockets", "in-process"])
def test_reductions_carry_every_gradient_once_between_workers(
    name: str, transport: Transport
):
    model = family(name)
    costs = costs_of(two_replicas(model), model, CLUSTER, transport=transport)
    ranges = {group for group in costs.reductions if not isinstance(group, str)}
    assert ranges == {(0, 3), (3, 4), (4, 6)}
    assert {g for g in costs.reductions if isinstance(g, str)} == (
        {"embedding.table"} if name == "gpt" else set()
    )
    links = "east>west", "west>east"
    for inside in ((0, 3), (4, 6)):
        assert not set(links) & costs.reductions[inside].trunk_bytes.keys()
        assert costs.reductions[inside].trunk_bytes
    across = costs.reductions[3, 4].trunk_bytes
    assert {across[link] for link in links} == {4 * parameter_count(model.layers[3])}
    if name == "gpt":
        shared = costs.reductions["embedding.table"].trunk_bytes
        copies = {"sockets": 1, "in-process": 4}[transport]  # two holders on each side
        assert {shared[link] for link in links} == {copies * 4 * 256 * WIDTH}


def test_memory_is_that_of_the_device():
    model = family("llama")
    costs = costs_of(two_replicas(model), model, CLUSTER)
    # the framework's reserve and fragmentation take a tenth
    assert costs.memory_bytes[0, 0] == pytest.approx(0.9 * 80 * 2**30)
    assert costs.memory_bytes[1, 1] == pytest.approx(0.9 * 32 * 2**30)
    assert costs.memory[0, 0].static_bytes < costs.memory[1, 0].static_bytes


def test_measured_times_go_before_estimates_on_the_devices_that_were_measured():
    model = family("llama")
    plan = two_replicas(model)
    profile = v100_profile(model, "bfloat16")
    estimated = costs_of(plan, model, CLUSTER)
    known = costs_of(plan, model, CLUSTER, profile=profile)
    assert known.times[0, 1].forward_s == 3.0
    assert known.times[0, 1].backward_s == 6.0
    assert known.times[0, 0] == estimated.times[0, 0]
    assert known.memory == estimated.memory


@pytest.mark.parametrize("wanted", ["A100-80-SXM", "A100-SXM4-80GB"])
@pytest.mark.parametrize("measured", ["A100-80-SXM", "A100-SXM4-80GB"])
def test_a_profile_serves_a_device_under_any_of_its_names(wanted: str, measured: str):
    model = family("llama")
    plan = one_stage(model.name, 6, StageMesh(), microbatch_size=2)
    block = Measurement(
        device=measured,
        kind="block",
        tensor=1,
        microbatch_size=2,
        forward_s=1.0,
        backward_s=2.0,
        update_s=0.5,
        shared_update_s=2.0,
    )
    profile = Profile(
        model=model.name,
        seq_len=SEQ_LEN,
        dtype="bfloat16",
        layers=("block",) * 6,
        measurements=(block,),
    )
    one = Cluster(name="one", nodes=(Node(name="n", device=wanted, count=2),))
    times = costs_of(plan, model, one, profile=profile).times
    assert (times[0, 0].forward_s, times[0, 0].update_s) == (6.0, 3.0)
    stage = plan.replicas[0].stages[0]
    other = replace(plan.replicas[0], stages=(replace(stage, devices=(1,)),))
    two = replace(plan, global_batch=4, replicas=(*plan.replicas, other))
    shared = costs_of(two, model, one, profile=profile).times
    assert shared[0, 0].update_s == shared[1, 0].update_s == 12.0


def one_stage(
    name: str, num_layers: int, mesh: StageMesh, *, microbatch_size: int
) -> Plan:
    """Return a plan of the whole model on the first devices of node "n"."""
    stage = Stage(
        node="n",
        devices=tuple(range(mesh.data * mesh.tensor)),
        mesh=mesh,
        layers=(0, num_layers),
        launch_ahead=1,
    )
    replica = Replica(
        num_microbatches=1, microbatch_size=microbatch_size, stages=(stage,)
    )
    return Plan(
        model=name, seq_len=SEQ_LEN, global_batch=microbatch_size, replicas=(replica,)
    )


def hosts(num_hosts: int, count: int = 8) -> Cluster:
    node = Node(
        name="n",
        device="A100-SXM4-80GB",
        count=count,
        hosts=num_hosts,
        network_gbit_per_s=10.0,
    )
    return Cluster(name="slow", nodes=(node,))


def test_data_ranks_pay_for_slow_hosts_what_replicas_pay():
    """gpt3-1.3b on 8 hosts at 10 Gbit/s: a ring of 2 * 7 / 8 of 4 bytes a parameter."""
    model = model_preset("gpt3-1.3b")
    num_layers = len(model.layers)
    num_params = sum(map(parameter_count, model.layers))
    one = one_stage(model.name, num_layers, StageMesh(data=8), microbatch_size=8)
    alone = one_stage(model.name, num_layers, StageMesh(), microbatch_size=1)
    stage = alone.replicas[0].stages[0]
    eight = replace(
        alone,
        global_batch=8,
        replicas=tuple(
            replace(alone.replicas[0], stages=(replace(stage, devices=(device,)),))
            for device in range(8)
        ),
    )
    ring_s = 7 / 4 * 4 * num_params / 1.25e9
    replicas = costs_of(eight, model, hosts(8))
    for card in (name for name in replicas.trunks if "host" in name):
        summed_s = sum(
            reduction.trunk_bytes[card] / 1.25e9
            for reduction in replicas.reductions.values()
        )
        assert summed_s == pytest.approx(ring_s, rel=0.05)  # 7.3 s
    inside = costs_of(one, model, hosts(1)).times[0, 0]
    over = costs_of(one, model, hosts(8)).times[0, 0]
    assert inside.update_s < 0.2 < 7 < over.update_s
    # replicas update all weights; data ranks also gather bf16 copies
    gather_s = 7 / 8 * 2 * num_params / 1.25e9
    assert over.update_s == pytest.approx(ring_s + gather_s, rel=0.03)
    assert over.update_s - gather_s == pytest.approx(ring_s, rel=0.15)
    assert over.forward_s == inside.forward_s


def test_a_tensor_group_over_hosts_is_as_slow_as_their_cards():
    model = family("llama")
    plan = one_stage(model.name, 6, StageMesh(data=2, tensor=2), microbatch_size=2)
    stage = plan.replicas[0].stages[0]
    across = replace(stage, devices=(0, 2, 1, 3))  # both groups leave their host
    spread = replace(plan, replicas=(replace(plan.replicas[0], stages=(across,)),))

    def times(plan: Plan) -> Costs:
        return costs_of(plan, model, hosts(2, count=4))

    inside, over = times(plan).times[0, 0], times(spread).times[0, 0]
    # in forward, every block sums two activations of 1 sequence, on half a card
    activation_bytes = SEQ_LEN * WIDTH * 2
    ring_s = 4 * 2 * activation_bytes / 2 / (1.25e9 / 2)
    assert over.forward_s - inside.forward_s > 2 * ring_s
    assert over.backward_s > inside.backward_s + 2 * ring_s
    assert over.update_s < inside.update_s  # its data rings stay inside


def test_a_measured_update_pays_for_its_data_axis_too():
    model = family("llama")
    block = Measurement(
        device="A100-SXM4-80GB",
        kind="block",
        tensor=1,
        microbatch_size=1,
        forward_s=1.0,
        backward_s=2.0,
        update_s=0.5,
    )
    profile = Profile(
        model=model.name,
        seq_len=SEQ_LEN,
        dtype="bfloat16",
        layers=("block",) * 6,
        measurements=(block,),
    )
    plan = one_stage(model.name, 6, StageMesh(data=2), microbatch_size=2)

    def update_s(num_hosts: int, profile: Profile | None) -> float:
        cluster = hosts(num_hosts, count=2)
        times = costs_of(plan, model, cluster, profile=profile).times
        return times[0, 0].update_s

    over_network = update_s(2, None) - update_s(1, None)
    assert update_s(1, profile) > 3.0
    assert update_s(2, profile) - update_s(1, profile) == pytest.approx(over_network)
