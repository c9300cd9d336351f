# SPDX-License-Identifier: Apache-2.0
"""Which devices form a data-parallel group: AutoHet's first stage, solved exactly.

Owns the grouping problem in the form that `autohet.py` tells. Units of a class (tensor
groups of equal devices) are alike, so a group is how many units of each class it has;
the nonlinear power of a group becomes a number of each such mix, the largest least
power a search over those numbers with an integer program (CVXPY, HiGHS) at each. Does
not own what a unit's power is, nor how layers are spread in a group.

Letters of array names: N mixes, C device classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb

import cvxpy as cp
import numpy as np

from hetjax.planner.model.deadline import check
from hetjax.planner.model.problem import Floats, Ints

_MOST_MIXES = 1500
_MOST_DEEP = 16  # units of a group


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixes:
    """Mixes that one replica fits on, with their effective powers."""

    units_NC: Ints
    power_N: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """Mixes and how many groups of each, and the power of the weakest."""

    groups: tuple[tuple[tuple[int, ...], int], ...]
    least_power: float


def mixes(units_C: Sequence[int], most_units: int) -> Ints:
    """Return every mix of up to so many units, without what would be too many.

    Groups are then at most less deep, or of fewer classes each.
    """
    num_classes, most = len(units_C), min(most_units, _MOST_DEEP, sum(units_C))
    kinds, deep = min(num_classes, 4), most
    while kinds > 1 and _num_mixes(num_classes, kinds, deep) > _MOST_MIXES:
        kinds, deep = (kinds, deep - 1) if deep > 8 else (kinds - 1, most)
    found = [
        mix
        for n in range(1, kinds + 1)
        for chosen in combinations(range(num_classes), n)
        for mix in _mixes_of(units_C, chosen, deep)
    ]
    return np.array(found, dtype=np.int64).reshape(-1, num_classes)


def _num_mixes(num_classes: int, kinds: int, deep: int) -> int:
    return sum(comb(num_classes, n) * comb(deep, n) for n in range(1, kinds + 1))


def _mixes_of(
    units_C: Sequence[int], chosen: Sequence[int], deep: int
) -> list[tuple[int, ...]]:
    """Mixes with at least one unit of each of these classes and none of others."""
    counts = [range(1, min(units_C[c], deep) + 1) for c in chosen]
    found = []
    for units in product(*counts):
        if sum(units) <= deep:
            row = [0] * len(units_C)
            for c, num in zip(chosen, units, strict=True):
                row[c] = num
            found.append(tuple(row))
    return found


def effective_power(units_NC: Ints, power_C: Floats, num_microbatches: int) -> Floats:
    """Return K / (K + P - 1) times the sum of the units' powers: less its bubble."""
    depth_N = units_NC.sum(axis=1)
    return num_microbatches / (num_microbatches + depth_N - 1) * (units_NC @ power_C)


def balanced_groups(
    there: Mixes, units_C: Sequence[int], num_groups: int, most_power: float = np.inf
) -> Grouping | None:
    """Return so many groups whose weakest is as strong as can be.

    `most_power` is a bound on that, if one is known; a good one saves solving.

    Units stay idle where that makes the weakest stronger; beyond that as much power as
    can be is in use. None if there are too few units.
    """
    powers = np.unique(there.power_N)
    low, step = -1, 1
    high = int(np.searchsorted(powers, most_power * (1 + 1e-9))) - 1
    while low < high:
        # the best is near the top of what is known to be too much: longer steps down
        middle = max((low + high + 1) // 2, high - step)
        if _most_groups(there, units_C, powers[middle]) >= num_groups:
            low = middle
        else:
            high, step = middle - 1, 4 * step
    if low < 0:
        return None
    counts_N = _fullest(there, units_C, powers[low], num_groups)
    return Grouping(
        groups=tuple(
            (tuple(there.units_NC[n].tolist()), int(counts_N[n]))
            for n in np.flatnonzero(counts_N)
        ),
        least_power=float(there.power_N[counts_N > 0].min()),
    )


def _most_groups(there: Mixes, units_C: Sequence[int], least_power: float) -> int:
    """How many groups of at least that power there can be."""
    units_NC = _smallest(there.units_NC[there.power_N >= least_power])
    counts_N = cp.Variable(len(units_NC), integer=True)
    within = [counts_N >= 0, units_NC.T @ counts_N <= np.array(units_C)]
    _solve(cp.Problem(cp.Maximize(cp.sum(counts_N)), [*within]))
    return int(_whole(counts_N).sum())


def _smallest(units_NC: Ints) -> Ints:
    """The mixes that hold no other of the mixes."""
    holds_NN = (units_NC[:, None] >= units_NC).all(axis=2)
    return units_NC[holds_NN.sum(axis=1) == 1]


def _fullest(
    there: Mixes, units_C: Sequence[int], least_power: float, num_groups: int
) -> Ints:
    strong = np.flatnonzero(there.power_N >= least_power)
    counts_N = cp.Variable(len(strong), integer=True)
    limits = [
        counts_N >= 0,
        there.units_NC[strong].T @ counts_N <= np.array(units_C),
        cp.sum(counts_N) == num_groups,
    ]
    used = there.power_N[strong] / there.power_N.max()
    _solve(cp.Problem(cp.Maximize(used @ counts_N), limits))
    found_N = np.zeros(len(there.power_N), dtype=np.int64)
    found_N[strong] = _whole(counts_N)
    return found_N


def _solve(problem: cp.Problem) -> None:
    check()
    problem.solve(solver=cp.HIGHS)
    assert problem.status in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE), problem.status


def _whole(counts_N: cp.Variable) -> Ints:
    assert counts_N.value is not None
    return np.rint(counts_N.value).astype(np.int64)
