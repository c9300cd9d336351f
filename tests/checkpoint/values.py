# SPDX-License-Identifier: Apache-2.0
"""Entries with values to save: random ones, and ones that depend on their step."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from hetjax.checkpoint.format import Entry

State = list[tuple[Entry, np.ndarray]]

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.uint8, np.bool_)
_NAMES = ("params.block_000.attention.q", "params.head.w", "opt.0.mu.head.w", "opt.1.n")


def state_of(step: int, *, num_entries: int = 3, size: int = 8) -> State:
    """A state whose every value depends on the step."""
    rng = np.random.default_rng(step)
    names = [f"params.block_{i:03d}.mlp.up" for i in range(num_entries)]
    return [
        (
            Entry(name, (4, size), np.dtype(np.float32), (1, 8)),
            rng.standard_normal((4, size), dtype=np.float32),
        )
        for name in names
    ]


@st.composite
def entry_values(draw: st.DrawFn, name: str) -> tuple[Entry, np.ndarray]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    cuts = [(0, 1)]
    cuts += [(i, n) for i, size in enumerate(shape) for n in (2, 3) if size % n == 0]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    value = np.asarray(rng.integers(0, 2**16, shape, np.int64)).astype(dtype)
    if draw(st.booleans()):
        value = np.array(value, order="F")
    return Entry(name, shape, dtype, draw(st.sampled_from(cuts))), value


@st.composite
def states(draw: st.DrawFn) -> State:
    names = draw(st.sets(st.sampled_from(_NAMES), min_size=1))
    return [draw(entry_values(name)) for name in sorted(names)]
