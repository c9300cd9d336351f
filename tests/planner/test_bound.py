# SPDX-License-Identifier: Apache-2.0
"""The certified bound: plans that it was once above, and how a false one is told."""

from dataclasses import replace

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.profile import LinkMeasurement, Measurement, Profile
from hetjax.planner.certificate import proved
from hetjax.planner.find import Search
from hetjax.planner.judge import judged
from hetjax.planner.objectives import Objective
from hetjax.planner.request import Request
from hetjax.planner.space import in_space
from hetjax.plans.plan import LayerRange, Plan, Replica, Stage, StageMesh
from hetjax.schedule.bound import ROUNDING, LowerBound
from tests.planner.whole_space import small_model

DEVICE = Node(
    name="n0",
    device="made-up",
    count=1,
    peak_tflops=0.1,
    memory_gib=1.0,
    memory_gb_per_s=50.0,
    intra_node_gb_per_s=5.0,
    network_gbit_per_s=10.0,
)


def request_on(cluster: Cluster, blocks: int, batch: int, **changes) -> Request:
    request = Request(
        model=small_model(blocks),
        cluster=cluster,
        seq_len=64,
        global_batch=batch,
        dtype="float32",
        microbatch_sizes=(1, 2, 4),
        tensor_degrees=(1, 2),
        data_degrees=(1, 2, 4),
        remats=("none",),
    )
    return replace(request, **changes)


def pipeline(
    request: Request,
    size: int,
    *stages: tuple[str, tuple[int, ...], StageMesh, LayerRange],
) -> Plan:
    return Plan(
        model=request.model.name,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        replicas=(
            Replica(
                num_microbatches=request.global_batch // size,
                microbatch_size=size,
                stages=tuple(
                    Stage(
                        node=node,
                        devices=devices,
                        mesh=mesh,
                        layers=layers,
                        launch_ahead=len(stages) - s,
                    )
                    for s, (node, devices, mesh, layers) in enumerate(stages)
                ),
            ),
        ),
    )


def check_above_bound(request: Request, plan: Plan) -> None:
    assert in_space(request, plan)
    bound_s = proved(request).step_s
    step_time_s = judged(request, plan).simulation.step_time_s
    assert bound_s is not None and bound_s > 0
    assert step_time_s >= bound_s * (1 - ROUNDING)


def one_measurement(blocks: int, seconds: float) -> Profile:
    model = small_model(blocks)
    kinds = ("embedding", *("block",) * blocks, "head")
    return Profile(
        model=model.name,
        seq_len=64,
        dtype="float32",
        layers=kinds,
        measurements=tuple(
            Measurement(
                device="made-up",
                kind=kind,
                tensor=1,
                microbatch_size=size,
                forward_s=seconds * size,
                backward_s=2 * seconds * size,
                update_s=0.0,
            )
            for kind in dict.fromkeys(kinds)
            for size in (1, 2, 4)
        ),
    )


def test_alike_nodes_may_be_joined_by_unlike_links() -> None:
    """The link of the first two nodes was measured, and is slow: others need not be."""
    nodes = tuple(replace(DEVICE, name=f"n{n}", memory_gib=0.0021) for n in range(4))
    slow = LinkMeasurement(
        between=("n0", "n1"), bandwidth_gbit_per_s=0.001, latency_ms=20.0
    )
    profile = replace(one_measurement(2, 1e-4), links=(slow,))
    request = request_on(
        Cluster(name="four", nodes=nodes),
        2,
        4,
        profile=profile,
        microbatch_sizes=(1,),
        tensor_degrees=(1,),
        data_degrees=(1,),
    )
    mesh = StageMesh()
    plan = pipeline(request, 1, ("n2", (0,), mesh, (0, 2)), ("n3", (0,), mesh, (2, 4)))
    check_above_bound(request, plan)


@pytest.mark.parametrize(
    "places", [((0, 1, 4, 5), (2, 3, 6, 7)), ((0, 4, 1, 5), (2, 6, 3, 7))]
)
def test_stages_of_a_node_of_several_hosts_may_lie_on_all_of_them(places) -> None:
    """Their devices talk inside hosts, where the first ones of the node could not."""
    node = replace(DEVICE, count=8, hosts=2, network_gbit_per_s=0.01, memory_gib=0.0021)
    request = request_on(
        Cluster(name="hosts", nodes=(node,)),
        2,
        64,
        microbatch_sizes=(4,),
        tensor_degrees=(1,),
        data_degrees=(4,),
    )
    mesh = StageMesh(data=4)
    plan = pipeline(
        request, 4, ("n0", places[0], mesh, (0, 2)), ("n0", places[1], mesh, (2, 4))
    )
    check_above_bound(request, plan)


def test_tensor_groups_of_a_node_of_several_hosts_may_lie_inside_them() -> None:
    """Of 3 devices on each host, groups of two on the first four cross."""
    node = replace(DEVICE, count=6, hosts=2, network_gbit_per_s=0.05)
    request = request_on(
        Cluster(name="hosts", nodes=(node,)),
        2,
        64,
        microbatch_sizes=(4,),
        tensor_degrees=(2,),
        data_degrees=(2,),
    )
    mesh = StageMesh(data=2, tensor=2)
    check_above_bound(request, pipeline(request, 4, ("n0", (0, 1, 3, 4), mesh, (0, 4))))


def deep_request() -> Request:
    """20 layers, most of their bytes weights, on devices that hold one of them each."""
    nodes = tuple(replace(DEVICE, name=f"n{n}", memory_gib=0.0011) for n in range(20))
    return request_on(
        Cluster(name="deep", nodes=nodes),
        18,
        2,
        seq_len=8,
        microbatch_sizes=(1,),
        tensor_degrees=(1,),
        data_degrees=(1,),
    )


def test_pipelines_may_be_as_deep_as_the_model() -> None:
    request = deep_request()
    stages = [(f"n{s}", (0,), StageMesh(), (s, s + 1)) for s in range(20)]
    plan = pipeline(request, 1, *stages)
    check_above_bound(request, plan)
    search = Search(request, [Objective()])
    search.bests.offer(plan, "given")
    search.run(polish_s=0.0)
    (found,) = search.found()
    assert found.lower_bound_s is not None and found.gap is not None
    assert len(found.best.plan.replicas[0].stages) > 16
    step_time_s = found.best.simulation.step_time_s
    assert found.gap == pytest.approx(step_time_s / found.lower_bound_s - 1)


def test_a_plan_below_the_bound_is_an_error_and_no_certificate() -> None:
    bound = LowerBound(step_s=2.0)
    assert bound.held_against(2.0 * (1 - 1e-10), "a plan") == bound
    assert bound.gap(2.0 * (1 - 1e-10)) == 0.0
    assert bound.gap(1.0) == -0.5  # nothing is clamped
    told = bound.held_against(1.9, "a plan")
    assert told.is_false and told.step_s is None and told.gap(1.9) is None
    assert "internal error" in told.why
