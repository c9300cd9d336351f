# SPDX-License-Identifier: Apache-2.0
"""Which plans belong to the space that a lower bound covers."""

from dataclasses import replace
from random import Random

import pytest

from hetjax.planner.bound.certificate import space_of
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
def test_random_plans_are_of_the_space_of_their_backward_passes(seed: int) -> None:
    request = wide_request(seed)
    for n in range(20):
        plan = random_plan(Random(n), request)
        for name in SCHEDULES:
            expected = "split" if name == "zero-bubble" else "whole"
            assert space_of(request, replace(plan, schedule=name)) == expected


def test_programs_that_split_no_backward_pass_are_of_the_smaller_space() -> None:
    request = wide_request(SEEDS[0])
    plan = random_plan(Random(0), request)
    here = plan.replicas[0].stages[0].node
    whole = replace(plan, programs={here: "r0.s0.F0\nr0.s0.B0"})
    halves = replace(plan, programs={here: "r0.s0.F0\nr0.s0.I0\nr0.s0.W0"})
    assert space_of(request, whole) == "whole"
    assert space_of(request, halves) == "split"


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_plans_of_which_stages_share_devices_are_in_the_largest_space(
    schedule: str,
) -> None:
    request = wide_request(SEEDS[0])
    plan = random_plan(Random(0), request)
    first, *others = plan.replicas
    stage = first.stages[0]
    begin, end = stage.layers
    halves = (
        replace(stage, layers=(begin, begin + 1)),
        replace(stage, layers=(begin + 1, max(end, begin + 2))),
    )
    first = replace(first, stages=(*halves, *first.stages[1:]))
    shared = replace(plan, replicas=(first, *others), schedule=schedule)
    assert space_of(request, shared) == "interleaved"


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_with_anything_that_the_request_does_not_leave_open_are_outside(
    seed: int,
) -> None:
    request = wide_request(seed)
    plan = random_plan(Random(seed), request)
    first, *others = plan.replicas
    here = first.stages[0].node
    named = with_first_stage(plan, precision=request.precisions[here])
    assert space_of(request, named) == "whole"
    outside = [
        replace(plan, seq_len=request.seq_len // 2),
        replace(plan, global_batch=request.global_batch + 1),
        replace(plan, replicas=(replace(first, microbatch_size=7), *others)),
        with_first_stage(plan, mesh=StageMesh(tensor=16)),
        with_first_stage(plan, mesh=StageMesh(data=5)),
    ]
    other_precision = "float16" if request.precisions[here] != "float16" else "float32"
    outside.append(with_first_stage(plan, precision=other_precision))
    for other in outside:
        assert space_of(request, other) is None
    fewer = replace(request, remats=("selective",))
    assert space_of(fewer, with_first_stage(plan, remat="full")) is None
