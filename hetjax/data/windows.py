# SPDX-License-Identifier: Apache-2.0
"""Makes the windows of a split: the inputs and targets of one sequence each.

Owns how tokens are cut into windows, or packed in them, and which targets count. Does
not own their order (`batches.py`), which documents share a window (`packing.py`) nor
tokens (`tokens.py`).

Shape legend: T tokens of a split, R its rows, N documents or parts of them, L sequence
length, W = L + 1 (the inputs and the target of the last one), 2: inputs and targets,
3: also the number of each position's document.
"""

import warnings
from dataclasses import dataclass

import numpy as np

from hetjax.data.packing import Packs, packed
from hetjax.data.tokens import Rows, Tokens
from hetjax.errors import BadInput

UNCOUNTED = -1  # a target that the loss leaves out


def windows_of(
    tokens: Tokens, seq_len: int, split: str, *, is_packed: bool
) -> "Windows | RowWindows | PackedWindows":
    """Return the windows of the tokens. Raises BadInput if there is none."""
    assert seq_len >= 1, seq_len
    if is_packed:
        return _packed_windows(tokens, seq_len, split)
    if tokens.rows is not None:
        chosen = _chosen_rows(tokens.rows, seq_len, split)
        return RowWindows(tokens.tokens_T, tokens.rows, chosen, seq_len)
    windows = Windows(tokens.tokens_T, seq_len)
    if not len(windows):
        raise _too_short(split, len(tokens.tokens_T), seq_len)
    return windows


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


@dataclass(frozen=True, slots=True, eq=False)
class WindowParts:
    """Documents, or parts of them: `lengths_N` positions from `starts_N` on.

    Each has one more token, which is only a target: targets stay within a document.
    """

    starts_N: np.ndarray
    lengths_N: np.ndarray
    learnt_T: np.ndarray | None  # None: all


@dataclass(frozen=True, slots=True, eq=False)
class PackedWindows:
    """Several documents to a window, numbered from 1, then padding, which is 0."""

    tokens_T: np.ndarray
    parts: WindowParts
    packs: Packs
    seq_len: int

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def padding(self) -> float:
        """The share of positions that hold no document."""
        return 1 - float(self.parts.lengths_N.sum()) / (len(self) * self.seq_len)

    def __getitem__(self, index: int) -> np.ndarray:
        window_3L = np.zeros((3, self.seq_len), np.int32)
        window_3L[1] = UNCOUNTED
        at = 0
        for number, part in enumerate(self.packs[index], 1):
            start, length = int(self.parts.starts_N[part]), self.parts.lengths_N[part]
            here = slice(at, at := at + int(length))
            window_3L[0, here] = self.tokens_T[start : start + length]
            after = slice(start + 1, start + 1 + length)
            window_3L[1, here] = self._targets(after)
            window_3L[2, here] = number
        return window_3L

    def _targets(self, after: slice) -> np.ndarray:
        targets = np.asarray(self.tokens_T[after], np.int32)
        learnt_T = self.parts.learnt_T
        return (
            targets
            if learnt_T is None
            else np.where(learnt_T[after], targets, UNCOUNTED)
        )


def _packed_windows(tokens: Tokens, seq_len: int, split: str) -> PackedWindows:
    if tokens.rows is None:
        parts = _text_parts(tokens, seq_len)
        if not len(parts.lengths_N):
            raise _too_short(split, len(tokens.tokens_T), 1)
    else:
        rows = tokens.rows
        chosen = _chosen_rows(rows, seq_len, split)
        lengths = np.minimum(np.diff(rows.starts_R)[chosen] - 1, seq_len)
        parts = WindowParts(rows.starts_R[chosen], lengths, rows.learnt_T)
    packs = packed(parts.lengths_N, seq_len)
    return PackedWindows(tokens.tokens_T, parts, packs, seq_len)


def _text_parts(tokens: Tokens, seq_len: int) -> WindowParts:
    """Cut tokens into documents at their end markers. A document that is too long
    continues in another part, whose first input is the last target of the part before.
    """
    ends = np.flatnonzero(tokens.tokens_T == tokens.end)
    ends = np.union1d(ends, [len(tokens.tokens_T) - 1])
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts  # of positions that have a target
    numbers = -(-lengths // seq_len)
    within = np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    skipped = within * seq_len
    left = np.repeat(lengths, numbers) - skipped
    return WindowParts(
        np.repeat(starts, numbers) + skipped, np.minimum(left, seq_len), None
    )


def _chosen_rows(rows: Rows, seq_len: int, split: str) -> np.ndarray:
    """Choose the rows that have something to learn within a window; warn of others."""
    chosen = np.flatnonzero(rows.first_R <= seq_len)
    num_rows = len(rows.first_R)
    num_cut = int(np.sum(np.diff(rows.starts_R) > seq_len + 1))
    if not len(chosen):
        raise BadInput(
            got=f"{split} split of {num_rows} rows, none with a token to learn among "
            f"its first {seq_len + 1} tokens",
            allowed="rows with a token to learn within seq_len",
            fix=f"raise --seq-len to {rows.first_R.min()} or more"
            if num_rows
            else "give more rows with --data.path",
        )
    if num_cut:
        num_left_out = num_rows - len(chosen)
        left_out = f"; left out: {num_left_out} with nothing to learn before the cut"
        warnings.warn(
            f"{num_cut} of {num_rows} rows of the {split} split are longer than "
            f"seq_len {seq_len} and are cut{left_out if num_left_out else ''}",
            stacklevel=4,
        )
    return chosen


def _too_short(split: str, num_tokens: int, seq_len: int) -> BadInput:
    more_text = "more text with --data.path"
    shorter = f"give --seq-len {num_tokens - 1}, or {more_text}"
    return BadInput(
        got=f"{split} split of {num_tokens} tokens with seq_len {seq_len}",
        allowed=f"at least {seq_len + 1} tokens (one window)",
        fix=shorter if num_tokens > 1 else f"give {more_text}",
    )
