# SPDX-License-Identifier: Apache-2.0
"""Computes how sure an estimate of a device's memory is, and whether it fits.

Of a device's bytes, weights, gradients, optimizer state, residuals and messages are
exact. What the compiler needs besides, the workspace, is estimated
(`costs/workspace.py`). Owns the comparison of these estimates with what compilers
needed. Does not own the estimates, nor the rest of a device's memory, which no plan
fills (`cluster/catalogue.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetjax.cluster.catalogue import Backend

LEVEL = 0.90  # of an interval
_LOW, _HIGH = (1 - LEVEL) / 2, (1 + LEVEL) / 2

# What compilers needed as a share of the estimate: its 0th, 5th, 10th... percentile
# over stages of four models that were compiled for the devices of a backend
# (`experiments/results/memory_shares.json`). We asked no compiler about stages in
# which packing 16-bit weights takes more than any pass.
SHARES: Mapping[Backend, tuple[float, ...]] = {
    "cpu": (
        *(0.694, 0.805, 0.873, 0.897, 0.905, 0.916, 0.923, 0.931, 0.935, 0.937, 0.938),
        *(0.940, 0.942, 0.943, 0.944, 0.946, 0.949, 0.959, 0.968, 0.983, 0.999),
    ),
    "gpu": (
        *(0.328, 0.601, 0.631, 0.660, 0.683, 0.708, 0.735, 0.749, 0.763, 0.780, 0.798),
        *(0.809, 0.817, 0.822, 0.829, 0.838, 0.853, 0.878, 0.895, 0.934, 1.069),
    ),
    "tpu": (
        *(0.032, 0.530, 0.582, 0.670, 0.706, 0.738, 0.775, 0.785, 0.797, 0.802, 0.817),
        *(0.823, 0.834, 0.835, 0.837, 0.852, 0.868, 0.888, 0.911, 0.931, 1.043),
    ),
}
NUM_STAGES: Mapping[Backend, int] = {"cpu": 86, "gpu": 226, "tpu": 176}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCertainty:
    """A device's bytes: the interval, and the probability that they fit.

    `fits` is None if the device's memory is unknown. `backend` is None, and the bytes
    are certain, if the compiler itself reported the workspace.
    """

    backend: Backend | None
    low_bytes: float
    high_bytes: float
    fits: float | None


def memory_certainty(
    exact_bytes: float,
    workspace_bytes: float,
    has_bytes: float | None,
    backend: Backend | None,
    *,
    updating_bytes: float = 0.0,
) -> MemoryCertainty:
    """Return how sure `exact_bytes` and an estimated workspace are.

    `has_bytes` is what plans may use of the device; None if unknown. `backend` is that
    of the estimate; None if the compiler reported the workspace. The update takes
    `updating_bytes` in place of the workspace, if that is more.
    """
    if backend is None:
        total = exact_bytes + max(workspace_bytes, updating_bytes)
        fits = None if has_bytes is None else float(total <= has_bytes)
        return MemoryCertainty(
            backend=None, low_bytes=total, high_bytes=total, fits=fits
        )
    shares = SHARES[backend]
    quantiles = np.linspace(0, 1, len(shares))
    low, high = (
        exact_bytes + max(float(share) * workspace_bytes, updating_bytes)
        for share in np.interp((_LOW, _HIGH), quantiles, shares)
    )
    fits = None
    if has_bytes is not None:
        room_bytes = has_bytes - exact_bytes
        fits = float(room_bytes >= updating_bytes)
        if fits and workspace_bytes:
            one = 1 / (NUM_STAGES[backend] + 1)  # as close to certain as a count comes
            fits = np.interp(room_bytes / workspace_bytes, shares, quantiles)
            fits = float(np.clip(fits, one, 1 - one))
    return MemoryCertainty(backend=backend, low_bytes=low, high_bytes=high, fits=fits)
