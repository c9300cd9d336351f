# SPDX-License-Identifier: Apache-2.0
"""Whether another plan gains more than it costs to move to it, and whether it did.

A gain is how many times as fast steps become, a cost the seconds until the run goes on;
both are uncertain, with logarithms that are normal and independent. Owns the odds, and
what two samples of measured steps say. Does not own who predicts
(`training/replanning/weighing.py`) nor what follows (`training/replanning/`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from hetjax.costs.certainty.beliefs import CredibleInterval, lognormal

LEVEL = 0.9  # the confidence with which a run moves
_QUANTILES = 999  # of the cost, over which the odds are averaged
_NORMAL = NormalDist()
_COSTS = [_NORMAL.inv_cdf((n + 0.5) / _QUANTILES) for n in range(_QUANTILES)]
_OF_NORMAL = 1.4826  # standard deviations in a median absolute deviation
_OF_MEDIAN = 1.2533  # standard errors of a median in those of a mean
_LEAST_SIGMA = 0.01  # of the logarithm of one step: few may be alike by chance


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """`gain` is the time of a step by the plan of now over that by the other, `cost_s`
    what the move takes; a step takes `step_s` now, and `num_steps` are to come."""

    gain: CredibleInterval
    cost_s: CredibleInterval
    step_s: float
    num_steps: int

    @property
    def saved_s(self) -> float:
        """Seconds that the steps to come are shorter by, at the median."""
        return self.step_s * self.num_steps * (1 - 1 / self.gain.median)

    @property
    def probability(self) -> float:
        """The probability that the steps to come save more than the move costs.

        Given the cost, that is a tail of the gain's distribution: n t (1 - 1/G) > C if
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
        """The same for a cost that is this share of the time to come."""
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
    """Return how many times as fast steps have become: medians, and their errors."""
    one, other = (_center_and_error(times) for times in (before_s, after_s))
    variance = one[1] ** 2 + other[1] ** 2
    return lognormal(math.exp(one[0] - other[0]), variance)


def _center_and_error(times_s: Sequence[float]) -> tuple[float, float]:
    """The median of logarithms, and its standard error."""
    logs = [math.log(time_s) for time_s in times_s]
    center = median(logs)
    sigma = _OF_NORMAL * median(abs(log - center) for log in logs)
    return center, _OF_MEDIAN * max(sigma, _LEAST_SIGMA) / math.sqrt(len(logs))
