# SPDX-License-Identifier: Apache-2.0
"""The replay of traces with stragglers, on small traces with known answers."""

import json
import random
from typing import Any

import numpy as np
import pytest

from experiments.stragglers.__main__ import detected
from experiments.stragglers.alarms import (
    AT,
    RECORDED,
    drawn,
    drifting,
    findings,
    recorded,
)
from experiments.stragglers.replay import WhatIf, own_times, replay
from experiments.stragglers.trace import Trace, parse_trace
from tests.short_runs import draws

F, B, SEND, RECV = "forward-compute", "backward-compute", "forward-send", "forward-recv"


def trace(ops: list[tuple[int, str, list[int]]], **values: Any) -> Trace:
    fields = ("stage", "type", "after")
    return parse_trace(
        {"ops": [dict(zip(fields, op, strict=True)) for op in ops], **values}
    )


def test_a_message_ends_when_both_are_there_and_it_has_passed():
    # stage 0 computes 3 s and sends; stage 1 waits from 0 on, then computes 4 s
    found = trace(
        [(0, F, []), (0, SEND, [0]), (1, RECV, []), (1, F, [2])],
        groups=[{"ops": [1, 2], "across_dp": False}],
        start_us=[[[0, 3e6, 0, 5e6]]],
        duration_us=[[[3e6, 2e6, 5e6, 4e6]]],
        step_time_us=[9e6],
    )
    own_SDO = own_times(found)
    assert own_SDO[0, 0].tolist() == [3.0, 2.0, 2.0, 4.0]  # without the waiting, 5
    assert replay(found, own_SDO) == pytest.approx([9.0])
    # both forwards take their mean, 3.5 s, and the message its 2 s
    assert WhatIf(found).ideal_s == pytest.approx(3.5 + 2.0 + 3.5)
    own_SDO[0, 0, 0] = 1.0
    assert replay(found, own_SDO) == pytest.approx([7.0])


def test_clocks_that_are_far_apart_give_no_negative_message():
    found = trace(
        [(0, SEND, []), (1, RECV, [])],
        groups=[{"ops": [0, 1], "across_dp": False}],
        start_us=[[[0, 30_000]], [[0, 5_000]]],
        duration_us=[[[10_000, 5_000]], [[2_000, 1_000]]],
        step_time_us=[35_000, 6_000],
    )
    assert own_times(found)[:, 0].tolist() == [
        [0.0, pytest.approx(0.005)],
        [pytest.approx(-0.003), pytest.approx(0.001)],
    ]


def two_replicas(seed: int) -> tuple[Trace, np.ndarray]:
    """Return three random steps whose operations wait only for earlier ones."""
    draw = random.Random(seed)
    num_ops, in_group = 12, draw.sample(range(12), 4)
    ops = [
        (o % 3, F, draw.sample(range(o), min(o, draw.randrange(3))))
        for o in range(num_ops)
    ]
    after = {o: set(op[2]) for o, op in enumerate(ops)}
    for o in range(num_ops):
        after[o] |= {x for before in after[o] for x in after[before]}
    groups, taken = [], set[int]()
    for o in in_group:  # unless one waits for another, also indirectly
        others = [x for x in in_group if x > o and x - o < 2 and o not in after[x]]
        if o not in taken and not taken & {*others}:
            groups.append({"ops": [o, *others], "across_dp": draw.random() < 0.5})
            taken |= {o, *others}
    shape = (3, 2, num_ops)
    own_SDO = np.random.default_rng(seed).uniform(0.1, 2.0, shape)
    zeros = np.zeros(shape).tolist()
    found = trace(
        ops, groups=groups, start_us=zeros, duration_us=zeros, step_time_us=[0.0] * 3
    )
    return found, own_SDO


def by_waiting(found: Trace, own_SDO: np.ndarray, step: int) -> float:
    """Return the oracle's step time: move ends later until all constraints hold."""
    _, num_replicas, num_ops = own_SDO.shape
    end = {(d, o): 0.0 for d in range(num_replicas) for o in range(num_ops)}
    start = dict(end)
    together = {pair: [pair] for pair in end}
    for members in found.members():
        together |= {pair: members for pair in members}
    for _ in range(10 * len(end)):
        for d, o in end:
            start[d, o] = max([end[d, b] for b in found.ops[o].after], default=0.0)
        new = {
            (d, o): max(start[pair] for pair in together[d, o]) + own_SDO[step, d, o]
            for d, o in end
        }
        if new == end:
            return max(end.values()) - min(start.values())
        end = new
    raise AssertionError("they wait for each other")


@pytest.mark.parametrize("seed", range(20))
def test_a_replay_is_what_waiting_for_all_that_comes_before_gives(seed: int):
    found, own_SDO = two_replicas(seed)
    expected = [by_waiting(found, own_SDO, step) for step in range(3)]
    assert replay(found, own_SDO) == pytest.approx(expected)


def test_the_slow_worker_of_a_job_is_its_culprit():
    # four replicas of two stages wait for each other at the end; one is slow
    ops = [(0, F, []), (1, F, [0]), (1, B, [1]), (0, B, [2])]
    noise = np.random.default_rng(0).normal(1.0, 0.02, (40, 4, 4))
    took_SDO = noise * [1.0, 1.0, 2.0, 2.0]
    took_SDO[:, 2, [0, 3]] *= 3.0
    end_SDO = np.cumsum(took_SDO, axis=2)
    found = trace(
        ops,
        groups=[],
        start_us=((end_SDO - took_SDO) * 1e6).tolist(),
        duration_us=(took_SDO * 1e6).tolist(),
        step_time_us=(end_SDO.max(axis=(1, 2)) * 1e6).tolist(),
    )
    what_if = WhatIf(found)
    assert what_if.replayed_s == pytest.approx(found.step_S.mean())
    assert what_if.culprit() == "worker dp 2, stage 0"
    # forwards take (7 + 3) / 8 s on average, backwards twice as long
    assert what_if.ideal_s == pytest.approx(2 * 10 / 8 * 3, rel=0.02)
    [finding] = detected(found)
    assert finding.subject.name == "dp2-stage0"
    assert finding.factor == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("seed", draws(range(5), short=1))
@pytest.mark.parametrize("name", ["pipeline", "workers", "packed"])
def test_steps_of_real_runs_drawn_again_alarm_nobody(name: str, seed: int):
    run = json.loads(RECORDED.read_text())["runs"][name]
    lanes, steps = recorded(run)
    assert len(steps) >= 40 and len({lane.node for lane in lanes.lanes}) > 1
    # five seeds are ten thousand steps
    assert findings(lanes, drawn(steps, 2_000, seed=seed + 1)) == []


@pytest.mark.parametrize("name", ["pipeline", "packed"])
def test_a_node_of_a_real_run_that_takes_four_times_as_long_is_named(name: str):
    run = json.loads(RECORDED.read_text())["runs"][name]
    lanes, steps = recorded(run)
    node = lanes.lanes[1].node
    slow = drifting(lanes, drawn(steps, 200, seed=0), node, 4.0)
    found = findings(lanes, slow)
    assert found and all(AT <= finding.step < AT + 40 for finding in found)
    assert {finding.subject.name for finding in found} == {node}
