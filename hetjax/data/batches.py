# SPDX-License-Identifier: Apache-2.0
"""Batches as pure functions of (seed, step, sample index).

Owns windows, their shuffled order over epochs and the fixed validation windows. Does
not own tokens (`dataset.py`) nor which worker takes which samples (`plans/`).

Shape legend: T tokens of a split, L sequence length, G global batch, W = L + 1 (a
window: the inputs and the target that follows the last one).
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from hetjax.errors import BadInput

Batch = tuple[np.ndarray, np.ndarray]  # inputs_GL, targets_GL, both int32

_NUM_SEEDS = 2**32  # what grain's shuffle takes


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
        return np.asarray(window_W, np.int32)


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


def samples(tokens_T: np.ndarray, seq_len: int, seed: int) -> Samples:
    """Give the training samples of a split in the seed's order.

    Raises BadInput for a split shorter than one window and a seed outside 32 bits.
    """
    if not 0 <= seed < _NUM_SEEDS:
        raise BadInput(
            got=f"seed {seed}",
            allowed=f"0 to {_NUM_SEEDS - 1}",
            fix="choose a smaller seed that is not negative",
        )
    windows = Windows(tokens_T, seq_len)
    if not len(windows):
        raise _too_short("training", len(tokens_T), seq_len)
    shuffled = grain.MapDataset.source(windows).shuffle(seed=seed)
    return Samples(shuffled.repeat())


def validation_batches(
    tokens_T: np.ndarray, seq_len: int, global_batch: int, num_batches: int
) -> list[Batch]:
    """Give the windows of every evaluation: spread evenly over the split, in order.

    Gives fewer than `num_batches` where the split holds fewer whole batches, each
    window once. Where it does not fill one batch, its windows are repeated in order,
    with a warning. Raises BadInput for a split shorter than one window.
    """
    assert global_batch >= 1 and num_batches >= 1, (global_batch, num_batches)
    windows = Windows(tokens_T, seq_len)
    if not len(windows):
        raise _too_short("validation", len(tokens_T), seq_len)
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


def _batch(windows: Iterable[Any]) -> Batch:
    windows_GW = np.stack(list(windows))
    return windows_GW[:, :-1].copy(), windows_GW[:, 1:].copy()


def _too_short(split: str, num_tokens: int, seq_len: int) -> BadInput:
    more_text = "more text with --data.path"
    shorter = f"seq_len at most {num_tokens - 1}, or {more_text}"
    return BadInput(
        got=f"{split} split of {num_tokens} tokens with seq_len {seq_len}",
        allowed=f"at least {seq_len + 1} tokens (one window)",
        fix=shorter if num_tokens > 1 else f"give {more_text}",
    )
