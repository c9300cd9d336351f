# SPDX-License-Identifier: Apache-2.0
"""The dynamic program over pipelines, from the last stage to the first.

Owns the labels and their steps. It starts from the last stage, since a stage's
launch-ahead, and so its memory, follows from the stages after it. A label is a suffix
of stages with the kind of stage before them already chosen; labels that another one
beats in time, cost and launch-ahead are dropped. Time is counted for the lowest
microbatch count of a label's interval, worth for the highest: nothing that could be
worth it is dropped. Does not own intervals (`completion.py`) nor the decisions that
are made on what is found (`pricing.py`).
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.completion import Interval, Reach, least_cost
from hetjax.planner.problem import Floats, Ints, Problem
from hetjax.planner.templates import (
    ROUNDING,
    Form,
    Template,
    TemplateStage,
    added_launch_ahead,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """Suffixes of pipelines, one in a row.

    The suffix starts at `start` with a stage under `option` (-1 if empty), seen from
    the stage before it, which will be in group `before` of options: `fill_s` and
    `peak_s` are its time by the form, with the hop, `owed_s` what sending to it costs
    that stage, `ahead` that stage's launch-ahead.
    `used_XC` counts its devices of the scarce classes.
    `parent` is the row of the suffix without its first stage, in the pool.
    """

    interval: Ints
    option: Ints
    before: Ints
    start: Ints
    ahead: Ints
    fill_s: Floats
    peak_s: Floats
    owed_s: Floats
    after_s_XA: Floats
    cost: Floats
    used_XC: Floats
    parent: Ints

    def __len__(self) -> int:
        return len(self.cost)

    def take(self, rows: Ints | NDArray[np.bool_]) -> "Labels":
        return Labels(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def _joined(parts: list[Labels]) -> Labels:
    return Labels(
        **{
            f.name: np.concatenate([getattr(part, f.name) for part in parts])
            for f in fields(Labels)
        }
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Search:
    """What one pass of the dynamic program is given."""

    p: Problem
    form: Form
    can: Reach
    cost_O: Floats
    b_N: Ints
    lo_N: Ints
    worth_N: Ints  # sequences that the interval's highest count does
    rest_NJF: Floats
    serves_hops: bool


def search_of(
    p: Problem,
    form: Form,
    can: Reach,
    price_C: Floats,
    todo: list[Interval],
    *,
    serves_hops: bool = False,
) -> Search:
    """Bound the cost of every interval."""
    cost_O = p.used_OC @ price_C
    b_N, lo_N, hi_N = np.array(todo).T
    sizes_N = np.array(p.microbatch_sizes)[b_N]
    return Search(
        p=p,
        form=form,
        can=can,
        cost_O=cost_O,
        b_N=b_N,
        lo_N=lo_N,
        worth_N=sizes_N * hi_N,
        rest_NJF=least_cost(p, can, cost_O, b_N, lo_N),
        serves_hops=serves_hops,
    )


def pipelines(s: Search, worth: float) -> tuple[Labels, Labels]:
    """Return all labels, and those among them that are whole pipelines."""
    # what costs this much or more is not worth it
    limit_N = s.worth_N / worth * (1 + ROUNDING)
    pool = _ends(s, limit_N)
    for start in reversed(range(s.p.num_layers)):
        labels = _extended(s, pool, start, limit_N)
        if start:
            pool = _joined([pool, _undominated(labels, len(s.p.members_GO))])
        else:
            return pool, labels
    raise AssertionError("a model of no layers")


def _ends(s: Search, limit_N: Floats) -> Labels:
    """The empty suffix, before every group of options."""
    least_N = s.rest_NJF[:, s.p.num_layers, 1]
    alive_N = np.flatnonzero(least_N < limit_N)
    num_groups = len(s.p.members_GO)
    interval = np.repeat(alive_N, num_groups)
    zeros = np.zeros(len(interval))
    whole = zeros.astype(np.int64)
    return Labels(
        interval=interval,
        option=whole - 1,
        before=np.tile(np.arange(num_groups), len(alive_N)),
        start=whole + s.p.num_layers,
        ahead=whole + 1,
        fill_s=zeros,
        peak_s=zeros,
        owed_s=zeros,
        after_s_XA=np.zeros((len(interval), len(s.p.exposed))),
        cost=zeros,
        used_XC=np.zeros((len(interval), len(s.p.scarce))),
        parent=whole - 1,
    )


def _extended(s: Search, pool: Labels, start: int, limit_N: Floats) -> Labels:
    """Put a stage from `start` on before every suffix where that is worth it."""
    p, can = s.p, s.can
    rows, o = _with_options(p, pool.before)
    n, end, ahead = pool.interval[rows], pool.start[rows], pool.ahead[rows]
    b, lo = s.b_N[n], s.lo_N[n]
    rest = s.rest_NJF[n, start, np.minimum(ahead + 1, p.max_launch_ahead + 1)]
    worth_it = (
        (can.most_BOIJ[b, o, start, end] >= lo)
        & (can.in_flight_BOIJ[b, o, start, end] >= np.minimum(ahead, lo))
        & (pool.cost[rows] + s.cost_O[o] + rest < limit_N[n])
    )
    if p.scarce:
        used_XC = pool.used_XC[rows] + p.used_OC[o][:, p.scarce]
        worth_it &= (used_XC <= p.devices_C[p.scarce]).all(axis=1)
    labels = _linked(s, pool, rows[worth_it], o[worth_it], start)
    return labels.take(_in_time(s, labels, start, limit_N))


def _with_options(p: Problem, before: Ints) -> tuple[Ints, Ints]:
    """Return rows and options: each row once with every option of its group."""
    sizes_G = np.array([len(members) for members in p.members_GO])
    rows = np.repeat(np.arange(len(before)), sizes_G[before])
    firsts = np.cumsum(sizes_G[before]) - sizes_G[before]
    place = np.arange(len(rows)) - firsts[rows]
    starts_G = np.cumsum(sizes_G) - sizes_G
    return rows, np.concatenate(p.members_GO)[starts_G[before[rows]] + place]


def _linked(s: Search, pool: Labels, rows: Ints, options: Ints, start: int) -> Labels:
    """The labels of new stages before suffixes, for every group before them."""
    p = s.p
    num_before = len(p.members_GO) if start else 1
    firsts_G = np.array([members[0] for members in p.members_GO])
    parent, o = np.repeat(rows, num_before), np.repeat(options, num_before)
    old = pool.take(parent)
    before = np.tile(np.arange(num_before), len(rows))
    n = old.interval
    b, lo = s.b_N[n], s.lo_N[n]
    row = p.range_IJ[start, old.start]
    is_last = old.start == p.num_layers
    owed_factor = np.where(
        (start == 0) & (old.ahead >= p.long_from), p.long_first_factor, 1.0
    )
    stage_s = p.busy_s_BOU[b, o, row] + old.owed_s * owed_factor
    at = b, p.kind_J[start], firsts_G[before], o
    hop_s, link_s, owed_s = np.zeros((3, len(old)))
    if start:
        stage_s += p.return_s_BKOO[at] * np.where(is_last, p.last_factor, 1.0)
        hop_s, link_s, owed_s = p.hop_s_BKOO[at], p.link_s_BKOO[at], p.send_s_BKOO[at]
    fill_s, peak_s = _times(s.form, old, stage_s, hop_s, link_s, lo)
    slowest_s = s.can.step_s / lo if s.serves_hops else np.inf
    return Labels(
        interval=n,
        option=o,
        before=before,
        start=np.full(len(old), start),
        ahead=old.ahead + added_launch_ahead(hop_s, slowest_s),
        fill_s=fill_s,
        peak_s=peak_s,
        owed_s=owed_s,
        after_s_XA=_after(p, old, b, o, row, start),
        cost=old.cost + s.cost_O[o],
        used_XC=old.used_XC + p.used_OC[o][:, p.scarce],
        parent=parent,
    )


def _times(
    form: Form,
    old: Labels,
    stage_s: Floats,
    hop_s: Floats,
    link_s: Floats,
    lo: Ints,
) -> tuple[Floats, Floats]:
    """A suffix's time as the stage before it sees it, in one or two numbers."""
    if form == "closed":
        slowest_s = np.maximum(np.maximum(old.peak_s, stage_s), link_s)
        return old.fill_s + stage_s + 2 * hop_s, slowest_s
    own_s = np.maximum(lo * stage_s, stage_s + old.fill_s)
    linked_s = np.where(link_s > 0, (lo + 1) * link_s, 0.0)
    return np.maximum(own_s + 2 * hop_s, linked_s), old.peak_s


