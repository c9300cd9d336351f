# SPDX-License-Identifier: Apache-2.0
"""Simulated devices: several CPU devices in this process, set up before JAX starts.

Owns the settings that make them work well. Does not own which device is which node's.
"""

import ctypes
import os
import sys

import jax


def simulate_devices(count: int, *, only_cpu: bool = True) -> None:
    """Make JAX see `count` CPU devices, and accelerators too unless `only_cpu`.

    Has to be the first use of JAX in a process; RuntimeError otherwise.
    """
    threads = max(16, 4 * count)  # fewer than 2 a device can starve transfers and hang
    os.environ.setdefault("PJRT_NPROC", str(threads))
    jax.config.update("jax_num_cpu_devices", count)
    if only_cpu:
        jax.config.update("jax_platforms", "cpu")
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let the C library keep freed memory: no page faults on every fresh buffer.

    By default glibc gives large blocks back at once, and a step that makes many
    buffers pays for mapping them again (a tenth of a small step, measured). Arenas of
    threads give them back whatever is set, so that all threads share one (messages of
    64 MiB arrive at 2.5 instead of 1.5 GiB/s).
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8
    mallopt(arena_max, 1)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 256 << 20)
