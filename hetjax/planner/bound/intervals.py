# SPDX-License-Identifier: Apache-2.0
"""Cells: pipelines that are priced together, as if all were as good as the best.

Owns how pipelines are divided: by microbatch size and count, and in the closed form,
whose time is a fill and then the slowest stage's time for every microbatch, by the
latter. Does not own what a cell's pipelines could cost (`completion.py`).
"""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.templates import Form

_PARTS = 4
_NARROWEST = 1e-6  # relative: as far as times of slowest stages are told apart


class Cell(NamedTuple):
    """Microbatch counts `lo` to `hi` at one microbatch size (by index).

    The slowest stage or link takes `least_s` to `most_s` for each microbatch.
    """

    b: int
    lo: int
    hi: int
    least_s: float = 0.0
    most_s: float = inf


def first_cells(
    p: Problem, form: Form, most_B: Ints, left_s_B: Floats, work_s_B: Floats
) -> Iterator[Cell]:
    """Yield cells that hold all pipelines of at most so many microbatches.

    In the closed form every count has its own, as long as memory may not hold as many
    in flight as the pipeline is deep. Microbatches after the first have `left_s_B`, at
    most; count times the slowest stage's time is `work_s_B`, at least.
    """
    slowest_s_B = p.layer_s_BOL.min(axis=1).max(axis=1)
    if p.one_replica:
        yield from _of_all(p, form, most_B, left_s_B, slowest_s_B)
        return
    for b, most in enumerate(most_B):
        if form == "prefix" and most:
            yield Cell(b, 1, int(most))
        if form == "closed" and most:
            yield Cell(b, 1, 1)
            many = max(p.max_launch_ahead, 2)
            for lo in range(2, min(many, int(most)) + 1):
                hi = int(most) if lo == many else lo
                least_s = max(float(slowest_s_B[b]), float(work_s_B[b]) / hi)
                most_s = float(left_s_B[b]) / (lo - 1)
                if least_s <= most_s:
                    yield Cell(b, lo, hi, least_s, most_s)


def _of_all(
    p: Problem, form: Form, most_B: Ints, left_s_B: Floats, slowest_s_B: Floats
) -> Iterator[Cell]:
    """Yield cells of pipelines that do the whole global batch."""
    for b, size in enumerate(p.microbatch_sizes):
        count, rest = divmod(p.global_batch, size)
        if rest or count > most_B[b]:
            continue
        if form == "prefix" or count == 1:
            yield Cell(b, count, count)
            continue
        least_s, most_s = float(slowest_s_B[b]), float(left_s_B[b]) / (count - 1)
        if least_s <= most_s:
            yield Cell(b, count, count, least_s, most_s)


def narrowed(cell: Cell, form: Form, ratio: float) -> Iterator[Cell]:
    """Cut a cell into some that are about `ratio` wide."""
    if form == "prefix":
        lo = cell.lo
        while lo <= cell.hi:
            hi = min(max(lo, int(lo * (1 + ratio))), cell.hi)
            yield cell._replace(lo=lo, hi=hi)
            lo = hi + 1
    elif cell.most_s == inf:
        yield cell
    else:
        least_s = cell.least_s
        while least_s * (1 + ratio) < cell.most_s:
            most_s = least_s * (1 + ratio)
            yield cell._replace(least_s=least_s, most_s=most_s)
            least_s = most_s
        yield cell._replace(least_s=least_s)


def divided(cell: Cell, form: Form) -> list[Cell]:
    """Cut a cell in parts; none if there is nothing more to tell."""
    if form == "prefix":
        middle = (cell.lo + cell.hi) // 2
        parts = [cell._replace(hi=middle), cell._replace(lo=middle + 1)]
        return parts if cell.lo < cell.hi else []
    if cell.most_s <= cell.least_s * (1 + _NARROWEST) or cell.most_s == inf:
        return []
    return list(narrowed(cell, form, (cell.most_s / cell.least_s - 1) / _PARTS))
