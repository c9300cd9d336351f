# SPDX-License-Identifier: Apache-2.0
"""Microbatch intervals, and the dynamic program's labels in them.

Owns the division of pipelines into intervals. Pipelines of an interval are priced
together, as if all were as good as the best. Intervals differ in microbatch size and
count. The time of the closed form is a fill, then the slowest stage's time for every
microbatch; there intervals also differ in the slowest stage's time. Owns the data of a
partial pipeline, and dominance. Does not own the least cost of an interval's pipelines
(`completion.py`) nor the growth of labels (`partial_pipelines.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.templates import Form

_PARTS = 4
_NARROWEST = 1e-6  # relative: closer times of slowest stages are not distinguished
_NEIGHBOURS = (4, 16)  # compared with each label, first few; then more with the rest


class Interval(NamedTuple):
    """Microbatch counts `lo` to `hi` at one microbatch size (by index).

    The slowest stage or link takes `least_s` to `most_s` for each microbatch.
    """

    b: int
    lo: int
    hi: int
    least_s: float = 0.0
    most_s: float = inf


def initial_intervals(
    p: Problem, form: Form, most_B: Ints, left_s_B: Floats, work_s_B: Floats
) -> Iterator[Interval]:
    """Yield intervals that contain all pipelines of at most `most_B` microbatches.

    In the closed form every count below `max_launch_ahead` has its own interval, since
    it limits the microbatches in flight. `left_s_B` is the most time for microbatches
    after the first. `work_s_B` is the least of count times the slowest stage's time.
    """
    slowest_s_B = p.layer_s_BOL.min(axis=1).max(axis=1)
    if p.one_replica:
        yield from _of_all(p, form, most_B, left_s_B, slowest_s_B)
        return
    for b, most in enumerate(most_B):
        if form == "prefix" and most:
            yield Interval(b, 1, int(most))
        if form == "closed" and most:
            yield Interval(b, 1, 1)
            many = max(p.max_launch_ahead, 2)
            for lo in range(2, min(many, int(most)) + 1):
                hi = int(most) if lo == many else lo
                least_s = max(float(slowest_s_B[b]), float(work_s_B[b]) / hi)
                most_s = float(left_s_B[b]) / (lo - 1)
                if least_s <= most_s:
                    yield Interval(b, lo, hi, least_s, most_s)


def _of_all(
    p: Problem, form: Form, most_B: Ints, left_s_B: Floats, slowest_s_B: Floats
) -> Iterator[Interval]:
    """Yield intervals of pipelines that compute the whole global batch."""
    for b, size in enumerate(p.microbatch_sizes):
        count, rest = divmod(p.global_batch, size)
        if rest or count > most_B[b]:
            continue
        if form == "prefix" or count == 1:
            yield Interval(b, count, count)
            continue
        least_s, most_s = float(slowest_s_B[b]), float(left_s_B[b]) / (count - 1)
        if least_s <= most_s:
            yield Interval(b, count, count, least_s, most_s)


def refined(interval: Interval, form: Form, ratio: float) -> Iterator[Interval]:
    """Yield parts of an interval that are about `ratio` wide."""
    if form == "prefix":
        lo = interval.lo
        while lo <= interval.hi:
            hi = min(max(lo, int(lo * (1 + ratio))), interval.hi)
            yield interval._replace(lo=lo, hi=hi)
            lo = hi + 1
    elif interval.most_s == inf:
        yield interval
    else:
        least_s = interval.least_s
        while least_s * (1 + ratio) < interval.most_s:
            most_s = least_s * (1 + ratio)
            yield interval._replace(least_s=least_s, most_s=most_s)
            least_s = most_s
        yield interval._replace(least_s=least_s)


def halved(interval: Interval, form: Form) -> list[Interval]:
    """Return parts of an interval; none if it need not be split further."""
    if form == "prefix":
        middle = (interval.lo + interval.hi) // 2
        parts = [interval._replace(hi=middle), interval._replace(lo=middle + 1)]
        return parts if interval.lo < interval.hi else []
    if interval.most_s <= interval.least_s * (1 + _NARROWEST) or interval.most_s == inf:
        return []
    return list(
        refined(interval, form, (interval.most_s / interval.least_s - 1) / _PARTS)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """Suffixes of pipelines, one per row.

    The suffix starts at layer `start` with a stage on `mesh` (-1 if empty). The other
    fields are as seen from the previous stage, which will be in group `before` of
    meshes. `fill_s` is the suffix's time by the form, with the hop. `owed_s` is how
    long sending keeps the previous stage busy, `ahead` is that stage's launch-ahead.
    `used_XR` is what the suffix takes of scarce limits, 0 where no continuation can
    exceed them. `parent` is the suffix without its first stage: its row in the pool.
    """

    interval: Ints
    mesh: Ints
    before: Ints
    start: Ints
    ahead: Ints
    fill_s: Floats
    owed_s: Floats
    after_s_XA: Floats
    cost: Floats
    used_XR: Floats
    parent: Ints

    def __len__(self) -> int:
        return len(self.cost)

    def select(self, rows: Ints | NDArray[np.bool_]) -> "Labels":
        return Labels(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def joined(parts: list[Labels]) -> Labels:
    return Labels(
        **{
            f.name: np.concatenate([getattr(part, f.name) for part in parts])
            for f in fields(Labels)
        }
    )


def undominated(labels: Labels, num_groups: int, *, ahead_matters: bool) -> Labels:
    """Drop labels that another label equals or beats in every measure.

    With further measures than time and cost, some dominated labels may remain.
    """
    group = labels.interval * num_groups + labels.before
    others = [labels.owed_s, *labels.after_s_XA.T, *labels.used_XR.T]
    if ahead_matters:
        others.append(labels.ahead.astype(np.float64))
    others = [values for values in others if len(values) and np.ptp(values)]
    order = np.lexsort((labels.fill_s, labels.cost, *others, group))
    keys = [values[order] for values in (group, *others)]
    changes = [np.diff(key, prepend=key[:1]) != 0 for key in keys if len(key)]
    segment = np.cumsum(np.logical_or.reduce(changes)) if changes else group
    order = order[_frontier(segment, labels.fill_s[order])]
    if not others:
        return labels.select(order)
    return labels.select(_unbeaten(labels, group, others, order))


def _frontier(segment: Ints, fill_s: Floats) -> Ints:
    """Return the rows that are faster than all earlier rows of their segment; rows are
    sorted by cost in each segment."""
    if not len(fill_s):
        return segment
    # later segments are shifted below earlier ones, so the running minimum restarts
    value = fill_s - segment * (np.ptp(fill_s) + 1.0)
    least = np.minimum.accumulate(value)
    return np.flatnonzero(np.concatenate([[True], value[1:] < least[:-1]]))


def _unbeaten(labels: Labels, group: Ints, others: list[Floats], rows: Ints) -> Ints:
    """Drop labels that some label of slightly lower cost dominates."""
    measures_MX = np.stack([labels.cost, labels.fill_s, *others])
    rows = rows[np.lexsort((labels.fill_s[rows], labels.cost[rows], group[rows]))]
    for most in _NEIGHBOURS:
        beaten = np.zeros(len(rows), dtype=np.bool_)
        values_MX, of = measures_MX[:, rows], group[rows]
        for shift in range(1, min(most, len(rows) - 1) + 1):
            same = of[shift:] == of[:-shift]
            if not same.any():
                break
            less_MX = values_MX[:, :-shift] <= values_MX[:, shift:]
            beaten[shift:] |= same & less_MX.all(axis=0)
        rows = rows[~beaten]
    return rows
