# SPDX-License-Identifier: Apache-2.0
"""Compute orders, against hand-written lists and closed forms of the bubble."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.schedules import Schedule
from hetjax.schedule.programs import generate
from hetjax.schedule.programs.generate import (
    by_stage,
    evaluation_actions,
    lane_orders,
    one_f_one_b,
)


def shown(order) -> str:
    return " ".join(f"{op}{microbatch}" for op, microbatch in order)


def one_replica(*, schedule: str, launch_ahead: list[int], microbatches: int) -> Plan:
    stages = tuple(
        Stage(node="a", devices=(s,), layers=(s, s + 1), launch_ahead=ahead)
        for s, ahead in enumerate(launch_ahead)
    )
    replica = Replica(num_microbatches=microbatches, microbatch_size=1, stages=stages)
    return Plan(
        model="m",
        seq_len=8,
        global_batch=microbatches,
        schedule=schedule,
        replicas=(replica,),
    )


def unit_time_makespan(orders) -> int:
    """Return a pipeline's time for F = 1, B = 2, FB = 3 and free transfers."""
    last, done, clock = len(orders) - 1, {}, [0] * len(orders)
    todo = [list(order) for order in orders]
    while any(todo):
        for s, order in enumerate(todo):
            while order:
                op, m = order[0]
                needs = [("F", s - 1, m)] if op != "B" and s > 0 else []
                needs += [("B", s + 1, m)] if op == "B" and s < last else []
                if any(need not in done for need in needs):
                    break
                order.pop(0)
                start = max([clock[s], *(done[need] for need in needs)])
                clock[s] = start + {"F": 1, "B": 2, "FB": 3}[op]
                for half in op:
                    done[half, s, m] = clock[s]
    return max(clock)


def test_1f1b_warms_up_then_alternates_then_cools_down() -> None:
    assert shown(one_f_one_b(4, 0, 5, 3)) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert shown(one_f_one_b(4, 2, 3, 1)) == "F0 B0 F1 B1 F2 B2"
    assert shown(one_f_one_b(4, 0, 2, 4)) == "F0 F1 B0 B1"


def test_gpipe_does_all_forwards_first() -> None:
    assert shown(one_f_one_b(3, 1, 3, 3)) == "F0 F1 F2 B0 B1 B2"


def test_the_last_stage_is_fused_in_every_schedule() -> None:
    for launch_ahead in (3, 1):
        assert shown(one_f_one_b(3, 2, 3, launch_ahead)) == "FB0 FB1 FB2"
    assert shown(one_f_one_b(1, 0, 2, 1)) == "FB0 FB1"


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_of_equal_stages_has_the_textbook_bubble(stages: int, extra: int) -> None:
    microbatches = stages + extra
    orders = [one_f_one_b(stages, s, microbatches, stages - s) for s in range(stages)]
    busy = 3 * microbatches
    bubble = Fraction(
        unit_time_makespan(orders) - busy, unit_time_makespan(orders)
    )  # share of the time in which a stage is idle
    assert bubble == Fraction(stages - 1, stages - 1 + microbatches)


def test_gpipe_plans_ignore_launch_ahead_and_1f1b_plans_follow_it() -> None:
    both = {
        schedule: by_stage(
            lane_orders(
                one_replica(schedule=schedule, launch_ahead=[2, 1], microbatches=3)
            )
        )
        for schedule in ("gpipe", "1f1b")
    }
    first = {s: [str(a)[6:] for a in orders[0, 0]] for s, orders in both.items()}
    assert first == {
        "gpipe": ["F0", "F1", "F2", "B0", "B1", "B2"],
        "1f1b": ["F0", "F1", "B0", "F2", "B1", "B2"],
    }


def test_evaluation_runs_every_microbatch_forward_in_order() -> None:
    plan = one_replica(schedule="1f1b", launch_ahead=[2, 1], microbatches=3)
    orders = evaluation_actions(plan)
    assert [str(action) for action in orders[0, 1]] == [
        "r0.s1.E0",
        "r0.s1.E1",
        "r0.s1.E2",
    ]


def test_a_schedule_that_there_is_not_is_refused_and_an_order_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = one_replica(schedule="zigzag", launch_ahead=[1], microbatches=1)
    with pytest.raises(BadInput, match="zigzag.*\n.*gpipe, 1f1b"):
        lane_orders(plan)
    unknown: Any = "to and fro"
    row = Schedule(summary="", order=unknown)
    monkeypatch.setattr(generate, "SCHEDULES", {"zigzag": row})
    with pytest.raises(AssertionError, match="to and fro"):
        lane_orders(plan)
