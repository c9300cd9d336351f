# SPDX-License-Identifier: Apache-2.0
"""Cuts the layers of one pipeline into its stages.

Owns three exact methods. The first gives every stage the same number of blocks. The
second minimises the load of the most loaded stage. The third minimises the closed form,
by a search over limits on the slowest stage, as in Alpa's and HARP's t_max (arXiv
2509.24859). Does not own the loads of stages, nor which stages there are.

Letters of array names: S stages, I and J first layer and end of a range.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from hetjax.planner.model.problem import Floats

T = TypeVar("T")
StageCuts = tuple[int, ...]  # bounds of the stages' ranges: 0, ..., number of layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Limited(Generic[T]):
    """The best solution, and its seconds: its fill plus weight times its limit."""

    total_s: float
    solution: T


def best_limit(
    limits: Sequence[float], fill: Callable[[float], tuple[float, T]], weight: float
) -> Limited[T]:
    """Return the exact best over ascending limits; only few of them are tried.

    `fill` returns (seconds, solution) within a limit. Every limit must have a solution,
    and the seconds must not rise with the limit.
    """
    last = len(limits) - 1
    tried = {n: fill(limits[n]) for n in {0, last}}
    spans = [(0, last)]

    def total_s(n: int) -> float:
        return tried[n][0] + weight * limits[n]

    best = min(tried, key=total_s)
    while spans:
        before, after = spans.pop()
        # between them no fill is below that of `after`, no limit below `before + 1`
        least_s = tried[after][0] + weight * limits[min(before + 1, last)]
        if after - before < 2 or least_s >= total_s(best):
            continue
        middle = (before + after) // 2
        tried[middle] = fill(limits[middle])
        best = min(best, middle, key=total_s)
        spans += [(middle, after), (before, middle)]
    return Limited(total_s=total_s(best), solution=tried[best][1])


def even_cuts(num_layers: int, num_stages: int) -> StageCuts:
    """Return cuts that spread the blocks evenly over the stages.

    The embedding joins the first stage, the head the last. If the number of blocks does
    not divide, inner stages get one more before the first and the last stage do, since
    these two have additional work.
    """
    if num_stages == 1:
        return (0, num_layers)
    each, more = divmod(num_layers - 2, num_stages)
    sizes = [each] * num_stages
    for s in [*range(1, num_stages - 1), 0, num_stages - 1][:more]:
        sizes[s] += 1
    bounds = np.cumsum(sizes) + 1
    return (0, *bounds[:-1].tolist(), num_layers)


def balanced_cuts(load_SIJ: Floats) -> StageCuts | None:
    """Return the cuts that minimise the largest load; None if all have infinite loads.

    `load_SIJ` is the load of stage s on layers i to j, infinite where not allowed.
    """
    least, cuts = _least_cuts(load_SIJ, np.maximum)
    return cuts if np.isfinite(least) else None


def fastest_cuts(stage_s_SIJ: Floats, num_microbatches: int) -> StageCuts | None:
    """Return the cuts with the least sum of stages plus m - 1 times the slowest.

    Seconds are infinite where a stage is not allowed. None if there are no cuts.
    """
    first = balanced_cuts(stage_s_SIJ)
    if first is None:
        return None
    least_s = max(stage_s_SIJ[s, first[s], first[s + 1]] for s in range(len(first) - 1))
    limits = np.unique(stage_s_SIJ[np.isfinite(stage_s_SIJ)])
    return best_limit(
        limits[limits >= least_s].tolist(),
        lambda most_s: _least_cuts(
            np.where(stage_s_SIJ > most_s, np.inf, stage_s_SIJ), np.add
        ),
        num_microbatches - 1,
    ).solution


def _least_cuts(load_SIJ: Floats, combine: np.ufunc) -> tuple[float, StageCuts]:
    """Return the least sum (`np.add`) or maximum (`np.maximum`) of the stages' loads,
    and its cuts."""
    num_stages, width, _ = load_SIJ.shape
    least_J = np.where(np.arange(width) == 0, 0.0, np.inf)
    froms_SJ = np.zeros((num_stages, width), dtype=np.int64)
    for s, load_IJ in enumerate(load_SIJ):
        total_IJ = combine(least_J[:, None], load_IJ)
        froms_SJ[s] = total_IJ.argmin(axis=0)
        least_J = total_IJ.min(axis=0)
    return float(least_J[-1]), _followed(froms_SJ)


def _followed(froms_SJ: np.ndarray) -> StageCuts:
    bounds = [froms_SJ.shape[1] - 1]
    for froms_J in froms_SJ[::-1]:
        bounds.append(int(froms_J[bounds[-1]]))
    return tuple(reversed(bounds))
