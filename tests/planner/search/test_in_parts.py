# SPDX-License-Identifier: Apache-2.0
"""Plans whose devices hold their layers in several parts."""

from dataclasses import replace
from random import Random

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.models.model import tensor_sizes
from hetjax.planner.bound.certificate import proved
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.planner.search.in_parts import in_one_part, in_parts
from hetjax.plans.plan import Plan, StageMesh
from hetjax.plans.validation import validate_plan
from tests.planner.whole_space import small_model
from tests.planner.wide_space import (
    Seat,
    plan_of,
    random_plan,
    replica_of,
    wide_request,
)


def held(plan: Plan) -> list[dict[object, int]]:
    """Return the number of layers that each group of devices holds, by replica."""
    found: list[dict[object, int]] = []
    for replica in plan.replicas:
        layers: dict[object, int] = {}
        for stage in replica.stages:
            place = stage.node, stage.devices, stage.mesh, stage.remat
            layers[place] = layers.get(place, 0) + stage.layers[1] - stage.layers[0]
        found.append(layers)
    return found


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_are_even_and_leave_devices_the_layers_that_they_had(
    num_parts: int,
) -> None:
    num_cut = 0
    for seed in range(120):
        request = wide_request(seed)
        plan = random_plan(Random(seed), request)
        cut = in_parts(plan, num_parts)
        many = [replica for replica in plan.replicas if len(replica.stages) > 1]
        sizes = [hi - lo for r in many for lo, hi in (s.layers for s in r.stages)]
        if not many or min(sizes) < num_parts:
            assert cut is None
            continue
        assert cut is not None
        num_cut += 1
        model = request.model
        shared = replace(cut, schedule="interleaved")
        sizes = tensor_sizes(model)
        num_layers = len(model.layers)
        validate_plan(shared, request.cluster, num_layers, sizes, model.max_seq_len)
        assert held(cut) == held(plan)
        for replica, before in zip(cut.replicas, plan.replicas, strict=True):
            num = len(before.stages)
            parts = 1 if num == 1 else num_parts
            assert len(replica.stages) == parts * num
            for s in range(num):
                same = replica.stages[s::num]
                sizes = [stage.layers[1] - stage.layers[0] for stage in same]
                assert len({(stage.node, stage.devices) for stage in same}) == 1
                assert max(sizes) - min(sizes) <= 1
        back = in_one_part(cut)
        assert [[s.layers for s in r.stages] for r in back.replicas] == [
            [s.layers for s in r.stages] for r in plan.replicas
        ]
    assert num_cut > 4


def pipeline_of_two(global_batch: int, memory_gib: float) -> PlanRequest:
    """Return a request of two devices on one node, and sixteen layers."""
    node = Node(
        name="two",
        device="made-up",
        count=2,
        peak_tflops=0.001,
        memory_gib=memory_gib,
        memory_gb_per_s=10,
        intra_node_gb_per_s=5,
        network_gbit_per_s=10,
    )
    return PlanRequest(
        model=small_model(14),
        cluster=Cluster(name="drawn", nodes=(node,), links=()),
        seq_len=64,
        global_batch=global_batch,
        dtype="float32",
        microbatch_sizes=(1,),
        tensor_degrees=(1,),
        data_degrees=(1,),
        remats=("none",),
    )


def test_a_pipeline_of_few_microbatches_is_planned_in_parts() -> None:
    """The planner proves that no plan with one part per device is as fast."""
    request = pipeline_of_two(4, memory_gib=0.010)  # neither device can hold all
    found = find_plan(request)
    in_one_part_s = proved(request, space="split").step_s
    assert in_one_part_s is not None and found.lower_bound_s is not None
    assert found.best.simulation.step_time_s < in_one_part_s
    assert found.space == "interleaved"
    assert found.lower_bound_s <= found.best.simulation.step_time_s
    assert found.best_h1f1b.simulation.step_time_s > in_one_part_s


def test_the_bound_of_plans_in_parts_is_what_devices_compute() -> None:
    """With many microbatches, devices hardly wait."""
    request = pipeline_of_two(64, memory_gib=1.0)
    seats = [
        Seat(node="two", devices=(n,), mesh=StageMesh(), remat="none") for n in range(2)
    ]
    replica = replica_of(64, 1, seats, [(0, 8), (8, 16)])
    plan = in_parts(plan_of(request, [replica]), 4)
    assert plan is not None
    found = evaluate_plan(request, plan, "searched", climbs=False)
    step_s = found.simulation.step_time_s
    bound_s = proved(request, space="interleaved").step_s
    assert bound_s is not None
    assert bound_s <= step_s < 1.03 * bound_s
