# SPDX-License-Identifier: Apache-2.0
"""Makes batches, as pure functions of (seed, step, sample index).

Owns the shuffled order of windows over epochs, the fixed validation windows, and the
weights of batches. Does not own windows (`windows.py`), tokens (`dataset.py`) nor which
worker takes which samples (`plans/`).

Shape legend: L sequence length, G global batch.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from hetjax.data.tokens import Tokens
from hetjax.data.windows import UNCOUNTED, PackedWindows, windows_of
from hetjax.errors import BadInput, counted_noun

# inputs_GL, targets_GL and, if packed, documents_GL (0: padding), all int32
Batch = tuple[np.ndarray, ...]

_NUM_SEEDS = 2**32  # that grain's shuffle takes


def num_targets(batch: Batch) -> int:
    """Return how many targets of a batch count: its loss is divided by this."""
    return int(np.count_nonzero(batch[1] != UNCOUNTED))


def aux_weight(batch: Batch) -> float:
    """Return the factor for the sum of a packed batch's auxiliary losses.

    They are sums over tokens, but are divided by the number of targets that count.
    """
    return num_targets(batch) / int(np.count_nonzero(batch[2]))


def weights(batches: Sequence[Batch]) -> list[float]:
    """Return the weight of each batch's mean loss in the overall mean: 1 on average."""
    counts = [num_targets(batch) for batch in batches]
    return [count / (sum(counts) / len(counts)) for count in counts]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """An endless sequence of windows: each once per epoch, in another order each time.

    Sample i of step k is element k * global_batch + i. Steps count from 0.
    """

    elements: grain.MapDataset

    def batch(self, step: int, global_batch: int) -> Batch:
        """Return the global batch of a step."""
        assert step >= 0 and global_batch >= 1, (step, global_batch)
        first = step * global_batch
        return _batch(self.elements[first + i] for i in range(global_batch))


def packing(sources: Sequence[Tokens], seq_len: int) -> str:
    """Describe how the training documents share sequences."""
    said = []
    for tokens in sources:
        windows = windows_of(tokens, seq_len, "training", is_packed=True)
        assert isinstance(windows, PackedWindows)
        said.append(
            f"{counted_noun(len(windows.packs.order_N), 'document')} in "
            f"{counted_noun(len(windows), 'sequence')} of {seq_len}, "
            f"{windows.padding:.1%} padding"
        )
    return "; ".join(said)


def samples(
    sources: Sequence[Tokens],
    seq_len: int,
    seed: int,
    *,
    shares: Sequence[float] = (1.0,),
    is_packed: bool = False,
) -> Samples:
    """Return the training samples of a split in the seed's order.

    Each source has its share of them, from the first sample on. Raises BadInput for a
    split without a window and a seed outside 32 bits.
    """
    if not 0 <= seed < _NUM_SEEDS:
        raise BadInput(
            got=f"seed {seed}",
            allowed=f"0 to {_NUM_SEEDS - 1}",
            fix="choose a smaller seed that is not negative",
        )
    assert len(sources) == len(shares), (len(sources), shares)
    endless = []
    for number, tokens in enumerate(sources):
        windows: Any = windows_of(tokens, seq_len, "training", is_packed=is_packed)
        own_seed = (seed + number) % _NUM_SEEDS
        shuffled = grain.MapDataset.source(windows).shuffle(seed=own_seed)
        endless.append(shuffled.repeat())
    if len(endless) == 1:
        return Samples(endless[0])
    return Samples(grain.MapDataset.mix(endless, shares))


@dataclass(frozen=True, slots=True)
class _Joined:
    """The windows of several sources, one source after the other."""

    sources: tuple[Any, ...]

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, index: int) -> np.ndarray:
        for windows in self.sources:
            if index < len(windows):
                return windows[index]
            index -= len(windows)
        raise IndexError


def validation_batches(
    sources: Sequence[Tokens],
    seq_len: int,
    global_batch: int,
    num_batches: int,
    *,
    is_packed: bool = False,
) -> list[Batch]:
    """Return the windows of every evaluation: spread evenly over the split, in order.

    Returns fewer than `num_batches` if the split holds fewer whole batches, each window
    once. If the split does not fill one batch, its windows are repeated in order, with
    a warning. Raises BadInput for a split without a window.
    """
    assert global_batch >= 1 and num_batches >= 1, (global_batch, num_batches)
    windows: Any = _Joined(
        tuple(
            windows_of(tokens, seq_len, "validation", is_packed=is_packed)
            for tokens in sources
        )
    )
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
    windows_GxL = np.stack(list(windows))
    return tuple(windows_GxL[:, i].copy() for i in range(windows_GxL.shape[1]))
