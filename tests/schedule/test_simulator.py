# SPDX-License-Identifier: Apache-2.0
"""Simulated step times, against published tables and closed forms."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.costs.costs import Costs, Reduction, Route, StageTimes
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.schedule.programs.action import Op
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.result import Simulation
from hetjax.schedule.simulation.simulator import simulate
from tests.schedule.pipelines import pipeline_costs, pipeline_plan

# Four equal stages of unit time, 64 microbatches, a middle link that takes c: the step
# times for delta 1, 2 and 3 on that hop, and sum(t + 2 c) + (B - 1) t (our derivation,
# checked with another event simulation that predates this one).
SLOW_MIDDLE_LINK = [
    (0.00, 67.00, 67.00, 67.00, 67.00),
    (0.05, 70.20, 67.10, 67.10, 67.10),
    (0.10, 73.40, 67.20, 67.20, 67.20),
    (0.30, 86.20, 67.60, 67.60, 67.60),
    (0.50, 99.00, 68.00, 68.00, 68.00),
    (0.60, 105.40, 72.20, 68.20, 68.20),
    (0.80, 118.20, 80.60, 68.60, 68.60),
    (1.00, 131.00, 89.00, 69.00, 69.00),
]


def run(plan: Plan, costs: Costs) -> Simulation:
    return simulate(lower(plan), plan, costs)


@pytest.mark.parametrize("row", SLOW_MIDDLE_LINK, ids=lambda row: f"c={row[0]}")
def test_a_slow_middle_link_costs_what_the_table_says(row: tuple[float, ...]):
    hop_s, *totals, closed_form = row
    costs = pipeline_costs([1 / 3] * 4, [2 / 3] * 4, [0, hop_s, 0])
    for delta, total_s in enumerate(totals, start=1):
        plan = pipeline_plan([3 + delta, 2 + delta, 2, 1], 64)
        assert run(plan, costs).step_time_s == pytest.approx(total_s, abs=1e-6)
    assert totals[-1] == closed_form == pytest.approx(4 + 2 * hop_s + 63)


@given(st.integers(1, 6), st.integers(1, 12))
def test_the_bubble_of_equal_stages_is_the_textbooks(stages: int, microbatches: int):
    plan = pipeline_plan(
        [min(stages - s, microbatches) for s in range(stages)], microbatches
    )
    costs = pipeline_costs([1.0] * stages, [2.0] * stages, [0.0] * stages)
    expected = (stages - 1) / (stages - 1 + microbatches)
    assert run(plan, costs).bubble == pytest.approx(expected, abs=1e-9)


def test_two_messages_share_a_trunk_and_one_alone_has_it_all():
    # two replicas of two stages, which both send 3 bytes at time 1 over one trunk of 2
    # per s
    plan = two_replicas()
    times = {key: seconds(1.0) for key in ((0, 0), (0, 1), (1, 0), (1, 1))}
    route = Route(trunks=("wire",), latency_s=0.25)
    forward = {((r, 0), (r, 1)): route for r in (0, 1)}
    costs = Costs(
        times=times,
        trunks={"wire": 2.0},
        routes=forward,
        message_bytes=dict.fromkeys(forward, 3.0),
    )
    arrivals = [t.end_s for t in run(plan, costs).transfers if t.action.buffer == "y"]
    assert arrivals == pytest.approx([1 + 3.0 + 0.25] * 2)
    # the second message is longer: 6 bytes, of which 3 share the trunk and 3 have it
    # alone
    longer = {edge: 6.0 if edge[0][0] else 3.0 for edge in forward}
    simulation = run(plan, replace(costs, message_bytes=longer))
    arrivals = [t.end_s for t in simulation.transfers if t.action.buffer == "y"]
    assert arrivals == pytest.approx([1 + 3.0 + 0.25, 1 + 4.5 + 0.25])


def test_messages_of_one_channel_wait_for_each_other_but_not_for_the_latency():
    costs = pipeline_costs([1.0, 0.5], [1.0, 0.5], [3.0])
    late = {edge: replace(r, latency_s=10.0) for edge, r in costs.routes.items()}
    simulation = run(pipeline_plan([2, 1], 2), replace(costs, routes=late))
    sends = [t for t in simulation.transfers if t.action.buffer == "y"]
    assert [t.start_s for t in sends] == pytest.approx([1.0, 2.0])
    assert [t.end_s for t in sends] == pytest.approx([1 + 3 + 10, 1 + 3 + 3 + 10])


def test_a_ring_runs_beside_the_computing_and_update_waits_for_it():
    plan = two_replicas()
    keys = [(r, s) for r in (0, 1) for s in (0, 1)]
    through = {"there": 8.0, "back": 8.0}
    costs = Costs(
        times={key: seconds(1.0, update_s=2.0) for key in keys},
        trunks={"there": 1.0, "back": 2.0},
        reductions={(1, 2): Reduction(trunk_bytes=through, latency_s=0.5)},
        norm_s=0.125,
    )
    simulation = run(plan, costs)
    # F on stage 0, then FB (2 s) on stage 1. The ring of stage 1 starts then, while
    # stage 0 still has B to do.
    ring = simulation.reductions[0]
    assert (ring.start_s, ring.end_s) == pytest.approx((3.0, 3.0 + 8.0 + 0.5))
    assert simulation.step_time_s == pytest.approx(11.5 + 0.125 + 2.0)
    updates = [t for lane in simulation.lanes.values() for t in lane]
    starts = {t.start_s for t in updates if t.action.op is Op.UPDATE}
    assert starts == {11.625}
    # The last stages wait for their ring; the first stages wait for NORM, which is idle
    # time.
    waiting = {n: round(s.waiting_s, 3) for (n, _), s in simulation.shares.items()}
    assert waiting == {"n0": 0.0, "n1": 8.5, "n2": 0.0, "n3": 8.5}


@given(st.lists(st.floats(0.1, 2.0), min_size=2, max_size=5), st.integers(1, 8))
def test_busy_waiting_and_idle_add_up_to_the_step(times: list[float], count: int):
    plan = pipeline_plan([len(times) - s for s in range(len(times))], count)
    costs = pipeline_costs(times, times, [0.3] * len(times))
    simulation = run(plan, costs)
    for (node, _), shares in simulation.shares.items():
        stage = int(node[1:])
        assert shares.busy_s == pytest.approx(2 * count * times[stage])
        assert min(shares.waiting_s, shares.idle_s) >= -1e-9
        total_s = shares.busy_s + shares.waiting_s + shares.idle_s
        assert total_s == pytest.approx(simulation.step_time_s)


def test_stages_on_one_device_take_turns():
    plan = pipeline_plan([4, 3, 2, 1], 4, "interleaved", num_lanes=2)
    costs = pipeline_costs([1.0] * 4, [1.0] * 4, [0.0] * 4)
    simulation = run(plan, costs)
    assert len(simulation.lanes) == 2
    for lane in simulation.lanes.values():
        for before, after in zip(lane, lane[1:], strict=False):
            assert before.end_s <= after.start_s
    # two lanes with 2 x 2 s of work per microbatch, and a bubble of one chunk
    assert simulation.step_time_s == pytest.approx(4 * 4 + 2)


def seconds(each_s: float, update_s: float = 0.0) -> StageTimes:
    return StageTimes(
        forward_s=each_s,
        backward_s=each_s,
        fused_s=2 * each_s,
        input_gradient_s=each_s / 2,
        weight_gradient_s=each_s / 2,
        update_s=update_s,
    )


def two_replicas() -> Plan:
    """Return two replicas of two stages with the same cut, one microbatch each."""
    replicas = tuple(
        Replica(
            num_microbatches=1,
            microbatch_size=1,
            stages=tuple(
                Stage(
                    node=f"n{2 * r + s}",
                    devices=(0,),
                    layers=(s, s + 1),
                    launch_ahead=2 - s,
                )
                for s in range(2)
            ),
        )
        for r in range(2)
    )
    return Plan(model="m", seq_len=8, global_batch=2, replicas=replicas)
