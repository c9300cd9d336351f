# SPDX-License-Identifier: Apache-2.0
"""Batches against plain slices of the tokens. Shape legend as in `batches.py`."""

import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.data.batches import samples, validation_batches
from hetjax.data.tokens import Tokens
from hetjax.errors import BadInput


def _tokens(num_tokens: int) -> Tokens:
    return Tokens(np.arange(num_tokens, dtype=np.uint16))  # each token is its position


def _expected_windows(num_tokens: int, seq_len: int) -> list[tuple[int, ...]]:
    windows = []
    start = 0
    while start + seq_len + 1 <= num_tokens:
        windows.append(tuple(range(start, start + seq_len + 1)))
        start += seq_len
    return windows


def _seen(inputs_GL: np.ndarray, targets_GL: np.ndarray) -> list[tuple[int, ...]]:
    return [(*x, y[-1]) for x, y in zip(inputs_GL.tolist(), targets_GL, strict=True)]


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(20, 200),
    seq_len=st.integers(1, 19),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_epoch_shows_every_window_exactly_once(num_tokens, seq_len, seed):
    expected = _expected_windows(num_tokens, seq_len)
    made = samples([_tokens(num_tokens)], seq_len, seed)
    for epoch in range(3):
        batch = made.batch(epoch, len(expected))
        assert Counter(_seen(*batch)) == Counter(expected)


def test_batches_run_over_the_end_of_an_epoch_without_a_gap():
    expected = _expected_windows(101, 10)
    made = samples([_tokens(101)], 10, seed=3)
    seen = [row for step in range(10) for row in _seen(*made.batch(step, 3))]
    for epoch in range(3):
        assert sorted(seen[epoch * 10 : epoch * 10 + 10]) == expected


def test_epochs_have_different_orders():
    made = samples([_tokens(401)], 4, seed=0)
    first, second = (_seen(*made.batch(epoch, 100)) for epoch in range(2))
    assert first != second
    assert first != sorted(first)


def test_a_sample_depends_on_its_element_number_only():
    made = samples([_tokens(500)], 6, seed=5)
    large_GL, _ = made.batch(1, 12)
    small_GL = np.concatenate([made.batch(step, 4)[0] for step in (3, 4, 5)])
    np.testing.assert_array_equal(large_GL, small_GL)


def test_different_seeds_give_different_orders():
    orders = {
        tuple(_seen(*samples([_tokens(401)], 4, s).batch(0, 100))) for s in range(8)
    }
    assert len(orders) == 8


def test_targets_are_the_inputs_moved_by_one_and_both_are_int32():
    inputs_GL, targets_GL = samples([_tokens(50)], 8, seed=0).batch(0, 5)
    assert inputs_GL.shape == targets_GL.shape == (5, 8)
    assert inputs_GL.dtype == targets_GL.dtype == np.int32
    np.testing.assert_array_equal(targets_GL, inputs_GL + 1)


@settings(max_examples=50, deadline=None)
@given(
    num_tokens=st.integers(40, 300),
    seq_len=st.integers(1, 6),
    global_batch=st.integers(1, 6),
    num_batches=st.integers(1, 10),
)
def test_validation_windows_are_distinct_ordered_and_spread(
    num_tokens, seq_len, global_batch, num_batches
):
    every = _expected_windows(num_tokens, seq_len)
    made = validation_batches([_tokens(num_tokens)], seq_len, global_batch, num_batches)
    assert len(made) == min(num_batches, len(every) // global_batch)
    assert all(x.shape == y.shape == (global_batch, seq_len) for x, y in made)
    seen = [row for batch in made for row in _seen(*batch)]
    places = [every.index(row) for row in seen]
    assert places == sorted(set(places))
    gaps = np.diff([*places, len(every)])
    assert places[0] == 0 and gaps.max() - gaps.min() <= 1


def test_too_short_a_training_split_says_what_would_fit():
    with pytest.raises(BadInput) as caught:
        samples([_tokens(64)], 64, seed=0)
    assert str(caught.value) == (
        "got: training split of 64 tokens with seq_len 64\n"
        "allowed: at least 65 tokens (one window)\n"
        "fix: give --seq-len 63, or more text with --data.path"
    )
    assert samples([_tokens(64)], 63, seed=0).batch(0, 1)[0].shape == (1, 63)


def test_too_short_a_validation_split_says_what_would_fit():
    with pytest.raises(BadInput) as caught:
        validation_batches([_tokens(30)], 32, 8, 2)
    assert str(caught.value) == (
        "got: validation split of 30 tokens with seq_len 32\n"
        "allowed: at least 33 tokens (one window)\n"
        "fix: give --seq-len 29, or more text with --data.path"
    )


def test_fewer_windows_than_a_batch_are_repeated_in_order_with_one_warning():
    every = _expected_windows(100, 32)
    assert len(every) == 3
    with pytest.warns(UserWarning, match="3 windows of seq_len 32.*takes 8") as caught:
        [batch] = validation_batches([_tokens(100)], 32, 8, 2)
    assert len(caught) == 1
    places = [every.index(row) for row in _seen(*batch)]
    assert places == [0, 1, 2, 0, 1, 2, 0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(validation_batches([_tokens(100)], 32, 3, 2)) == 1


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_tokens_ask_for_more_text_only(num_tokens):
    with pytest.raises(BadInput, match="fix: give more text with --data.path"):
        samples([_tokens(num_tokens)], 4, seed=0)
    with pytest.raises(BadInput, match="fix: give more text with --data.path"):
        validation_batches([_tokens(num_tokens)], 4, 2, 1)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_32_bits_is_refused(seed):
    with pytest.raises(BadInput, match=f"got: seed {seed}\nallowed: 0 to 4294967295"):
        samples([_tokens(64)], 4, seed=seed)
