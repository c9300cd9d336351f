# SPDX-License-Identifier: Apache-2.0
"""The best limit on the slowest stage: fill(limit) + weight * limit at its least.

Owns the search over limits, as in Alpa's and HARP's t_max (arXiv 2509.24859): a higher
limit fills faster and repeats slower. Does not own what fills a pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limited(Generic[T]):
    """The best solution, and its fill plus weight times its limit, in seconds."""

    total_s: float
    solution: T


def best_limit(
    limits: Sequence[float], fill: Callable[[float], tuple[float, T]], weight: float
) -> Limited[T]:
    """Return the exact best over ascending limits, few of which are tried.

    `fill` gives (seconds, solution) within a limit, and there must be one within each;
    the seconds must not rise with the limit.
    """
    last = len(limits) - 1
    tried = {n: fill(limits[n]) for n in {0, last}}
    spans = [(0, last)]

    def total_s(n: int) -> float:
        return tried[n][0] + weight * limits[n]

    best = min(tried, key=total_s)
    while spans:
        before, after = spans.pop()
        # between them, none fills faster than the higher or repeats as the lower
        least_s = tried[after][0] + weight * limits[min(before + 1, last)]
        if after - before < 2 or least_s >= total_s(best):
            continue
        middle = (before + after) // 2
        tried[middle] = fill(limits[middle])
        best = min(best, middle, key=total_s)
        spans += [(middle, after), (before, middle)]
    return Limited(total_s=total_s(best), solution=tried[best][1])
