# SPDX-License-Identifier: Apache-2.0
"""Defines small programs whose times measure a device: products, copies, launches.

All use random data: zeros use less power, and are faster. Each function returns
seconds.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from experiments.gpu.timing.clock import median_s

PINNED = "pinned_host"  # JAX's name for host memory that a device reads itself
HOST_TO_DEVICE_PINNED = "host to device by way of pinned memory"
DEVICE_TO_HOST_PINNED = "device to host by way of pinned memory"
_AT_ONCE = 8  # programs that are queued
_CHAINS = 8, 72  # kernels of two programs; their difference is kernels alone
# in XLA's text an operation stands before its operands
_KERNEL = re.compile(r"\s(?:fusion|custom-call|dot)\(")
_RUN = "ENTRY", "%command_buffer"
_ROWS = 128  # of a product that takes hardly more than its launch


def product_s(
    device: jax.Device, rows: int, columns: int, depth: int, dtype: str, pairs: int
) -> float:
    """Return the seconds of one product in a chain of `pairs` there and back.

    A pair is a product of `depth` x `columns`, then one of `columns` x `depth`, as in
    an MLP. Both need the same arithmetic, and each needs the result of the one before.
    """
    x, there, back = (
        normal(device, shape, dtype, at)
        for at, shape in enumerate([(rows, depth), (depth, columns), (columns, depth)])
    )

    @jax.jit
    def chain(x: Any, there: Any, back: Any) -> jax.Array:
        for _ in range(pairs):
            x = (x @ there) @ back
        return x

    program_s = median_s(partial(chain, x, there, back), at_once=_AT_ONCE)
    return program_s / (2 * pairs)


def copy_s(device: jax.Device, num_bytes: int) -> float:
    """Return the seconds in which `num_bytes` are read, and as many written."""
    x = normal(device, (num_bytes // 4,), "float32")
    return median_s(partial(jax.jit(lambda x: x + jnp.float32(1)), x), at_once=_AT_ONCE)


def idle_program_s(device: jax.Device, at_once: int) -> float:
    """Return the seconds of a program with almost no work."""
    x = normal(device, (), "float32")
    return median_s(partial(jax.jit(lambda x: x + jnp.float32(1)), x), at_once=at_once)


def kernel_s(device: jax.Device) -> float:
    """Return the seconds that one more small kernel adds to a program.

    The kernels are products of 128 x 128, each of which needs the one before. No
    compiler fuses two of them, but it may split one into two.
    """
    x, y = (normal(device, (_ROWS, _ROWS), "float32", at) for at in range(2))

    def chain(number: int, x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(number):
            x = x @ y
        return x

    few, many = (
        jax.jit(partial(chain, number)).lower(x, y).compile() for number in _CHAINS
    )
    few_s, many_s = (
        median_s(partial(program, x, y), at_once=_AT_ONCE) for program in (few, many)
    )
    num_kernels = count_kernels(many.as_text()) - count_kernels(few.as_text())
    return max(many_s - few_s, 0.0) / max(num_kernels, 1)


def count_kernels(text: str | None) -> int:
    """Return how many kernels a compiled program runs, by its text.

    Counts those of its entry, and those that XLA has a GPU launch as one graph.
    """
    computations = (text or "").split("\n\n")
    run = (c for c in computations if c.lstrip().startswith(_RUN))
    return sum(len(_KERNEL.findall(computation)) for computation in run)


def host_copies(device: jax.Device, num_bytes: int) -> dict[str, Callable[[], float]]:
    """Return a function that times a copy of `num_bytes`, by the copy's direction.

    Pinned memory is included only where the device lists it. On the way through it to
    the device, an array of NumPy is copied on the host, too. On the way back it is not:
    NumPy then reads pinned memory itself.
    """
    at_home = np.random.default_rng(0).standard_normal(num_bytes // 4, np.float32)
    own = SingleDeviceSharding(device)
    add = jax.jit(lambda x: x + jnp.float32(1))
    x = jax.device_put(at_home, own)
    ways: dict[str, Callable[[], float]] = {
        "host to device": lambda: median_s(lambda: jax.device_put(at_home, own)),
        # an array keeps its copy on the host: each is read once
        "device to host": lambda: median_s(np.asarray, lambda: (add(x),)),
    }
    if PINNED in {memory.kind for memory in device.addressable_memories()}:
        pinned = SingleDeviceSharding(device, memory_kind=PINNED)
        there = jax.device_put(x, pinned)
        ways["pinned host to device"] = lambda: median_s(
            lambda: jax.device_put(there, own)
        )
        ways["device to pinned host"] = lambda: median_s(
            lambda: jax.device_put(x, pinned)
        )
        ways[HOST_TO_DEVICE_PINNED] = lambda: median_s(
            lambda: jax.device_put(jax.device_put(at_home, pinned), own)
        )
        ways[DEVICE_TO_HOST_PINNED] = lambda: median_s(
            lambda x: np.asarray(jax.device_put(x, pinned)), lambda: (add(x),)
        )
    return ways


def normal(
    device: jax.Device, shape: tuple[int, ...], dtype: str, seed: int = 0
) -> jax.Array:
    """Return random numbers, scaled so that products keep their size."""
    scale = shape[0] ** -0.5 if len(shape) > 1 else 1.0
    with jax.default_device(device):
        drawn = jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))
        return jax.block_until_ready(
            jax.device_put(drawn * jnp.asarray(scale, dtype), device)
        )
