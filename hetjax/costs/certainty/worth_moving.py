# SPDX-License-Identifier: Apache-2.0
"""Decides whether a move to another plan is worth its cost, and measures the gain.

A gain is the speed-up of steps, a cost the seconds until the run continues. Both are
uncertain, with logarithms that are normal and independent. Owns the odds, and the
comparison of two samples of measured steps. Does not own the predictions
(`training/replanning/weighing.py`) nor their use (`training/replanning/`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from hetjax.costs.certainty.beliefs import CredibleInterval, lognormal

LEVEL = 0.9  # the confidence with which a run moves
_QUANTILES = 999  # of the cost: the odds are averaged over them
_NORMAL = NormalDist()
_COSTS = [_NORMAL.inv_cdf((n + 0.5) / _QUANTILES) for n in range(_QUANTILES)]
_OF_NORMAL = 1.4826  # standard deviations in a median absolute deviation
_OF_MEDIAN = 1.2533  # standard errors of a median in those of a mean
_LEAST_SIGMA = 0.01  # of the logarithm of one step: a few may agree by chance


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A move from the present plan to another one.

    `gain` is a step's time under the present plan over that under the other one.
    `cost_s` is the time of the move. A step takes `step_s` under the present plan, and
    `num_steps` remain.
    """

    gain: CredibleInterval
    cost_s: CredibleInterval
    step_s: float
    num_steps: int

    @property
    def saved_s(self) -> float:
        """The seconds saved over the remaining steps, at the median."""
        return self.step_s * self.num_steps * (1 - 1 / self.gain.median)

    @property
    def probability(self) -> float:
        """The probability that the remaining steps save more than the move costs.

        For a given cost it is a tail of the gain's distribution: n t (1 - 1/G) > C if
        and only if log G > -log(1 - C/(n t)). The mean is over quantiles of the cost.
        """
        left_s = self.step_s * self.num_steps
        sigma, center = self.cost_s.sigma, math.log(self.cost_s.median)
        odds = [
            self._odds(math.exp(center + sigma * z) / left_s if left_s else math.inf)
            for z in _COSTS
        ]
        return sum(odds) / len(odds)

    def _odds(self, share: float) -> float:
        """Return the probability for a cost of this share of the remaining time."""
        if share >= 1:
            return 0.0
        beyond = math.log(self.gain.median) + math.log1p(-share)
        if not self.gain.sigma:
            return float(beyond > 0)
        return _NORMAL.cdf(beyond / self.gain.sigma)

    @property
    def is_worth_it(self) -> bool:
        return self.probability >= LEVEL


def measured_gain(
    before_s: Sequence[float], after_s: Sequence[float]
) -> CredibleInterval:
    """Return the measured speed-up of steps, from medians and their standard errors."""
    one, other = (_center_and_error(times) for times in (before_s, after_s))
    variance = one[1] ** 2 + other[1] ** 2
    return lognormal(math.exp(one[0] - other[0]), variance)


def _center_and_error(times_s: Sequence[float]) -> tuple[float, float]:
    """Return the median of the logarithms, and its standard error."""
    logs = [math.log(time_s) for time_s in times_s]
    center = median(logs)
    sigma = _OF_NORMAL * median(abs(log - center) for log in logs)
    return center, _OF_MEDIAN * max(sigma, _LEAST_SIGMA) / math.sqrt(len(logs))
