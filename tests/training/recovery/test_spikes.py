# SPDX-License-Identifier: Apache-2.0
"""When a loss is a spike, and what steps are checked for."""

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.runtime.control.recovery_decisions import Restored
from hetjax.runtime.execution.commit import StepCommit
from hetjax.training.recovery.step_checking import SpikeRule, StepChecking

# numbers near the smallest float lose bits when they are scaled
LOSSES = st.lists(st.floats(0.0, 1e6, allow_subnormal=False), max_size=40)
FACTORS, WINDOWS = st.floats(1.0, 1e3), st.integers(2, 20)


@given(LOSSES, FACTORS, WINDOWS)
def test_nothing_is_a_spike_before_half_a_window(
    losses: list[float], factor: float, window: int
):
    most = SpikeRule(factor=factor, window=window).most(losses)
    assert (most is None) == (len(losses) < window / 2)


@given(LOSSES, FACTORS, WINDOWS)
def test_at_least_half_of_the_recent_losses_would_be_no_spikes(
    losses: list[float], factor: float, window: int
):
    most = SpikeRule(factor=factor, window=window).most(losses)
    if most is not None:
        recent = losses[-window:]
        assert 2 * sum(loss <= most for loss in recent) >= len(recent)


@given(LOSSES, FACTORS, WINDOWS, st.floats(0.125, 8.0))
def test_the_unit_of_losses_and_what_came_before_the_window_do_not_matter(
    losses: list[float], factor: float, window: int, unit: float
):
    losses = [loss if loss > 1e-300 else 0.0 for loss in losses]  # room for `unit`
    rule = SpikeRule(factor=factor, window=window)
    most = rule.most(losses)
    assert rule.most([1e9, *losses]) == most or len(losses) < window
    scaled = rule.most([unit * loss for loss in losses])
    assert scaled is None if most is None else math.isclose(scaled or 0.0, unit * most)


@given(st.lists(st.floats(0.1, 10.0), min_size=20, max_size=20), st.floats(1e3, 1e9))
def test_fewer_than_half_of_a_window_cannot_move_it_out_of_what_was_there(
    losses: list[float], huge: float
):
    rule = SpikeRule(factor=2.0, window=20)
    most = rule.most(losses[:11] + [huge] * 9)
    assert most is not None and most <= 2.0 * max(losses)


def commit(loss: float, **known: object) -> StepCommit:
    """Return the commit of a step with this mean loss over one token."""
    return StepCommit(
        squares=1.0,
        losses=(((0, 0), loss),),
        num_tokens=1,
        **known,  # pyright: ignore
    )


def checking(**options: object) -> StepChecking:
    return StepChecking(SpikeRule(factor=2.0, window=4), {}, **options)  # pyright: ignore


def test_a_step_is_held_against_the_losses_before_it_and_no_skipped_ones():
    found = checking(skips_spikes=True)
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        found.on_step(step, commit(loss))
    assert found.checks(3).most_loss == 2.0 * median([3.0, 1.0, 2.0])
    spike = commit(9.0, most_loss=4.0, skips_spikes=True)
    assert spike.is_spike and spike.is_skipped
    found.on_step(3, spike)
    assert found.checks(4).most_loss == 4.0
    assert not commit(9.0, most_loss=4.0).is_skipped, "it is only told of"
    assert not commit(4.0, most_loss=4.0).is_spike


def test_a_run_that_goes_back_is_held_against_what_it_knew_then():
    found, again = checking(), checking()
    for step, loss in enumerate([3.0, 1.0, 2.0, 8.0]):
        found.on_step(step, commit(loss))
        if step < 2:
            again.on_step(step, commit(loss))
    found.on_restored(Restored(step=2))
    assert found.checks(2) == again.checks(2)


@pytest.mark.parametrize(
    ("digest_every", "save_every", "expected"),
    [
        (3, 0, [0, 3, 6, 9]),
        (3, 5, [0, 3, 4, 6, 9]),
        (0, 5, []),
        (1, 0, [*range(10)]),
    ],
)
def test_digests_are_compared_every_so_often_and_before_what_is_saved(
    digest_every: int, save_every: int, expected: list[int]
):
    found = checking(digest_every=digest_every, save_every=save_every)
    assert [step for step in range(10) if found.checks(step).digests] == expected
