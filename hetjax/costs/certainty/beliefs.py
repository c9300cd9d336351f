# SPDX-License-Identifier: Apache-2.0
"""Defines beliefs about the parameters of the model of time, and how they are updated.

Beliefs are a normal distribution over the logarithms of speeds. The logarithm of a time
is assumed to be linear in them, with the elasticities as slopes. So an interval's width
is a square root, measurements update beliefs in closed form, and the ratio of two times
that depend on the same speeds is known better than either time. Owns this arithmetic
(our derivation; textbook Bayesian linear regression). Does not own the widths before
any run (`priors.py`) nor the slopes (`elasticities.py`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.elasticities import (
    OVERHEAD,
    SOFTWARE,
    Elasticities,
    Parameter,
    at_speed,
    parameters_of,
)
from hetjax.costs.certainty.priors import NOISE, width

Measured = Literal["step", "work", "sum"]
MEASURED: tuple[Measured, ...] = get_args(Measured)
Floats = NDArray[np.float64]
_NORMAL = {0.5: 0.6745, 0.8: 1.2816, 0.9: 1.6449, 0.95: 1.96}  # two-sided quantiles


@dataclass(frozen=True, kw_only=True, slots=True)
class CredibleInterval:
    """A range that holds the true value with probability `level`, and its median."""

    low: float
    median: float
    high: float
    level: float = 0.9

    @property
    def factor(self) -> float:
        """The factor from the low end to the median, and from there to the high end."""
        return self.high / self.median

    @property
    def sigma(self) -> float:
        """The standard deviation of the value's logarithm."""
        return math.log(self.factor) / _NORMAL[self.level]

    def widened(self, sigma: float) -> "CredibleInterval":
        """Return the interval with an additional, independent deviation `sigma`."""
        return lognormal(self.median, self.sigma**2 + sigma**2, self.level)

    def as_factor(self) -> str:
        """Return the speed-up as text for people.

        >>> CredibleInterval(low=1.18, median=1.31, high=1.44).as_factor()
        '1.31x (1.18 to 1.44)'
        """
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A measured time and its prediction.

    `what` tells what was measured: a step, the work of one kind of device in a step, or
    a sum over devices alone. `noise` is the standard deviation of the time's logarithm
    that no parameter explains. `plan` is a digest of a step's plan, empty if unknown.
    """

    measured_s: float
    predicted_s: float
    elasticities: Elasticities
    noise: float
    what: Measured = "step"
    plan: str = ""

    @property
    def surprise(self) -> float:
        """The logarithm of the measured time over the predicted one."""
        return math.log(self.measured_s / self.predicted_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class Beliefs:
    """Means and covariances of log(speed) by parameter; mean 0 is as modelled.

    `noise` is the standard deviation of the logarithm of one run's time that no
    parameter explains.
    """

    parameters: tuple[Parameter, ...]
    mean_P: Floats
    covariance_PP: Floats
    noise: float

    def interval(
        self, time_s: float, slopes: Elasticities, level: float = 0.9
    ) -> CredibleInterval:
        """Return the interval of a time that was predicted at the means."""
        slope_P = self._slopes(slopes)
        variance = float(slope_P @ self.covariance_PP @ slope_P) + self.noise**2
        return lognormal(time_s, variance, level)

    def ratio(
        self,
        one: tuple[float, Elasticities],
        other: tuple[float, Elasticities],
        level: float = 0.9,
    ) -> CredibleInterval:
        """Return the interval of one predicted time over another.

        Equal slopes cancel. Noise counts in proportion to the difference of the slopes:
        two plans with the same slopes are assumed to have the same error.
        """
        slope_P = self._slopes(one[1]) - self._slopes(other[1])
        apart = min(1.0, float(np.abs(slope_P).sum()))
        variance = float(slope_P @ self.covariance_PP @ slope_P)
        variance += 2 * apart * self.noise**2
        return lognormal(one[0] / other[0], variance, level)

    def observed(self, observations: Iterable[Observation]) -> "Beliefs":
        """Return the beliefs after these observations.

        Their predictions must have been made at the means of these beliefs.
        """
        seen = list(observations)
        if not seen:
            return self
        slope_NP = -np.array([self._slopes(o.elasticities) for o in seen])
        surprise_N = np.array([o.surprise for o in seen])
        noise_NN = np.diag([o.noise**2 for o in seen])
        gain_PN = np.linalg.solve(
            slope_NP @ self.covariance_PP @ slope_NP.T + noise_NN,
            slope_NP @ self.covariance_PP,
        ).T
        return replace(
            self,
            mean_P=self.mean_P + gain_PN @ surprise_N,
            covariance_PP=self.covariance_PP - gain_PN @ slope_NP @ self.covariance_PP,
        )

    def misfit(self, observations: Iterable[Observation]) -> float:
        """Return the root mean square of what these beliefs leave unexplained of some
        observations, in units of their noise."""
        off = [
            (o.surprise + float(self._slopes(o.elasticities) @ self.mean_P)) / o.noise
            for o in observations
        ]
        return math.sqrt(sum(each**2 for each in off) / len(off))

    def with_noise(self, noise: float) -> "Beliefs":
        """Return the same beliefs with other noise."""
        return replace(self, noise=noise)

    def speed(self, parameter: Parameter) -> CredibleInterval:
        """Return the interval of one speed."""
        i = self.parameters.index(parameter)
        return lognormal(math.exp(self.mean_P[i]), self.covariance_PP[i, i], 0.9)

    def applied(self, cluster: Cluster) -> Cluster:
        """Return the cluster at the means, for which plans are made and predicted.

        Slower software slows down every kind of work, except times that a profile has
        measured, which already include the software. The overhead of a step is spread
        over all its work, which takes longer by that factor.
        """
        means = dict(zip(self.parameters, self.mean_P, strict=True))
        factors = {
            parameter: math.exp(
                means[OVERHEAD]
                + means[parameter]
                + (parameter[1] != "layers") * means[SOFTWARE]
            )
            for parameter in parameters_of(cluster)
        }
        faster = ((p, f) for p, f in factors.items() if f != 1.0)
        return reduce(lambda c, pair: at_speed(c, *pair), faster, cluster)

    def _slopes(self, slopes: Elasticities) -> Floats:
        unknown = slopes.keys() - {*self.parameters}
        assert not unknown, unknown
        return np.array([slopes.get(p, 0.0) for p in self.parameters])


def prior_beliefs(
    cluster: Cluster, noise: float = NOISE, others: Iterable[Parameter] = ()
) -> Beliefs:
    """Return the beliefs about a cluster's devices and links before any run.

    They include `others`, parameters that are not in this cluster.
    """
    every = (OVERHEAD, SOFTWARE, *parameters_of(cluster), *others)
    parameters = tuple(dict.fromkeys(every))
    return Beliefs(
        parameters=parameters,
        mean_P=np.zeros(len(parameters)),
        covariance_PP=_covariances(parameters),
        noise=noise,
    )


def _covariances(parameters: Sequence[Parameter]) -> Floats:
    """Return covariances: all kinds of device share the common part of a speed."""
    widths = [width(parameter) for parameter in parameters]
    common_P = np.array([w.common for w in widths])
    alike_PP = np.array([[a[1] == b[1] for b in parameters] for a in parameters])
    own_P = np.array([w.own for w in widths])
    return np.outer(common_P, common_P) * alike_PP + np.diag(own_P**2)


def lognormal(median: float, variance: float, level: float = 0.9) -> CredibleInterval:
    """Return the interval of a value whose logarithm has this variance."""
    factor = math.exp(_NORMAL[level] * math.sqrt(variance))
    return CredibleInterval(
        low=median / factor, median=median, high=median * factor, level=level
    )
