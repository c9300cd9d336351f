# SPDX-License-Identifier: Apache-2.0
"""What the rest of a pipeline must at least cost, for pruning the search.

Owns the intervals of microbatch counts that are priced together, the most microbatches
that a stage can do in a step whatever stands before and after it, and from it the
least cost of the layers before a stage. All are optimistic: nothing good is pruned.
Does not own the exact search (`pricing.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetjax.planner.problem import Floats, Ints, Problem
from hetjax.planner.templates import Form, counted


class Interval(NamedTuple):
    """Microbatch counts `lo` to `hi` at one microbatch size (by index)."""

    b: int
    lo: int
    hi: int


def intervals(most_B: Ints, ratio: float) -> Iterator[Interval]:
    """Yield intervals over 1 to the most of each size, about `ratio` wide."""
    for b, most in enumerate(most_B):
        lo = 1
        while lo <= most:
            hi = min(max(lo, int(lo * (1 + ratio))), int(most))
            yield Interval(b, lo, hi)
            lo = hi + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Reach:
    """`most_BOIJ`: the most microbatches of a stage on layers I to J in a step."""

    step_s: float
    most_BOIJ: Ints
    in_flight_BOIJ: Ints


def reach(p: Problem, form: Form, step_s: float) -> Reach:
    """Return what every stage could do if all others were the fastest there are."""
    stage_s_BOIJ = p.busy_s_BOU[:, :, p.range_IJ]
    stage_s_BOIJ[:, :, :, :-1] += p.send_s_BKOO.min(axis=3)[:, p.kind_J[:-1]].swapaxes(
        1, 2
    )[:, :, None]
    returned_BOI = p.return_s_BKOO.min(axis=2)[:, p.kind_J].swapaxes(1, 2)
    stage_s_BOIJ[:, :, 1:] += returned_BOI[:, :, 1:, None]
    after_s_BOIJ = p.after_s_ABOU.sum(axis=0)[:, :, p.range_IJ]
    first_only = [exposed == "first" for exposed in p.exposed]
    if any(first_only):
        spared_BOU = p.after_s_ABOU[first_only].sum(axis=0)
        after_s_BOIJ[:, :, 1:] -= spared_BOU[:, :, p.range_IJ[1:]]
    before_s_BI = p.fastest_s_BJ
    left_s_BOIJ = step_s - after_s_BOIJ - before_s_BI[:, None, :, None]
    if form == "closed":
        with np.errstate(invalid="ignore"):  # sizes at which nothing fits: inf - inf
            left_s_BOIJ -= (before_s_BI[:, -1:] - before_s_BI)[:, None, None, :]
    in_flight_BOIJ = p.most_in_flight_BOU[:, :, p.range_IJ]
    exists = (p.range_IJ >= 0) & (in_flight_BOIJ > 0)
    exists &= left_s_BOIJ > 0
    most_BOIJ = counted(
        np.where(exists, left_s_BOIJ, 0.0), np.where(exists, stage_s_BOIJ, 1.0)
    )
    return Reach(
        step_s=step_s,
        most_BOIJ=np.where(exists, most_BOIJ, 0),
        in_flight_BOIJ=in_flight_BOIJ,
    )


def least_cost(p: Problem, can: Reach, cost_O: Floats, b_N: Ints, lo_N: Ints) -> Floats:
    """Return the least cost of layers 0 to J for `lo` microbatches of every interval.

    Shape (N, J, F) with F the launch-ahead, from 0, of the stage that ends at J.
    """
    num_ahead = p.max_launch_ahead
    cost_NJF = np.full((len(b_N), p.num_layers + 1, num_ahead + 2), np.inf)
    cost_NJF[:, 0, :] = 0.0
    ahead_F = np.arange(num_ahead + 1)
    for j in range(1, p.num_layers + 1):
        does_NOI = can.most_BOIJ[b_N, :, :j, j] >= lo_N[:, None, None]
        rows, options, starts = does_NOI.nonzero()
        if not len(rows):
            continue
        holds = can.in_flight_BOIJ[b_N[rows], options, starts, j]
        fits_XF = (holds >= lo_N[rows])[:, None] | (holds[:, None] >= ahead_F)
        total_XF = cost_NJF[rows, starts, 1:] + cost_O[options][:, None]
        total_XF[~fits_XF] = np.inf
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        cost_NJF[rows[firsts], j, :-1] = np.minimum.reduceat(total_XF, firsts)
    return cost_NJF
