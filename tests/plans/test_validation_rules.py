# SPDX-License-Identifier: Apache-2.0
"""Validation accepts exactly the plans for which the rules hold."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Stage, StageMesh
from tests.plans.strategies import (
    Case,
    valid_cases,
    validate,
    with_replica,
    with_stage,
)


@given(case=valid_cases())
def test_valid_plans_pass(case: Case):
    validate(case, case.plan)


def holds(case: Case, plan: Plan) -> bool:
    """Return whether the rules hold, by brute force over layers and devices."""
    there = {(node.name, i) for node in case.cluster.nodes for i in range(node.count)}
    stages = [stage for _, _, stage in plan.stages()]
    used = [(stage.node, i) for stage in stages for i in stage.devices]
    sizes = [size for every in case.tensor_sizes.values() for size in every]
    covered = all(
        [layer for s in r.stages for layer in range(*s.layers)]
        == list(range(case.num_layers))
        and all(s.layers[0] < s.layers[1] for s in r.stages)
        for r in plan.replicas
    )
    counts = [plan.seq_len, *(r.num_microbatches for r in plan.replicas)]
    counts += [r.microbatch_size for r in plan.replicas]
    for s in stages:
        counts += [s.launch_ahead, s.mesh.data, s.mesh.tensor]
    if min(counts) < 1 or plan.seq_len > case.max_seq_len or not covered:
        return False
    return (
        len(used) == len(set(used))
        and set(used) <= there
        and all(s.mesh.data * s.mesh.tensor == len(s.devices) for s in stages)
        and all(s.offload == "none" or _num_hosts(case, s) == 1 for s in stages)
        and all(size % s.mesh.tensor == 0 for size in sizes for s in stages)
        and all(
            r.microbatch_size % s.mesh.data == 0
            for r in plan.replicas
            for s in r.stages
        )
        and sum(r.num_microbatches * r.microbatch_size for r in plan.replicas)
        == plan.global_batch
        and all(
            sorted(ahead, reverse=True) == ahead
            for ahead in ([s.launch_ahead for s in r.stages] for r in plan.replicas)
        )
    )


def _num_hosts(case: Case, stage: Stage) -> int:
    (node,) = (n for n in case.cluster.nodes if n.name == stage.node)
    each = node.count // node.hosts
    return len({index // each for index in stage.devices})


def change(plan: Plan, field: str, r: int, s: int, by: int) -> Plan:
    """Change one figure of the plan by a little."""
    replica = plan.replicas[r]
    stage = replica.stages[s]
    lo, hi = stage.layers
    match field:
        case "seq_len" | "global_batch":
            return replace(plan, **{field: getattr(plan, field) + by})
        case "num_microbatches" | "microbatch_size":
            return with_replica(plan, r, **{field: getattr(replica, field) + by})
        case "launch_ahead":
            return with_stage(plan, r, s, launch_ahead=stage.launch_ahead + by)
        case "device":
            devices = (stage.devices[0] + by, *stage.devices[1:])
            return with_stage(plan, r, s, devices=devices)
        case "fewer devices":
            return with_stage(plan, r, s, devices=stage.devices[1:])
        case "all tensor":
            mesh = StageMesh(tensor=len(stage.devices))
            return with_stage(plan, r, s, mesh=mesh)
        case "data":
            mesh = replace(stage.mesh, data=stage.mesh.data + by)
            return with_stage(plan, r, s, mesh=mesh)
        case "offload":
            return with_stage(plan, r, s, offload="optimizer")
        case "first layer":
            return with_stage(plan, r, s, layers=(lo + by, hi))
        case "last layer":
            return with_stage(plan, r, s, layers=(lo, hi + by))
    assert field == "order"
    return with_replica(plan, r, stages=replica.stages[::-1])


FIELDS = [
    "seq_len",
    "global_batch",
    "num_microbatches",
    "microbatch_size",
    "launch_ahead",
    "device",
    "fewer devices",
    "all tensor",
    "data",
    "offload",
    "first layer",
    "last layer",
    "order",
]


@pytest.mark.parametrize("field", FIELDS)
@settings(max_examples=50)
@given(case=valid_cases(), data=st.data())
def test_a_changed_plan_passes_exactly_if_the_rules_hold(field, case: Case, data):
    r = data.draw(st.integers(0, len(case.plan.replicas) - 1))
    s = data.draw(st.integers(0, len(case.plan.replicas[r].stages) - 1))
    plan = change(case.plan, field, r, s, data.draw(st.sampled_from([-3, -1, 1, 3])))
    if holds(case, plan):
        validate(case, plan)
    else:
        with pytest.raises(BadInput):
            validate(case, plan)
