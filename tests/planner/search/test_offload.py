# SPDX-License-Identifier: Apache-2.0
"""Master weights and optimizer state go to hosts where that is allowed and helps."""

from dataclasses import replace

import pytest

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.certificate import space_of
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import OFFLOADS, REMATS, PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.plans.plan import OffloadChoice, Plan
from tests.planner.whole_space import fastest_s, two_kinds

TIGHT_GIB, AMPLE_GIB = 0.0009, 1.0


def request_of(
    memory_gib: float, choice: OffloadChoice, **changes: object
) -> PlanRequest:
    return two_kinds(memory_gib, offloads=OFFLOADS[choice], **changes)


def offloads(plan: Plan) -> set[str]:
    return {stage.offload for _, _, stage in plan.stages()}


def test_what_fits_only_with_masters_on_hosts_is_found_where_they_may_be_there():
    tight = request_of(TIGHT_GIB, "none", remats=REMATS, tensor_degrees=(1, 2))
    with pytest.raises(NoFeasiblePlan, match="--offload auto"):
        find_plan(tight, local_work=500)
    found = find_plan(replace(tight, offloads=OFFLOADS["auto"]), local_work=500)
    assert "optimizer" in offloads(found.best.plan)
    assert found.lower_bound_s is not None
    assert found.lower_bound_s <= found.best.simulation.step_time_s


def test_with_room_for_all_nothing_is_moved_away():
    found = find_plan(request_of(AMPLE_GIB, "auto"), local_work=500)
    assert offloads(found.best.plan) == {"none"}


def test_asked_for_all_stages_do_it():
    found = find_plan(request_of(AMPLE_GIB, "optimizer"), local_work=500)
    assert offloads(found.best.plan) == {"optimizer"}


def test_the_plan_found_is_near_the_fastest_of_all():
    request = request_of(0.0015, "auto", global_batch=2, microbatch_sizes=(1,))
    best_s = fastest_s(request)
    found = find_plan(request, local_work=5_000)
    assert best_s <= found.best_h1f1b.simulation.step_time_s * (1 + 1e-9)
    assert found.best.simulation.step_time_s <= best_s * 1.05
    assert found.lower_bound_s is not None and found.lower_bound_s <= best_s


def test_nodes_of_several_hosts_keep_what_they_have():
    request = request_of(AMPLE_GIB, "auto")
    nodes = tuple(replace(node, hosts=2) for node in request.cluster.nodes)
    spread = replace(request, cluster=replace(request.cluster, nodes=nodes))
    plan = find_plan(request_of(AMPLE_GIB, "optimizer"), local_work=500).best_h1f1b.plan
    assert space_of(request, plan) == "whole" and space_of(spread, plan) is None


def test_an_update_on_the_host_takes_longer_in_the_simulation():
    plan = find_plan(request_of(AMPLE_GIB, "optimizer"), local_work=500).best.plan
    here = replace(
        plan,
        replicas=tuple(
            replace(
                replica,
                stages=tuple(replace(s, offload="none") for s in replica.stages),
            )
            for replica in plan.replicas
        ),
    )
    request = request_of(AMPLE_GIB, "auto")
    seconds = [evaluate_plan(request, p).simulation.step_time_s for p in (here, plan)]
    assert seconds[0] < seconds[1]


def test_nodes_of_several_hosts_are_refused_or_left_out_by_name():
    request = request_of(AMPLE_GIB, "optimizer")
    first, *others = request.cluster.nodes
    spanning = replace(first, hosts=2)
    assert first.count % 2 == 0
    none = replace(request.cluster, nodes=(spanning,))
    with pytest.raises(NoFeasiblePlan) as refused:
        find_plan(replace(request, cluster=none), local_work=0)
    assert f"{first.name} (2 hosts)" in refused.value.got
    some = replace(request.cluster, nodes=(spanning, *others))
    plan = find_plan(replace(request, cluster=some), local_work=0).best.plan
    assert offloads(plan) == {"optimizer"}
    per_host = spanning.devices_per_host
    for _, _, stage in plan.stages():
        used = {index // per_host for index in stage.devices}
        assert stage.node != first.name or len(used) == 1
