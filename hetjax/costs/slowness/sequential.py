# SPDX-License-Identifier: Apache-2.0
"""Tests sequentially from which step on a series lies higher than before.

The test is Page's CUSUM (1954) of log-likelihood ratios, for two normal distributions
that differ by `SHIFT`. Each value x adds

    g(x) = clip(SHIFT / sigma^2 * (x - SHIFT / 2 - margin), -CAP, CAP) - toll

to a sum that never falls below zero; the test alarms at `limit`. If E[exp(g)] <= 1 as
long as nothing has changed, exp of the sum started at any step is a supermartingale. So
the probability that this sum ever reaches the limit is at most exp(-limit) (Ville), and
the mean number of steps between false alarms is at least exp(limit) (Lorden 1971,
theorem 2). For normal values without `CAP` this expectation is 1. Times have heavy
tails: a pause of the host makes one step many sigmas long. `CAP` bounds what one step
can add, so an alarm takes at least limit / CAP slow steps. If a share `OUTLIERS` of all
steps adds all of CAP, the expectation stays below 1 with
toll = log(1 + OUTLIERS (exp(CAP) - 1)). `margin` is the standard error of the
reference's median of n values: 1.25 sigma / sqrt(n).

After the change a step adds about (SHIFT / sigma)^2 / 2 - toll, at most CAP - toll.
With `limit` = log(1e7 * tests), the test finds a drift of 1.25 in 7 to 8 steps if
sigma <= 0.05, and in about 10 if sigma is 0.1; with larger variation it takes longer.
Owns this arithmetic, for many series at once. Does not own the series.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHIFT = math.log(1.25)  # the least drift to detect
CAP, OUTLIERS = 3.0, 0.02
STEPS_BETWEEN_FALSE_ALARMS = 1e7  # at least, of all series together
LEAST_SIGMA = 0.02
_TOLL = math.log(1 + OUTLIERS * math.expm1(CAP))
_OF_NORMAL = 1.4826  # standard deviations in a median absolute deviation
_ABOVE = 0.8413  # share of a normal distribution below one standard deviation
_WIDENED, _MOST_WIDENED = 1.2, 40  # times
_WINSOR = 2.5  # standard deviations at which outliers are clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The usual values of K series: medians and scales over n steps."""

    center_K: Floats
    sigma_K: Floats
    num_steps: int

    @property
    def margin_K(self) -> Floats:
        """The standard errors of the medians."""
        return 1.25 * self.sigma_K / math.sqrt(self.num_steps)

    def error(self, tests: Sequence[int], num_steps: int) -> float:
        """Return the standard error of a shift over `num_steps` later steps."""
        sigma = float(self.sigma_K[[*tests]].max())
        return 1.25 * sigma * math.sqrt(1 / self.num_steps + 1 / num_steps)

    def gain(self, rise: Floats, shift_K: Floats | float = SHIFT) -> Floats:
        """Return g of differences to the usual values; 0 for non-finite values."""
        shift_K = np.asarray(shift_K)
        beyond = rise - shift_K / 2 - self.margin_K
        clipped = np.clip(shift_K / self.sigma_K**2 * beyond, -CAP, CAP)
        return np.where(np.isfinite(clipped), clipped - _TOLL, 0.0)


def reference(series_NK: Floats) -> Reference:
    """Return robust centers and scales; scales err on the wide side.

    A scale is the largest of three: the median absolute deviation, which may be small
    by chance for few steps; the deviation with outliers clipped; and the distance above
    the center that 16 % of the steps exceed, as series may be skewed. The scale is then
    widened until the premise of the test holds for these steps.
    """
    num_steps = len(series_NK)
    center_K = np.median(series_NK, axis=0)
    off_NK = series_NK - center_K
    mad_K = _OF_NORMAL * np.median(np.abs(off_NK), axis=0)
    above_K = np.quantile(off_NK, _ABOVE, axis=0)
    wide_K = np.maximum(np.maximum(mad_K, above_K), LEAST_SIGMA)
    near_NK = np.clip(off_NK, -_WINSOR * wide_K, _WINSOR * wide_K)
    near_K = np.sqrt(np.mean(near_NK**2, axis=0))
    wider = 1 + 1 / math.sqrt(num_steps)
    sigma_K = wider * np.maximum(wide_K, near_K)
    found = Reference(center_K=center_K, sigma_K=sigma_K, num_steps=num_steps)
    return _kept_to(off_NK, found)


def _kept_to(off_NK: Floats, found: Reference) -> Reference:
    """Widen scales until E[exp(g)] <= 1 holds for the reference's own steps."""
    for _ in range(_MOST_WIDENED):
        up_K, down_K = (
            np.mean(np.exp(found.gain(off)), axis=0) for off in (off_NK, -off_NK)
        )
        is_beyond_K = np.maximum(up_K, down_K) > 1
        if not is_beyond_K.any():
            break
        sigma_K = np.where(is_beyond_K, _WIDENED * found.sigma_K, found.sigma_K)
        found = replace(found, sigma_K=sigma_K)
    return found


@dataclass(slots=True)
class Cusum:
    """Sums of K tests for a rise, and the steps at which they began to grow."""

    num_tests: int
    sum_K: Floats = field(init=False)
    since_K: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.sum_K = np.zeros(self.num_tests)
        self.since_K = np.zeros(self.num_tests, np.int64)

    @property
    def limit(self) -> float:
        return math.log(STEPS_BETWEEN_FALSE_ALARMS * self.num_tests)

    def add(
        self, at: int, rise_K: Floats, against: Reference, shift_K: Floats | float
    ) -> NDArray[np.bool_]:
        """Add the differences of step `at` to the usual values; return the alarms.

        Values that are not finite do not count.
        """
        gain_K = against.gain(rise_K, shift_K)
        self.since_K = np.where(self.sum_K <= 0, at, self.since_K)
        self.sum_K = np.maximum(0.0, self.sum_K + gain_K)
        return self.sum_K >= self.limit

    def clear(self, tests: NDArray[Any] | Sequence[int] | int) -> None:
        """Restart these tests, given as indices or a mask."""
        self.sum_K[tests] = 0.0
