# SPDX-License-Identifier: Apache-2.0
"""Which documents share a sequence, and the resulting windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.data.batches import aux_weight, packing, samples, validation_batches
from hetjax.data.packing import packed
from hetjax.data.tokens import Rows, Tokens
from hetjax.data.windows import PackedWindows, windows_of


def _rooms_one_by_one(lengths: list[int], size: int) -> list[int]:
    """Return the space left in packs if each document goes where least remains."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, at) for at, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(size - length)
    return sorted(rooms)


@given(
    st.integers(1, 30).flatmap(
        lambda size: st.tuples(
            st.just(size), st.lists(st.integers(1, size), min_size=1, max_size=60)
        )
    )
)
def test_packs_are_those_of_best_fit_decreasing(case: tuple[int, list[int]]):
    size, lengths = case
    packs = packed(np.array(lengths), size)
    rooms = [size - sum(lengths[i] for i in packs[p]) for p in range(len(packs))]
    assert sorted(packs.order_N.tolist()) == [*range(len(lengths))]
    assert sorted(rooms) == _rooms_one_by_one(lengths, size)


def _rows(*rows: tuple[list[int], list[bool]]) -> Tokens:
    first = [next(i for i, one in enumerate(learnt) if one and i) for _, learnt in rows]
    return Tokens(
        np.array([t for tokens, _ in rows for t in tokens], np.uint16),
        Rows(
            starts_R=np.cumsum([0, *(len(tokens) for tokens, _ in rows)]),
            first_R=np.array(first),
            learnt_T=np.array([one for _, learnt in rows for one in learnt]),
        ),
    )


def test_rows_share_a_window_each_with_its_own_targets_then_padding():
    tokens = _rows(
        ([5, 6, 7], [False, False, True]), ([1, 2, 3, 4], [False, True, True, True])
    )
    batch = validation_batches([tokens], 6, 1, 1, is_packed=True)[0]
    assert [array.tolist() for array in batch] == [
        [[1, 2, 3, 5, 6, 0]],
        [[2, 3, 4, -1, 7, -1]],
        [[1, 1, 1, 2, 2, 0]],
    ]
    assert all(array.dtype == np.int32 for array in batch)
    assert aux_weight(batch) == 4 / 5
    assert packing([tokens], 6) == "2 documents in 1 sequence of 6, 16.7% padding"


def test_a_row_that_is_too_long_is_cut_and_counted_once():
    tokens = _rows(([1, 2, 3, 4, 8, 9], [True] * 6), ([5, 6], [False, True]))
    with pytest.warns(UserWarning) as caught:
        windows = windows_of(tokens, 3, "training", is_packed=True)
    (message,) = [str(w.message) for w in caught]
    assert message.startswith("1 of 2 rows of the training split are longer than")
    found = [windows[i][:2].tolist() for i in range(len(windows))]
    assert found == [[[1, 2, 3], [2, 3, 4]], [[5, 0, 0], [6, -1, -1]]]


END = 99


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 9))
def test_of_texts_every_token_that_follows_one_is_learnt_once(
    sizes: list[int], seq_len: int
):
    """A document is its tokens and its end; a text that is too long is continued."""
    texts = [[*range(100 * n, 100 * n + size), END] for n, size in enumerate(sizes, 1)]
    pairs = sorted(pair for text in texts for pair in zip(text, text[1:], strict=False))
    tokens = Tokens(np.array([t for text in texts for t in text]), end=END)
    if not pairs:
        return
    windows = windows_of(tokens, seq_len, "training", is_packed=True)
    assert isinstance(windows, PackedWindows)
    found = []
    for i in range(len(windows)):
        inputs_L, targets_L, documents_L = windows[i]
        for number in range(1, documents_L.max() + 1):
            (places,) = np.nonzero(documents_L == number)
            assert places.tolist() == [*range(places[0], places[-1] + 1)]
            own = {t // 100 for t in inputs_L[places]}
            assert len(own) == 1  # of one text
        counted = documents_L > 0
        assert np.all(targets_L[~counted] == -1) and np.all(inputs_L[~counted] == 0)
        found += zip(
            inputs_L[counted].tolist(), targets_L[counted].tolist(), strict=True
        )
    assert sorted(found) == pairs
    positions = sum(map(len, texts)) - len(texts)
    assert windows.padding == pytest.approx(
        1 - positions / (len(windows) * seq_len), abs=1e-12
    )


def test_packed_batches_are_those_of_their_step_alone():
    rows = [([n, n + 1, n + 2], [False, True, True]) for n in range(40)]
    first, again = (samples([_rows(*rows)], 8, 3, is_packed=True) for _ in range(2))
    for step in (7, 0, 3):
        for one, other in zip(first.batch(step, 4), again.batch(step, 4), strict=True):
            np.testing.assert_array_equal(one, other)
    epoch = np.concatenate([first.batch(step, 1)[0] for step in range(10)])
    assert sorted(set(epoch[epoch > 0].tolist())) == [*range(1, 41)]
