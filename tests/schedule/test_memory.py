# SPDX-License-Identifier: Apache-2.0
"""Peak memory of programs, against closed forms; plans over memory are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.costs.costs import Costs, StageMemory
from hetjax.errors import NoFeasiblePlan
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.schedule.action import parse_program
from hetjax.schedule.lower import lower
from hetjax.schedule.memory import check_memory, memory_uses, peak_memory_bytes

GIB = 2**30
FLOWS = {"input_bytes": 3, "output_bytes": 7}


def plan_of(
    num_stages: int, num_microbatches: int, schedule="1f1b", node="n{}", device=0
):
    """One stage per node; with `device` None and one node, one device per stage."""
    stages = tuple(
        Stage(
            node=node.format(s),
            devices=(s if device is None else device,),
            layers=(s, s + 1),
            launch_ahead=min(num_stages - s, num_microbatches),
        )
        for s in range(num_stages)
    )
    replica = Replica(
        num_microbatches=num_microbatches, microbatch_size=1, stages=stages
    )
    return Plan(
        model="m",
        seq_len=1,
        global_batch=num_microbatches,
        schedule=schedule,
        replicas=(replica,),
    )


def costs_of(plan: Plan, has_bytes: float | None = None, **memory: int) -> Costs:
    keys = [(r, s) for r, s, _ in plan.stages()]
    return Costs(
        times={},
        memory={key: StageMemory(**memory) for key in keys},
        memory_bytes={} if has_bytes is None else dict.fromkeys(keys, has_bytes),
    )


@given(st.integers(2, 7), st.integers(1, 12))
def test_1f1b_keeps_as_many_residuals_as_stages_are_left(num_stages, num_microbatches):
    plan = plan_of(num_stages, num_microbatches)
    peaks = peak_memory_bytes(lower(plan), plan, costs_of(plan, saved_bytes=10))
    assert peaks == {
        f"n{s}/0": 10 * min(num_stages - s, num_microbatches) * (s < num_stages - 1)
        for s in range(num_stages)  # the last fuses F and B: nothing is kept between
    }


@given(st.integers(2, 5), st.integers(1, 9))
def test_gpipe_keeps_the_residuals_of_all_microbatches(num_stages, num_microbatches):
    plan = plan_of(num_stages, num_microbatches, schedule="gpipe")
    uses = memory_uses(lower(plan), plan, costs_of(plan, saved_bytes=10))
    for s in range(num_stages - 1):
        assert uses[f"n{s}/0"].residual_bytes == 10 * num_microbatches
        assert uses[f"n{s}/0"].in_flight == num_microbatches


@given(st.integers(3, 6), st.integers(1, 9))
def test_received_activations_count_once_with_their_residuals(
    num_stages, num_microbatches
):
    plan = plan_of(num_stages, num_microbatches)
    costs = costs_of(plan, saved_bytes=10, static_bytes=1000, **FLOWS)
    peaks = peak_memory_bytes(lower(plan), plan, costs)
    for s in range(1, num_stages - 1):
        kept = min(num_stages - s, num_microbatches)
        # a backward reads dy and makes dx; the forward before it may have made y
        assert peaks[f"n{s}/0"] == 1000 + kept * 10 + 7 + 3
    assert peaks[f"n{num_stages - 1}/0"] == 1000 + 3 + 3  # FB: x and dx


def test_static_bytes_and_workspace_stand_on_top():
    plan = plan_of(2, 4)
    costs = costs_of(plan, static_bytes=100, workspace_bytes=20, saved_bytes=1)
    use = memory_uses(lower(plan), plan, costs)["n0/0"]
    assert (use.static_bytes, use.residual_bytes, use.workspace_bytes) == (100, 2, 20)
    assert use.total_bytes == 122


def test_stages_that_share_a_device_are_summed_with_the_larger_workspace():
    text = (
        "r0.s0.F0 r0.s0.SEND_F0>s1 r0.s0.FREE_y0 r0.s1.RECV_F0<s0 r0.s1.FB0 "
        "r0.s1.FREE_x0 r0.s1.SEND_B0>s0 r0.s1.FREE_dx0 r0.s0.RECV_B0<s1 r0.s0.B0 "
        "r0.s0.FREE_saved0 r0.s0.FREE_dy0"
    )
    plan = plan_of(2, 1, node="a")
    memory = {
        (0, 0): StageMemory(static_bytes=100, saved_bytes=10, workspace_bytes=5),
        (0, 1): StageMemory(static_bytes=200, input_bytes=4, workspace_bytes=9),
    }
    programs = {"a": parse_program(text.replace(" ", "\n"))}
    peaks = peak_memory_bytes(programs, plan, Costs(times={}, memory=memory))
    assert peaks == {"a/0": 300 + 10 + 4 + 4 + 9}  # residuals of s0 beside x, dx of s1


def test_a_cut_backward_keeps_its_half_until_the_weight_gradient():
    text = (
        "r0.s0.F0 r0.s0.F1 r0.s0.I0 r0.s0.FREE_saved0 r0.s0.I1 r0.s0.FREE_saved1 "
        "r0.s0.W0 r0.s0.FREE_half0 r0.s0.W1 r0.s0.FREE_half1"
    )
    plan = plan_of(1, 2)
    programs = {"n0": parse_program(text.replace(" ", "\n"))}
    costs = costs_of(plan, saved_bytes=10, half_saved_bytes=6)
    use = memory_uses(programs, plan, costs)["n0/0"]
    assert use.residual_bytes == 10 + 10 + 6  # I0 has made its half, saved0 is there
    assert use.in_flight == 2


def test_every_device_of_a_stage_has_its_own_entry():
    stage = Stage(node="a", devices=(2, 0), layers=(0, 1), launch_ahead=1)
    replica = Replica(num_microbatches=1, microbatch_size=1, stages=(stage,))
    plan = Plan(model="m", seq_len=1, global_batch=1, replicas=(replica,))
    peaks = peak_memory_bytes(lower(plan), plan, costs_of(plan, static_bytes=8))
    assert peaks == {"a/2": 8, "a/0": 8}


@pytest.mark.parametrize(
    ("schedule", "memory", "words"),
    [
        ("1f1b", {"static_bytes": 3 * GIB}, ["3.00 GiB weights", "fewer layers"]),
        (
            "1f1b",
            {"workspace_bytes": 3 * GIB},
            ["3.00 GiB workspace", "microbatch_size"],
        ),
        (
            "1f1b",
            {"saved_bytes": GIB},
            ["4.00 GiB residuals of 4", '"launch_ahead" to 2'],
        ),
        ("1f1b", {"saved_bytes": 3 * GIB}, ["12.00 GiB residuals", '"full", or lower']),
        ("gpipe", {"saved_bytes": GIB}, ["8.00 GiB residuals of 8", '"1f1b"']),
        ("1f1b", {"output_bytes": 3 * GIB}, ["between stages", "microbatch_size"]),
    ],
)
def test_a_plan_over_memory_is_refused_with_the_part_that_binds(
    schedule, memory, words
):
    plan = plan_of(4, 8, schedule)
    costs = costs_of(plan, has_bytes=2 * GIB, **memory)
    with pytest.raises(NoFeasiblePlan) as refusal:
        check_memory(memory_uses(lower(plan), plan, costs), plan, costs)
    text = str(refusal.value)
    assert refusal.value.exit_code == 3
    assert "device 'n0/0' needs" in text and f"at most the {2 * GIB} bytes" in text
    assert all(word in text for word in words), text


def test_a_plan_that_fits_exactly_or_whose_memory_is_unknown_passes():
    plan = plan_of(2, 2)
    for has_bytes in (None, 5.0):
        costs = costs_of(plan, has_bytes, static_bytes=5)
        check_memory(memory_uses(lower(plan), plan, costs), plan, costs)
