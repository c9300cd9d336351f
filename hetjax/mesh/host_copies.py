# SPDX-License-Identifier: Apache-2.0
"""Copies arrays from devices to the memory of their host, at the rate of the link.

A GPU writes pinned memory itself; the driver writes all other memory, from a small
pinned buffer. An H200 gave 49 and 1.5 GB/s (`experiments/results/gpu/`). NumPy reads
pinned memory in place. Owns the use of pinned memory. Does not own what is copied, nor
how long it is kept: pinned memory counts against a limit of JAX (64 GiB per process).
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jax
import numpy as np

_PINNED = "pinned_host"  # JAX's word for it
_PLATFORMS = ("gpu",)  # not measured on TPUs
_AT_ONCE = 4  # copies from pinned memory: to get pages takes longer than to fill them


def start_copy(x: jax.Array) -> jax.Array:
    """Start copying an array to its host; return the array to read there.

    It has the same values, dtype and shards. `np.asarray` of it, or of its shards,
    waits for the copy. Read it soon, and drop it.
    """
    if x.is_fully_addressable and all(map(_is_pinned_faster, x.devices())):
        return jax.device_put(x, x.sharding.with_memory_kind(_PINNED))
    x.copy_to_host_async()
    return x


def host_copies(arrays: Iterable[jax.Array]) -> Iterator[np.ndarray]:
    """Yield copies of whole arrays, in order, that share no memory; waits for devices.

    Only a few at a time are in pinned memory.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(host_copy, arrays)


def host_copy(x: jax.Array) -> np.ndarray:
    """Return a copy of a whole array that shares no memory; waits for the devices."""
    return np.array(start_copy(x))


@cache
def _is_pinned_faster(device: jax.Device) -> bool:
    kinds = {memory.kind for memory in device.addressable_memories()}
    return device.platform in _PLATFORMS and _PINNED in kinds