def _after(p: Problem, old: Labels, b: Ints, o: Ints, row: Ints, start: int) -> Floats:
    after_s_XA = np.maximum(old.after_s_XA, p.after_s_ABOU[:, b, o, row].T)
    for a, exposed in enumerate(p.exposed):
        if exposed == "first":
            after_s_XA[:, a] = p.after_s_ABOU[a, b, o, row] if start == 0 else 0.0
    return after_s_XA


def _in_time(
    s: Search, labels: Labels, start: int, limit_N: Floats
) -> NDArray[np.bool_]:
    """Whether each suffix can still become a pipeline that is fast and cheap enough."""
    n = labels.interval
    least_s = labels.fill_s + labels.after_s_XA.sum(axis=1)
    least_s += s.p.fastest_s_BJ[s.b_N[n], start]
    if s.form == "closed":
        least_s += (s.lo_N[n] - 1) * labels.peak_s
    ahead = np.minimum(labels.ahead, s.p.max_launch_ahead + 1)
    rest = s.rest_NJF[n, start, ahead] if start else 0.0
    return (least_s <= s.can.step_s * (1 + ROUNDING)) & (
        labels.cost + rest < limit_N[n]
    )


def _undominated(labels: Labels, num_options: int) -> Labels:
    """Drop labels that another one equals or beats in all that counts."""
    for reach_ in (4, 64):
        group = labels.interval * num_options + labels.before
        order = np.lexsort((labels.fill_s, labels.cost, group))
        labels, group = labels.take(order), group[order]
        measures_XM = np.column_stack(
            [
                labels.cost,
                labels.fill_s,
                labels.peak_s,
                labels.owed_s,
                labels.ahead,
                labels.after_s_XA,
                labels.used_XC,
            ]
        )
        beaten = np.zeros(len(labels), dtype=np.bool_)
        for shift in range(1, min(reach_, len(labels) - 1) + 1):
            same = group[shift:] == group[:-shift]
            if not same.any():
                break
            beaten[shift:] |= same & (measures_XM[:-shift] <= measures_XM[shift:]).all(
                axis=1
            )
        labels = labels.take(~beaten)
    return labels


def template_of(s: Search, pool: Labels, found: Labels, row: int) -> Template:
    stages, start, labels, at = [], 0, found, row
    while start < s.p.num_layers:
        parent = int(labels.parent[at])
        end = int(pool.start[parent])
        stages.append(TemplateStage(option=int(labels.option[at]), layers=(start, end)))
        start, labels, at = end, pool, parent
    size = s.p.microbatch_sizes[int(s.b_N[found.interval[row]])]
    return Template(microbatch_size=size, stages=tuple(stages))
