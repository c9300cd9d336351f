# SPDX-License-Identifier: Apache-2.0
"""Zero-bubble and interleaved orders, replayed here, against closed forms."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.schedule.programs.action import Op
from hetjax.schedule.programs.check import check
from hetjax.schedule.programs.generate import lane_orders
from hetjax.schedule.programs.list_schedule import Pipeline, Slot, list_schedule
from hetjax.schedule.programs.lower import lower
from tests.schedule.pipelines import pipeline_plan


def pipeline(
    num_stages: int, count: int, *, num_lanes: int = 0, split: bool, times=(1, 1, 1)
) -> Pipeline:
    lanes = num_lanes or num_stages
    f, i, w = ([float(t)] * num_stages for t in times)
    return Pipeline(
        forward_s=f,
        backward_s=[x + y for x, y in zip(i, w, strict=True)],
        input_gradient_s=i,
        weight_gradient_s=w,
        hop_s=[0.0] * num_stages,
        lanes=[s % lanes for s in range(num_stages)],
        num_microbatches=count,
        num_cut=[count if split else 0] * num_stages,
    )


def makespan(
    p: Pipeline, orders: Sequence[Sequence[Slot]], saved_s: float = 0.0
) -> float:
    """Return the longest path through orders and dependencies, by repeated passes.

    A whole backward takes `saved_s` less than its halves.
    """
    last, done = len(p.forward_s) - 1, {}
    clock, todo = [0.0] * len(orders), [list(order) for order in orders]
    while any(todo):
        before = sum(map(len, todo))
        for lane, order in enumerate(todo):
            while order and (need := _need(order[0], last)) in {None, *done}:
                stage, op, m = order.pop(0)
                start = max(clock[lane], done.get(need, 0.0))
                less_s = saved_s if op in (Op.B, Op.FB) else 0.0
                clock[lane] = start + _seconds(p, stage, op) - less_s
                for kind in {"F": "F", "FB": "FB", "B": "B", "I": "B", "W": ""}[op]:
                    done[kind, stage, m] = clock[lane]
        assert sum(map(len, todo)) < before, "deadlock"
    return max(clock)


def _need(slot: Slot, last: int) -> tuple[str, int, int] | None:
    stage, op, m = slot
    if op in (Op.F, Op.FB):
        return ("F", stage - 1, m) if stage else None
    if op is Op.W:
        return None
    return ("F", stage, m) if stage == last else ("B", stage + 1, m)


def _seconds(p: Pipeline, stage: int, op: Op) -> float:
    f, i, w = p.forward_s[stage], p.input_gradient_s[stage], p.weight_gradient_s[stage]
    return {"F": f, "I": i, "W": w, "B": i + w, "FB": f + i + w}[op]


@given(st.integers(1, 8), st.integers(0, 24))
def test_zero_bubble_reaches_the_floor_in_1f1bs_memory(stages: int, extra: int):
    count = stages + extra
    p = pipeline(stages, count, split=True)
    ahead = [stages - s for s in range(stages)]
    orders = list_schedule(p, ahead, [stages] * stages)
    floor = (stages - 1) + count * 3  # (S - 1) F + B (F + I + W)
    one_f_one_b = 3 * (stages - 1 + count)
    assert makespan(p, orders) == floor
    assert one_f_one_b - 3 * count == 3 * (floor - 3 * count)
    for order in orders:
        kept = most = 0
        for _, op, _ in order:
            kept += {"F": 1, "W": -1}.get(op, 0)
            most = max(most, kept)
        assert most <= stages  # 1F1B keeps as much on its first stage


@pytest.mark.parametrize(("stages", "count"), [(2, 8), (2, 20), (4, 16)])
def test_where_halves_cost_more_it_pays_to_cut_the_last_ones_only(
    stages: int, count: int
):
    def step_s(num_cut: int) -> float:
        p = replace(pipeline(stages, count, split=True), num_cut=[num_cut] * stages)
        ahead = [2 * stages - s for s in range(stages)]
        orders = list_schedule(p, ahead, [2 * stages] * stages)
        return makespan(p, orders, saved_s=0.25)

    assert step_s(2 * stages) < min(step_s(0), step_s(count))


@given(st.data())
def test_unlike_stages_do_everything_once_and_in_order(data: st.DataObject):
    stages, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    seconds = st.lists(st.floats(0.1, 3.0), min_size=stages, max_size=stages)
    counts = st.lists(st.integers(0, count), min_size=stages, max_size=stages)
    num_cut = data.draw(counts, label="cut")
    halves_s = data.draw(seconds), data.draw(seconds)
    p = Pipeline(
        forward_s=data.draw(seconds),
        backward_s=[sum(both) for both in zip(*halves_s, strict=True)],
        input_gradient_s=halves_s[0],
        weight_gradient_s=halves_s[1],
        hop_s=data.draw(seconds),
        lanes=range(stages),
        num_microbatches=count,
        num_cut=num_cut,
    )
    limits = data.draw(
        st.lists(st.integers(1, 4), min_size=stages, max_size=stages), label="ahead"
    )
    orders = list_schedule(p, limits, limits)
    for stage, order in enumerate(orders):
        whole = [Op.FB] if stage == stages - 1 else [Op.F, Op.B]
        num_whole = count - num_cut[stage]
        wanted = [(op, m) for m in range(num_whole) for op in whole]
        halves = [Op.F, Op.I, Op.W]
        wanted += [(op, m) for m in range(num_whole, count) for op in halves]
        assert sorted((op, m) for _, op, m in order) == sorted(wanted)
        for op in {op for op, _ in wanted}:
            found = [m for _, o, m in order if o is op]
            assert found == sorted(found)
    assert makespan(p, orders) > 0


@pytest.mark.parametrize(("lanes", "chunks"), [(2, 2), (2, 3), (4, 2), (4, 3)])
def test_interleaving_divides_the_bubble(lanes: int, chunks: int):
    count, stages = 4 * lanes, lanes * chunks
    p = pipeline(stages, count, num_lanes=lanes, split=False)
    ahead = [stages - s for s in range(stages)]
    step = makespan(p, list_schedule(p, ahead, ahead))
    work = 3 * chunks * count
    plain_bubble = 3 * chunks * (lanes - 1)  # 1F1B's, each lane as one stage
    assert step - work <= plain_bubble / chunks + 2
    halves = pipeline(stages, count, num_lanes=lanes, split=True)
    assert makespan(halves, list_schedule(halves, ahead, [stages] * stages)) == (
        work + lanes - 1
    )


@pytest.mark.parametrize(
    ("lanes", "chunks", "rounds"), [(8, 3, 8), (2, 2, 2), (4, 2, 5), (3, 4, 3)]
)
def test_interleaved_plans_keep_what_megatrons_rule_says_in_its_time(
    lanes: int, chunks: int, rounds: int
):
    """For 175B, arXiv 2205.05198 has 8 lanes of 3 chunks and 64 microbatches."""
    stages, count = lanes * chunks, rounds * lanes
    ahead = [stages - s for s in range(stages)]
    plan = pipeline_plan(ahead, count, "interleaved", num_lanes=lanes)
    orders = lane_orders(plan)
    for p, order in enumerate(orders):
        ops = [action.op for action in order]
        first = next(i for i, op in enumerate(ops) if op in (Op.B, Op.FB))
        ahead_of_it = 2 * (lanes - p - 1) + (chunks - 1) * lanes
        assert most_in_flight(ops) == ahead_of_it + 1
        assert first + (ops[first] is Op.FB) == ahead_of_it + 1
    replayed = pipeline(stages, count, num_lanes=lanes, split=False)
    slots = [[(a.stage, a.op, a.microbatch or 0) for a in order] for order in orders]
    assert makespan(replayed, slots) == 3 * (chunks * count + lanes - 1)


def most_in_flight(ops: Sequence[Op]) -> int:
    now = most = 0
    for op in ops:
        most = max(most, now + (op in (Op.F, Op.FB)))
        now += {Op.F: 1, Op.B: -1}.get(op, 0)
    return most


@given(st.data())
def test_interleaved_plans_with_any_launch_aheads_can_be_run(data: st.DataObject):
    lanes, chunks = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    count, stages = data.draw(st.integers(1, 9)), lanes * chunks
    drawn = data.draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages))
    ahead = sorted(drawn, reverse=True)
    plan = pipeline_plan([*ahead[:-1], 1], count, "interleaved", num_lanes=lanes)
    programs = lower(plan)
    check(programs, plan)
    orders = lane_orders(plan)
    for p, order in enumerate(orders):
        rounds = min(lanes, 2 * ahead[-lanes - 1] - 1)
        own = [*ahead[:-1], 1][p - lanes]
        most = (chunks - 1) * rounds + 2 * own - 1
        assert most_in_flight([action.op for action in order]) <= most


def test_interleaved_and_zero_bubble_plans_have_these_orders():
    plan = pipeline_plan([4, 3, 2, 1], 2, "interleaved", num_lanes=2)
    shown = [
        " ".join(f"{a.op}{a.microbatch}.s{a.stage}" for a in lane)
        for lane in lane_orders(plan)
    ]
    assert shown == [
        "F0.s0 F1.s0 F0.s2 F1.s2 B0.s2 B1.s2 B0.s0 B1.s0",
        "F0.s1 F1.s1 FB0.s3 FB1.s3 B0.s1 B1.s1",
    ]
    plan = pipeline_plan([2, 1], 3, "zero-bubble")
    shown = [
        " ".join(f"{a.op}{a.microbatch}" for a in lane) for lane in lane_orders(plan)
    ]
    assert shown == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
