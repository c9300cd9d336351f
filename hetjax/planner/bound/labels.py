# SPDX-License-Identifier: Apache-2.0
"""Labels: suffixes of pipelines, and which of them others make superfluous.

Owns what is known of a suffix and dominance. Does not own how suffixes grow
(`partial_pipelines.py`).
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.model.problem import Floats, Ints

_NEIGHBOURS = (4, 16)  # that a label is held against: first few, then more of the rest


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """Suffixes of pipelines, one in a row.

    The suffix starts at `start` with a stage on `mesh` (-1 if empty), seen from the
    stage before it, which will be in group `before` of meshes: `fill_s` is its time by
    the form, with the hop, `owed_s` what sending to it costs that stage, `ahead` that
    stage's launch-ahead.
    `used_XR` is what it takes of scarce limits, 0 where no way to go on exceeds them.
    `parent` is the row of the suffix without its first stage, in the pool.
    """

    cell: Ints
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

    def take(self, rows: Ints | NDArray[np.bool_]) -> "Labels":
        return Labels(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def joined(parts: list[Labels]) -> Labels:
    return Labels(
        **{
            f.name: np.concatenate([getattr(part, f.name) for part in parts])
            for f in fields(Labels)
        }
    )


def undominated(labels: Labels, num_groups: int, *, ahead_matters: bool) -> Labels:
    """Drop labels that another one equals or beats in all that counts.

    Not all of them where more counts than time and cost.
    """
    group = labels.cell * num_groups + labels.before
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
        return labels.take(order)
    return labels.take(_unbeaten(labels, group, others, order))


def _frontier(segment: Ints, fill_s: Floats) -> Ints:
    """The rows, sorted by cost in each segment, that take less than all before them."""
    if not len(fill_s):
        return segment
    # later segments lie below all earlier ones, so the running minimum starts anew
    value = fill_s - segment * (np.ptp(fill_s) + 1.0)
    least = np.minimum.accumulate(value)
    return np.flatnonzero(np.concatenate([[True], value[1:] < least[:-1]]))


def _unbeaten(labels: Labels, group: Ints, others: list[Floats], rows: Ints) -> Ints:
    """Hold labels against those that cost a little less."""
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
