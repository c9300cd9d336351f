# SPDX-License-Identifier: Apache-2.0
"""Measures within seconds a device that the catalogue does not know.

Owns what is timed, how long that may take, and the node figures that follow. Does not
own which devices are probed, nor the cache of the results (`found_here.py`).
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.cluster.cluster import DEVICE_FIGURES, Precision
from hetjax.costs.roofline import Calibration
from hetjax.errors import BadInput
from hetjax.mesh.driver import driver_cards

PRECISIONS = get_args(Precision)  # the first is the easiest to train in, and fast
NETWORK_GBIT_PER_S = 10.0  # assumed: only a machine's peers could measure it
LIMIT_S = 20.0
_SAMPLE_S = 0.2  # each program is called repeatedly for this long
_CALLS_AT_ONCE = 2
_LEAST_S = 1e-9  # if the clock shows that no time has passed
_AS_GOOD = 0.7  # of the best rate is enough for a precision that is easier to train in
_MOST_OF_MEMORY = 1 / 8  # the largest share of memory that one array takes
_NEW = 8.0  # compute capability from which bf16 is on matrix units


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSizes:
    """Sizes of the products (rows and columns, in growing order), copies, messages."""

    product: tuple[int, ...] = (1024, 4096, 8192)
    copy_bytes: int = 256 << 20
    message_bytes: int = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The measured rates of one device.

    `tflops` is by precision, of products that are summed in fp32; `gb` are 1e9 bytes.
    `memory_gb_per_s` counts both the reads and the writes of a copy. `link_gb_per_s` is
    from one local device to the next, None if there is only one; `host_gb_per_s` is
    from the host to a device.
    """

    tflops: Mapping[str, float]
    memory_gib: float
    memory_gb_per_s: float
    host_gb_per_s: float
    link_gb_per_s: float | None = None
    seconds: float

    @property
    def precision(self) -> str:
        """The precision to train in: the first of `PRECISIONS` that is fast enough."""
        enough = _AS_GOOD * max(self.tflops.values())
        return next(p for p in PRECISIONS if self.tflops.get(p, 0.0) >= enough)

    def figures(self) -> dict[str, Any]:
        """Return a node's figures for such devices, by key of the cluster file.

        Costs use only a share of each data-sheet figure (`Calibration`). So each figure
        is the measured rate divided by that share.
        """
        share = Calibration()
        peak = self.tflops[self.precision] / share.matmul_efficiency
        return {
            "peak_tflops": _rounded(peak),
            "memory_gib": _rounded(self.memory_gib),
            "memory_gb_per_s": _rounded(self.memory_gb_per_s / share.memory_efficiency),
            "intra_node_gb_per_s": _rounded(self.link_gb_per_s or self.host_gb_per_s),
            "network_gbit_per_s": NETWORK_GBIT_PER_S,
            "precision": self.precision,
        }

    def __str__(self) -> str:
        products = ", ".join(f"{rate:.3g} {name}" for name, rate in self.tflops.items())
        link = self.link_gb_per_s
        between = "" if link is None else f", {link:.3g} between devices"
        return (
            f"measured TFLOP/s {products}; GB/s {self.memory_gb_per_s:.3g} in memory, "
            f"{self.host_gb_per_s:.3g} from the host{between}; {self.memory_gib:.3g} "
            f"GiB; in {self.seconds:.1f} s"
        )


def probe(
    devices: Sequence[jax.Device],
    memory_gib: float,
    *,
    sizes: ProbeSizes | None = None,
    limit_s: float = LIMIT_S,
) -> Probe:
    """Measure the first of some devices of one kind, and its link to the second.

    No product of matrices starts that is predicted to end after `limit_s`. Raises
    BadInput if not even one product of matrices can be timed.
    """
    sizes, start_s = sizes or ProbeSizes(), time.perf_counter()
    most_bytes = int(memory_gib * 2**30 * _MOST_OF_MEMORY)
    message_bytes = min(sizes.message_bytes, most_bytes)
    copy_bytes = min(sizes.copy_bytes, most_bytes)
    try:
        host_s = _message_s(None, devices[0], message_bytes)
        linked = len(devices) > 1
        link_s = _message_s(devices[0], devices[1], message_bytes) if linked else None
        copy_s = _copy_s(devices[0], copy_bytes)
        tflops = _tflops(devices[0], sizes.product, most_bytes, start_s + limit_s)
    except (RuntimeError, MemoryError) as error:
        raise _unmeasured(str(error).partition("\n")[0]) from error
    if not tflops:
        raise _unmeasured(f"no matrix product within {limit_s:g} s")
    return Probe(
        tflops=tflops,
        memory_gib=memory_gib,
        memory_gb_per_s=2e-9 * copy_bytes / copy_s,
        host_gb_per_s=1e-9 * message_bytes / host_s,
        link_gb_per_s=None if link_s is None else 1e-9 * message_bytes / link_s,
        seconds=time.perf_counter() - start_s,
    )


