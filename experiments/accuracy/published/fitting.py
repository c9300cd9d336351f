# SPDX-License-Identifier: Apache-2.0
"""Fits speeds to errors on published runs, leaving one family of runs out in turn.

Owns the fit. The logarithm of measured over predicted time is a sum of slopes times
errors of speeds, plus an offset of the family and noise. The error of a speed has three
parts: one common to all rows, one of the kind of device, and one of the family
(framework and hardware). All are normal; their widths maximise the marginal likelihood
of the rows times a prior of the widths. Does not own predictions (`predicting.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

Floats = NDArray[np.float64]

SPEEDS = ("products", "attention", "memory", "launches", "links", "network")
_ROWS = 24  # the most of a family that the fit uses: families then count about equally
_NORMAL_90 = 1.6449
_APART = 0.03  # rows that are nearer have no order: measurements vary by as much
# Prior widths of each speed: common, of a family, of a kind. Products cannot be much
# faster than 80 % of a peak. Attention, and launches of uncompiled programs, are much
# less certain.
_COMMON = (0.07, 0.4, 0.15, 1.0, 0.3, 0.3)
_FAMILY = (0.1, 0.25, 0.2, 1.0, 0.6, 0.4)
_KIND = (0.07, 0.2, 0.1, 0.3, 0.25, 0.2)
_SOFTWARE, _NOISE = 0.1, 0.07
_SURE = np.array([0.2] * 18 + [0.5] * 2)  # prior widths of the logarithms of the above


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """N rows: logarithms of measured over predicted, slopes by speed, and groups.

    `cost_N` is the logarithm of the measured seconds of all devices per token.
    """

    families: tuple[str, ...]
    surprise_N: Floats
    slope_NS: Floats
    family_N: NDArray[np.int64]
    kind_N: NDArray[np.int64]
    model_N: NDArray[np.int64]
    cost_N: Floats

    def part(self, index_M: NDArray[np.int64]) -> "Rows":
        return Rows(
            families=self.families,
            surprise_N=self.surprise_N[index_M],
            slope_NS=self.slope_NS[index_M],
            family_N=self.family_N[index_M],
            kind_N=self.kind_N[index_M],
            model_N=self.model_N[index_M],
            cost_N=self.cost_N[index_M],
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """How well the other families predict this family.

    Errors are means of |predicted / measured - 1|, by the catalogue and as learnt from
    the others. `covered` is the share of rows in their 90 % intervals. The median
    interval is from prediction / `factor` to prediction x `factor`. `ratios_covered`
    and `ratios_factor` are the same for ratios of two rows. `ordered` and
    `learnt_ordered` are the shares of pairs of rows of one model, more than `_APART`
    apart, of which the prediction finds the one that needs fewer device-seconds per
    token; None without such pairs.
    """

    name: str
    rows: int
    least: float
    median: float
    most: float
    below_one: int
    error: float
    learnt_error: float
    covered: float
    factor: float
    ratios_covered: float
    ratios_factor: float
    ordered: float | None
    learnt_ordered: float | None


def leave_one_out(rows: Rows) -> list[Family]:
    """Judge every family by the prediction from the others."""
    found = []
    for family in range(len(rows.families)):
        is_left_out = rows.family_N == family
        widths = _fitted(_thinned(rows.part(np.flatnonzero(~is_left_out))))
        found.append(_judged(rows, family, widths))
    return found


def widths_of_all(rows: Rows) -> dict[str, Mapping[str, float]]:
    """Return the widths that all rows together make most probable."""
    w = _fitted(_thinned(rows))
    parts = {"common": w[:6], "family": w[6:12], "kind": w[12:18]}
    found: dict[str, Mapping[str, float]] = {
        part: dict(zip(SPEEDS, map(float, values.round(3)), strict=True))
        for part, values in parts.items()
    }
    rest = {"software": round(float(w[18]), 3), "noise": round(float(w[19]), 3)}
    return found | {"rest": rest}


def fixed_band(rows: Rows, share: float) -> float:
    """Return the factor of the narrowest band that holds a share of all families."""
    order = np.argsort(rows.surprise_N)
    surprise_N = rows.surprise_N[order]
    weight_N = (1 / np.bincount(rows.family_N)[rows.family_N] / len(rows.families))[
        order
    ]
    reached_N = np.cumsum(weight_N)
    spans = []
    for i in range(len(surprise_N)):
        j = np.searchsorted(reached_N, reached_N[i] - weight_N[i] + share)
        if j < len(surprise_N):
            spans.append(surprise_N[j] - surprise_N[i])
    return math.exp(min(spans) / 2)


def _judged(rows: Rows, family: int, widths: Floats) -> Family:
    test = np.flatnonzero(rows.family_N == family)
    train = np.flatnonzero(rows.family_N != family)
    surprise_M = rows.surprise_N[test]
    mean_M, covariance_MM = _told_by(rows, widths, train, test)
    sd_M = np.sqrt(np.diag(covariance_MM))
    left_M = surprise_M - mean_M
    i, j = np.triu_indices(len(test), 1)
    variances = covariance_MM[i, i] + covariance_MM[j, j] - 2 * covariance_MM[i, j]
    pair_sd = np.sqrt(variances)
    over_M = np.exp(-surprise_M)  # predicted / measured
    return Family(
        name=rows.families[family],
        rows=len(test),
        least=float(over_M.min()),
        median=float(np.median(over_M)),
        most=float(over_M.max()),
        below_one=int((over_M < 1).sum()),
        error=float(np.abs(over_M - 1).mean()),
        learnt_error=float(np.abs(np.exp(-left_M) - 1).mean()),
        covered=float((np.abs(left_M) <= _NORMAL_90 * sd_M).mean()),
        factor=math.exp(_NORMAL_90 * float(np.median(sd_M))),
        ratios_covered=float(
            (np.abs(left_M[i] - left_M[j]) <= _NORMAL_90 * pair_sd).mean()
        ),
        ratios_factor=math.exp(_NORMAL_90 * float(np.median(pair_sd))),
        ordered=_ordered(rows.part(test), surprise_M),
        learnt_ordered=_ordered(rows.part(test), left_M),
    )


def _ordered(rows: Rows, surprise_M: Floats) -> float | None:
    """Return the share of pairs of one model that are predicted in the right order;
    `surprise_M` are the logarithms of measured over predicted."""
    i, j = np.triu_indices(len(surprise_M), 1)
    apart = rows.cost_N[i] - rows.cost_N[j]
    counts = (rows.model_N[i] == rows.model_N[j]) & (np.abs(apart) > _APART)
    if not counts.any():
        return None
    predicted = apart - (surprise_M[i] - surprise_M[j])
    return float((np.sign(predicted) == np.sign(apart))[counts].mean())


def _told_by(
    rows: Rows, widths: Floats, train: NDArray[np.int64], test: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return mean and covariance of surprises at `test`, given those at `train`."""
    smooth_NN = _covariance(rows, widths)
    noise = widths[19] ** 2
    known_TT = smooth_NN[np.ix_(train, train)] + noise * np.eye(len(train))
    between_MT = smooth_NN[np.ix_(test, train)]
    factor = cho_factor(known_TT, lower=True)
    mean_M = between_MT @ cho_solve(factor, rows.surprise_N[train])
    own_MM = smooth_NN[np.ix_(test, test)] + noise * np.eye(len(test))
    return mean_M, own_MM - between_MT @ cho_solve(factor, between_MT.T)


