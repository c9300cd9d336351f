# SPDX-License-Identifier: Apache-2.0
"""Who is in the space of plans that a lower bound is about."""

from dataclasses import replace
from random import Random

import pytest

from hetjax.planner.bound.certificate import in_space
from hetjax.plans.plan import Plan, StageMesh
from hetjax.plans.schedules import SCHEDULES
from tests.planner.wide_space import random_plan, wide_request

SEEDS = (0, 3, 8)


def with_first_stage(plan: Plan, **changes) -> Plan:
    first, *others = plan.replicas
    stage = replace(first.stages[0], **changes)
    first = replace(first, stages=(stage, *first.stages[1:]))
    return replace(plan, replicas=(first, *others))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans_are_inside_in_any_order_unless_their_schedule_shares_devices(
    seed: int,
) -> None:
    request = wide_request(seed)
    for n in range(20):
        plan = random_plan(Random(n), request)
        for name, schedule in SCHEDULES.items():
            is_in = in_space(request, replace(plan, schedule=name))
            assert is_in != schedule.shares, name


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_with_anything_that_the_request_does_not_leave_open_are_outside(
    seed: int,
) -> None:
    request = wide_request(seed)
    plan = random_plan(Random(seed), request)
    first, *others = plan.replicas
    here = first.stages[0].node
    assert in_space(request, with_first_stage(plan, precision=request.precisions[here]))
    outside = [
        replace(plan, programs={here: "r0.s0.F0"}),
        replace(plan, seq_len=request.seq_len // 2),
        replace(plan, global_batch=request.global_batch + 1),
        replace(plan, replicas=(replace(first, microbatch_size=7), *others)),
        with_first_stage(plan, mesh=StageMesh(tensor=16)),
        with_first_stage(plan, mesh=StageMesh(data=5)),
    ]
    other_precision = "float16" if request.precisions[here] != "float16" else "float32"
    outside.append(with_first_stage(plan, precision=other_precision))
    for other in outside:
        assert not in_space(request, other)
    fewer = replace(request, remats=("selective",))
    assert not in_space(fewer, with_first_stage(plan, remat="full"))
