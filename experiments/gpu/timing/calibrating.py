# SPDX-License-Identifier: Apache-2.0
"""Fits the constants that costs use to measured times.

Owns the fit, in the form that `hetjax/costs/roofline.py` reads. Does not own the times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from hetjax.costs.roofline import Calibration, attention_share, product_share

_FIRST = (0.8, 64.0)  # initial values of the search: efficiency and half size
_OUTLIER = 0.1  # relative errors above this count less than by their square


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedProduct:
    """The seconds of a kernel of `number` products of sizes (batch, m, n, k).

    A kernel of attention has several products: each is a product of all scores.
    """

    sizes: tuple[int, int, int, int]
    seconds: float
    number: float = 1.0

    @property
    def flops(self) -> float:
        return 2 * math.prod(self.sizes) * self.number

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


def fitted_products(
    products: Sequence[TimedProduct], peak_flops_per_s: float, launch_s: float
) -> Calibration:
    """Return the efficiency and half size that fit the times best.

    The fit uses relative errors, so small products count as much as large ones. The
    launch is at most the shortest time.
    """
    assert len(products) > 1, "two constants need two products"
    launch_s = min(launch_s, *(product.seconds for product in products))

    def errors(logarithms: np.ndarray) -> list[float]:
        constants = _constants(logarithms, launch_s)
        return [
            math.log(_seconds(product, constants, peak_flops_per_s) / product.seconds)
            for product in products
        ]

    found = least_squares(errors, np.log(_FIRST), loss="soft_l1", f_scale=_OUTLIER)
    return _constants(found.x, launch_s)


def attention_efficiency(
    passes: Sequence[TimedProduct], peak_flops_per_s: float, known: Calibration
) -> float:
    """Return the share of the peak that the largest attention would reach.

    Half sizes and launch are those of `known`.
    """
    whole = replace(known, attention_efficiency=1.0)
    logarithms = []
    for timed in passes:
        _, length, _, head_size = timed.sizes
        busy_s = timed.seconds - min(known.launch_s, timed.seconds / 2)
        rate = peak_flops_per_s * attention_share(length, head_size, whole)
        logarithms.append(math.log(timed.flops / busy_s / rate))
    return math.exp(float(np.median(logarithms)))


def _constants(logarithms: np.ndarray, launch_s: float) -> Calibration:
    efficiency, half_size = map(float, np.exp(logarithms))
    return Calibration(
        matmul_efficiency=efficiency, half_size=half_size, launch_s=launch_s
    )


def _seconds(
    product: TimedProduct, constants: Calibration, peak_flops_per_s: float
) -> float:
    rate = peak_flops_per_s * product_share(product.sizes, constants)
    return constants.launch_s + product.flops / rate