def _fitted(rows: Rows) -> Floats:
    """Return the widths that make the rows most probable, under their prior."""
    start = np.log([*_COMMON, *_FAMILY, *_KIND, _SOFTWARE, _NOISE])

    def loss(logs: Floats) -> float:
        widths = np.exp(logs)
        covariance_NN = _covariance(rows, widths)
        covariance_NN += widths[19] ** 2 * np.eye(len(rows.surprise_N))
        factor = cho_factor(covariance_NN, lower=True)
        fit = rows.surprise_N @ cho_solve(factor, rows.surprise_N) / 2
        size = np.log(np.diag(factor[0])).sum()
        return float(fit + size + (((logs - start) / _SURE) ** 2).sum() / 2)

    found = minimize(loss, start, method="L-BFGS-B", options={"maxiter": 60})
    return np.exp(found.x)


def _covariance(rows: Rows, widths: Floats) -> Floats:
    """Return the covariance of all rows' surprises, without noise."""
    family_NN = rows.family_N[:, None] == rows.family_N
    kind_NN = rows.kind_N[:, None] == rows.kind_N
    found_NN = widths[18] ** 2 * family_NN
    for s in range(len(SPEEDS)):
        slope_N = rows.slope_NS[:, s]
        parts = widths[s] ** 2 + widths[6 + s] ** 2 * family_NN
        found_NN = found_NN + np.outer(slope_N, slope_N) * (
            parts + widths[12 + s] ** 2 * kind_NN
        )
    return found_NN


def _thinned(rows: Rows) -> Rows:
    """Return at most `_ROWS` rows of each family."""
    draw = np.random.default_rng(0)
    kept = [
        draw.permutation(np.flatnonzero(rows.family_N == family))[:_ROWS]
        for family in range(len(rows.families))
    ]
    return rows.part(np.concatenate(kept))
