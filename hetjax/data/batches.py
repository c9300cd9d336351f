# SPDX-License-Identifier: Apache-2.0
"""Batches as pure functions of (seed, step, sample index).

Owns windows, which of their targets count, their shuffled order over epochs and the
fixed validation windows. Does not own tokens (`dataset.py`) nor which worker takes
which samples (`plans/`).

Shape legend: T tokens of a split, R its rows, L sequence length, G global batch, W =
L + 1 (a window: the inputs and the target that follows the last one), 2: inputs and
targets.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from hetjax.data.tokens import Rows, Tokens
from hetjax.errors import BadInput

Batch = tuple[np.ndarray, np.ndarray]  # inputs_GL, targets_GL, both int32

UNCOUNTED = -1  # a target that the loss leaves out
_NUM_SEEDS = 2**32  # what grain's shuffle takes


def num_targets(batch: Batch) -> int:
    """How many targets of a batch count: what its loss is divided by."""
    return int(np.count_nonzero(batch[1] != UNCOUNTED))


def weights(batches: Sequence[Batch]) -> list[float]:
    """What the mean losses of batches are weighted by in their mean: 1 on average."""
    counts = [num_targets(batch) for batch in batches]
    return [count / (sum(counts) / len(counts)) for count in counts]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The windows of a split: window j is tokens j*L to j*L + L, both included."""

    tokens_T: np.ndarray
    seq_len: int

    def __len__(self) -> int:
        assert self.seq_len >= 1, self.seq_len
        return max(0, (len(self.tokens_T) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.seq_len
        window_W = self.tokens_T[start : start + self.seq_len + 1]
        return np.stack([window_W[:-1], window_W[1:]]).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class RowWindows:
    """A window for each row: its first tokens, then zeros without targets."""

    tokens_T: np.ndarray
    rows: Rows
    chosen: np.ndarray  # rows that have something to learn in a window
    seq_len: int

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> np.ndarray:
        row = self.chosen[index]
        start, end = (int(at) for at in self.rows.starts_R[row : row + 2])
        end = min(end, start + self.seq_len + 1)
        row_T = np.asarray(self.tokens_T[start:end], np.int32)
        window_2L = np.zeros((2, self.seq_len), np.int32)
        window_2L[0, : len(row_T)] = row_T[: self.seq_len]
        window_2L[1] = UNCOUNTED
        learnt = self.rows.learnt_T[start + 1 : end]
        window_2L[1, : len(learnt)] = np.where(learnt, row_T[1:], UNCOUNTED)
        return window_2L


def row_windows(
    tokens_T: np.ndarray, rows: Rows, seq_len: int, split: str
) -> RowWindows:
    """Choose the rows that have something to learn within a window; warn of others."""
    assert seq_len >= 1, seq_len
    chosen = np.flatnonzero(rows.first_R <= seq_len)
    num_rows = len(rows.first_R)
    num_cut = int(np.sum(np.diff(rows.starts_R) > seq_len + 1))
    if not len(chosen):
        raise BadInput(
            got=f"{split} split of {num_rows} rows, none with a token to learn among "
            f"its first {seq_len + 1}",
            allowed="rows that fit into seq_len, with what is to be learnt in them",
            fix=f"raise --seq-len to {rows.first_R.min()} or more"
            if num_rows
            else "give more rows with --data.path",
        )
    if num_cut:
        warnings.warn(
            f"{num_cut} of {num_rows} rows of the {split} split are longer than "
            f"seq_len {seq_len} and cut; {num_rows - len(chosen)} of them have nothing "
            "to learn before that and are left out",
            stacklevel=4,
        )
    return RowWindows(tokens_T, rows, chosen, seq_len)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """An endless sequence of windows: each once per epoch, epochs in unlike orders.

    Sample i of step k is element k * global_batch + i. Steps count from 0.
    """

    elements: grain.MapDataset

    def batch(self, step: int, global_batch: int) -> Batch:
        """Give the global batch of a step."""
        assert step >= 0 and global_batch >= 1, (step, global_batch)
        first = step * global_batch
        return _batch(self.elements[first + i] for i in range(global_batch))


def samples(tokens: Tokens, seq_len: int, seed: int) -> Samples:
    """Give the training samples of a split in the seed's order.

    Raises BadInput for a split without a window and a seed outside 32 bits.
    """
    if not 0 <= seed < _NUM_SEEDS:
        raise BadInput(
            got=f"seed {seed}",
            allowed=f"0 to {_NUM_SEEDS - 1}",
            fix="choose a smaller seed that is not negative",
        )
    windows = _windows(tokens, seq_len, "training")
    shuffled = grain.MapDataset.source(windows).shuffle(seed=seed)
    return Samples(shuffled.repeat())


def validation_batches(
    tokens: Tokens, seq_len: int, global_batch: int, num_batches: int
) -> list[Batch]:
    """Give the windows of every evaluation: spread evenly over the split, in order.

    Gives fewer than `num_batches` where the split holds fewer whole batches, each
    window once. Where it does not fill one batch, its windows are repeated in order,
    with a warning. Raises BadInput for a split without a window.
    """
    assert global_batch >= 1 and num_batches >= 1, (global_batch, num_batches)
    windows = _windows(tokens, seq_len, "validation")
    if len(windows) < global_batch:
        warnings.warn(
            f"the validation split holds {len(windows)} windows of seq_len {seq_len}, "
            f"and one batch takes {global_batch}: windows are repeated to fill it, so "
            "val_loss is an average over fewer texts than usual",
            stacklevel=2,
        )
        return [_batch(windows[i % len(windows)] for i in range(global_batch))]
    num_batches = min(num_batches, len(windows) // global_batch)
    num_used = num_batches * global_batch
    chosen = [i * len(windows) // num_used for i in range(num_used)]
    return [
        _batch(windows[j] for j in chosen[first : first + global_batch])
        for first in range(0, num_used, global_batch)
    ]


def _windows(tokens: Tokens, seq_len: int, split: str) -> Windows | RowWindows:
    """Cut into windows; BadInput where there is not one."""
    if tokens.rows is not None:
        return row_windows(tokens.tokens_T, tokens.rows, seq_len, split)
    windows = Windows(tokens.tokens_T, seq_len)
    if not len(windows):
        raise _too_short(split, len(tokens.tokens_T), seq_len)
    return windows


def _batch(windows: Iterable[Any]) -> Batch:
    windows_G2L = np.stack(list(windows))
    return windows_G2L[:, 0].copy(), windows_G2L[:, 1].copy()


def _too_short(split: str, num_tokens: int, seq_len: int) -> BadInput:
    more_text = "more text with --data.path"
    shorter = f"seq_len at most {num_tokens - 1}, or {more_text}"
    return BadInput(
        got=f"{split} split of {num_tokens} tokens with seq_len {seq_len}",
        allowed=f"at least {seq_len + 1} tokens (one window)",
        fix=shorter if num_tokens > 1 else f"give {more_text}",
    )
