# SPDX-License-Identifier: Apache-2.0
"""Sums and rounds long arrays on the host, on all cores of this process.

Owns the split of elements over threads, in blocks that stay in a core's cache while all
contributions are added: NumPy adds and converts without the interpreter's lock.
Elements are added in the order of the contributions, so the bits do not depend on the
number of cores. Does not own who sums what (`reduction.py`).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

_FULL = np.dtype(np.float32)
_BLOCK = 1 << 17  # elements
_ALONE = 2 * _BLOCK  # elements: up to here another thread costs what it saves

Work = Callable[[int, int], None]  # on the elements from .. to ..


def added(parts: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
    """Return the fp32 sum of flat arrays of equal length, added in their order.

    `out` receives the sum: fresh memory, or one of the first two parts, which is then
    overwritten, if both are fp32. Without `out` the sum is a new array.
    """
    found = np.empty(parts[0].shape, _FULL) if out is None else out

    def add(begin: int, end: int) -> None:
        room = np.empty(min(_BLOCK, end - begin), _FULL)
        for at in range(begin, end, _BLOCK):
            block = slice(at, min(at + _BLOCK, end))
            _add(found[block], [part[block] for part in parts], room[: end - at])

    dealt_out(found.size, add)
    return found


def rounded(values: np.ndarray, to: np.dtype) -> np.ndarray:
    """Return a flat fp32 array in another dtype, rounded to nearest, ties to even.

    Returns the array itself if it has that dtype.
    """
    if values.dtype == to:
        return values
    found = np.empty(values.shape, to)

    def cast(begin: int, end: int) -> None:
        np.copyto(found[begin:end], values[begin:end], casting="same_kind")

    dealt_out(values.size, cast)
    return found


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the concatenation of flat arrays, in fp32."""
    ends = np.cumsum([part.size for part in parts])
    found = np.empty(ends[-1], _FULL)
    for part, end in zip(parts, ends, strict=True):
        added([part], found[end - part.size : end])
    return found


def num_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _add(target: np.ndarray, parts: Sequence[np.ndarray], room: np.ndarray) -> None:
    """Add one block; `target` may be one of the first two parts."""
    first, *rest = parts
    if rest and first.dtype == rest[0].dtype == _FULL:
        np.add(first, rest.pop(0), out=target)
    else:
        np.copyto(target, first)
    for part in rest:
        if part.dtype != _FULL:
            np.copyto(room, part)
            part = room
        np.add(target, part, out=target)


def dealt_out(num_elements: int, work: Work) -> None:
    """Do the work on all elements, an equal part on each core."""
    cores = num_cores()
    if num_elements <= _ALONE or cores == 1:
        work(0, num_elements)
        return
    ends = [num_elements * i // cores for i in range(cores + 1)]
    list(_threads(cores).map(work, ends[:-1], ends[1:]))


@cache
def _threads(cores: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores, thread_name_prefix="host-sum")
