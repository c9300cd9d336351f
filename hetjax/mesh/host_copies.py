# SPDX-License-Identifier: Apache-2.0
"""Copies of arrays from devices to the memory of their host, at the rate of the link.

A GPU writes pinned memory itself, and has all other memory written by the driver, from
a small pinned buffer: an H200 gave 49 and 1.5 GB/s (`experiments/results/gpu/`). NumPy
reads pinned memory where it lies. Owns this way. Does not own what is copied, nor how
long it is kept: pinned memory counts against a limit of JAX's (64 GiB of a process).
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jax
import numpy as np

_PINNED = "pinned_host"  # JAX's word for it
_PLATFORMS = ("gpu",)  # on TPUs this was not measured
_AT_ONCE = 4  # copies from pinned memory: new pages take longer than what fills them


def start_copy(x: jax.Array) -> jax.Array:
    """Start copying an array to its host; return the one to read there.

    Same values, dtype and shards. `np.asarray` of it, or of its shards, waits for the
    copy. Meant to be read soon and dropped.
    """
    if x.is_fully_addressable and all(map(_is_pinned_faster, x.devices())):
        return jax.device_put(x, x.sharding.with_memory_kind(_PINNED))
    x.copy_to_host_async()
    return x


def host_copies(arrays: Iterable[jax.Array]) -> Iterator[np.ndarray]:
    """Copies of whole arrays in memory of their own, in order; waits for the devices.

    A few at a time are in pinned memory.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(host_copy, arrays)


def host_copy(x: jax.Array) -> np.ndarray:
    """A copy of a whole array in memory of its own; waits for the devices."""
    return np.array(start_copy(x))


@cache
def _is_pinned_faster(device: jax.Device) -> bool:
    kinds = {memory.kind for memory in device.addressable_memories()}
    return device.platform in _PLATFORMS and _PINNED in kinds
