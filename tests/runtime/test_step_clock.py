# SPDX-License-Identifier: Apache-2.0
"""The working time of stages in a step: reported after the step, without waiting."""

import math
import time
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from hetjax.comm.peers import Pace
from hetjax.runtime.control.step_timing import StepTiming
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.execution.step_clock import StepClock, WorkerTimes
from hetjax.runtime.rpc.schema import Trained
from hetjax.schedule.programs.action import Action, Op
from tests.runtime.oracle import random_batch
from tests.runtime.test_update import MODEL, PLAN, runtime_of


@pytest.mark.usefixtures("quick_compiling")
def test_a_step_is_told_by_stage_and_kind_of_action_with_the_next_one():
    runtime = runtime_of(optax.sgd(0.1))
    runtime.initialise(0)
    clock, batch = StepClock(), random_batch(PLAN, MODEL.vocab_size, 0)
    taken = []
    for number in range(4):
        runtime.step(number, batch, clock.begin(number))
        if (found := clock.pop_finished(number)) is not None:
            taken.append((found.step, found.worked()))
    assert taken and all(step < 3 for step, _ in taken)
    for _, worked in taken:
        kinds: dict[tuple[int, int], set[str]] = {}
        for r, s, kind, seconds in worked:
            kinds.setdefault((r, s), set()).add(kind)
            assert 0 < seconds
        assert kinds == {
            (0, 0): {"F", "B", "UPDATE"},
            (0, 1): {"FB", "UPDATE"},
            (1, 0): {"FB", "UPDATE"},
        }


def action(op: Op) -> Action:
    return Action(op, 0, 0, microbatch=0 if op in (Op.F, Op.RECV) else None)


def test_waiting_is_not_counted_and_a_step_is_told_once():
    clock = StepClock()
    sums = clock.begin(5)
    now_s = time.perf_counter()
    made: Any = jnp.zeros(1)
    sums.enqueued(action(Op.RECV), now_s - 9.0, now_s, made)  # arrived just now
    sums.enqueued(action(Op.F), now_s - 9.0, now_s, made)  # could not start earlier
    assert clock.pop_finished(5) is None  # this step is still running
    clock.begin(6)
    end_s = time.monotonic() + 60.0
    while not sums.is_whole:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    found = clock.pop_finished(6)
    assert found is not None and found is sums
    assert clock.pop_finished(6) is None  # only once
    [(r, s, kind, seconds)] = found.worked()
    assert (r, s, kind) == (0, 0, "F") and 0 <= seconds < 8.0


def test_a_pause_of_the_host_counts_as_three_usual_actions_at_most():
    sums = StepClock().begin(0)
    for took_s in (1.0, 1.0, 1.0, 50.0):
        sums._seen(action(Op.F), 0.0, took_s)
    sums._seen(action(Op.UPDATE), 0.0, 2.0)
    assert sums.worked() == [(0, 0, "F", 6.0), (0, 0, "UPDATE", 2.0)]


COMMIT = StepCommit(squares=1.0, losses=(), num_tokens=1)


def answer(step: int | None, *worked: tuple[int, int, str, float], **sent: float):
    times = None
    if step is not None:
        times = WorkerTimes(step=step, worked=worked, sent=[*sent.items()])
    return Trained(commit=COMMIT, times=times)


def test_a_step_counts_if_all_workers_tell_of_it():
    timing = StepTiming()
    timing.record({"a": answer(3, (0, 0, "F", 1.0), b=2e-9), "b": answer(3)})
    found = timing.pop_times()
    assert found is not None and timing.pop_times() is None
    assert found.step == 4  # metrics count steps from 1
    assert found.parts == {(0, 0, "F"): 1.0} and found.links == {("a", "b"): 2e-9}
    # Hosts of one stage: the slower one counts, and impossible times are ignored.
    hosts = {
        "n/0": answer(3, (0, 0, "F", 1.0), (0, 0, "B", math.nan)),
        "n/1": answer(3, (0, 0, "F", 2.0), (0, 0, "B", -1.0)),
    }
    timing.record(hosts)
    found = timing.pop_times()
    assert found is not None and found.parts == {(0, 0, "F"): 2.0}
    for others in (answer(4), answer(None)):
        timing.record({"a": answer(3, (0, 0, "F", 1.0)), "b": others})
        assert timing.pop_times() is None


def test_a_link_has_the_pace_of_its_large_messages():
    pace = Pace()
    for peer, num_bytes, seconds in [
        ("b", 1 << 20, 0.5),
        ("b", 3 << 20, 1.5),
        ("b", 100, 9.0),  # only reached a buffer
        ("c", 1 << 10, 1.0),
    ]:
        pace.add(peer, num_bytes, seconds)
    assert pace.pop_s_per_byte() == [("b", 2.0 / (4 << 20))]
    assert pace.pop_s_per_byte() == []