def memory_gib_of(device: Any) -> float | None:
    """Return the memory that a device or its driver reports; None if neither does.

    If the driver shows several cards of that name, return the least of theirs.
    """
    stats = None
    with suppress(RuntimeError, NotImplementedError, AttributeError):
        stats = device.memory_stats()
    if stats and stats.get("bytes_limit"):
        return stats["bytes_limit"] / _share_of_jax(device) / 2**30
    named = (c.memory_gib for c in driver_cards() if c.name == device.device_kind)
    return min(filter(None, named), default=None)


def _share_of_jax(device: Any) -> float:
    """Return the share of a GPU's memory that JAX takes and reports as its limit."""
    if device.platform not in ("gpu", "cuda", "rocm"):
        return 1.0
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        with suppress(KeyError, ValueError):
            return float(os.environ[name])
    return 0.75


def _tflops(
    device: jax.Device, sizes: Sequence[int], most_bytes: int, end_s: float
) -> dict[str, float]:
    """Return the best rate of each precision that is supported and that time allows.

    A product's time is predicted to grow with the cube of its size.
    """
    best: dict[str, float] = {}
    for name in _precisions_of(device):
        last_s, last = 0.0, sizes[0]
        for size in sizes:
            begin_s = time.perf_counter()
            foreseen_s = _SAMPLE_S + 3 * last_s * (size / last) ** 3
            if begin_s + foreseen_s > end_s or 3 * 4 * size**2 > most_bytes:
                break
            try:
                product_s = _product_s(device, name, size)
            except RuntimeError:
                break  # the device lacks this precision, as older ones lack bf16
            best[name] = max(best.get(name, 0.0), 2e-12 * size**3 / product_s)
            last_s, last = product_s, size
    return best


def _precisions_of(device: Any) -> tuple[str, ...]:
    """Return the precisions to time: no bf16 before compute capability 8.0.

    There bf16 is not on matrix units, and attention in it does not compile.
    """
    capability = str(getattr(device, "compute_capability", None) or _NEW)
    older = capability.replace(".", "").isdigit() and float(capability) < _NEW
    return PRECISIONS[1:] if older else PRECISIONS


def _product_s(device: jax.Device, precision: str, size: int) -> float:
    drawn = np.random.default_rng(0).standard_normal((size, size), np.float32)
    x = jax.device_put(drawn, device).astype(precision)

    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        return jnp.matmul(x, x, preferred_element_type=jnp.float32).astype(x.dtype)

    return _seconds(lambda: product(x))


def _copy_s(device: jax.Device, num_bytes: int) -> float:
    x = jax.device_put(np.zeros(num_bytes // 4, np.float32), device)
    read_and_write = jax.jit(lambda x: x + np.float32(1))
    return _seconds(lambda: read_and_write(x))


def _message_s(source: jax.Device | None, target: jax.Device, num_bytes: int) -> float:
    """Return the seconds of a message from `source`, or from the host if None."""
    message: Any = np.zeros(num_bytes // 4, np.float32)
    if source is not None:
        message = jax.device_put(message, source)
    return _seconds(lambda: jax.device_put(message, target))


def _seconds(call: Callable[[], jax.Array]) -> float:
    """Return seconds per call over many calls, after a first one that may compile."""
    jax.block_until_ready(call())
    start_s, num_calls, made = time.perf_counter(), 0, None
    while (spent_s := time.perf_counter() - start_s) < _SAMPLE_S or not num_calls:
        made = [call() for _ in range(_CALLS_AT_ONCE)]
        jax.block_until_ready(made)
        num_calls += _CALLS_AT_ONCE
    return max(spent_s, _LEAST_S) / num_calls


def _rounded(figure: float) -> float:
    return float(f"{figure:.3g}")


def _unmeasured(why: str) -> BadInput:
    return BadInput(
        got=f"a device that the catalogue lacks and that cannot be measured: {why}",
        allowed="a device that multiplies matrices within the time limit, or figures "
        "from its data sheet",
        fix="correct the reported problem, or give a --cluster file with its figures: "
        + ", ".join(f"{key} = ..." for key in DEVICE_FIGURES),
    )
