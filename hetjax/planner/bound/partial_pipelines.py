# SPDX-License-Identifier: Apache-2.0
"""The dynamic program over partial pipelines, from the last stage to the first.

Owns the growth of labels. The last stage comes first, since a stage's launch-ahead, and
so its memory, follows from the stages after it. A label is a partial pipeline: the last
stages, with the kind of the stage before them already chosen. Dominated labels are
dropped. Time is counted for the lowest microbatch count of a label's interval,
sequences for the highest. So no pipeline that reaches the threshold is dropped, unless
the number of labels is limited. Does not own intervals and dominance (`labels.py`),
completion bounds (`completion.py`), nor the use of results (`pricing.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.bound.completion import (
    CompletionQueries,
    Slack,
    least_cost,
    longest_stages,
)
from hetjax.planner.bound.labels import Interval, Labels, joined, undominated
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.templates import (
    ROUNDING,
    Form,
    Template,
    TemplateStage,
)
from hetjax.schedule.bound import prefix_behind_s
from hetjax.schedule.launch_ahead import exact_deltas

_NEVER_S = 1e30  # too long for any step


@dataclass(frozen=True, kw_only=True, eq=False)
class PricingProgram:
    """The input of one pass of the dynamic program, and limits on its pipelines.

    A pipeline of interval N that reaches the threshold takes at most `left_s_N`. For
    every trade Q, relative to the usual one, cost + time * `per_s_NQ` < `budget_NQ`.
    """

    p: Problem
    form: Form
    slack: Slack
    duals_R: Floats
    threshold: float
    intervals: Sequence[Interval]
    trades: Sequence[float]
    serves_hops: bool = False

    @cached_property
    def cost_M(self) -> Floats:
        """The price of a stage's devices, by mesh."""
        return self.cost_O[self.p.meshes.first_M]

    @cached_property
    def cost_O(self) -> Floats:
        """The price of a stage's devices, by option."""
        return self.p.taken_OR @ self.duals_R[: len(self.p.room_R)]

    @cached_property
    def per_weight_N(self) -> Floats:
        """The price of the work of `lo` microbatches, per whole model."""
        sizes_N = np.array(self.p.microbatch_sizes, dtype=np.float64)[self.b_N]
        return self.duals_R[len(self.p.room_R) :].sum() * self.lo_N * sizes_N

    @cached_property
    def b_N(self) -> Ints:
        """The index of the microbatch size."""
        return np.array([interval.b for interval in self.intervals])

    @cached_property
    def lo_N(self) -> Ints:
        """The fewest microbatches, for which time is counted."""
        return np.array([interval.lo for interval in self.intervals])

    @cached_property
    def hi_N(self) -> Ints:
        """The most microbatches, for which sequences are counted."""
        return np.array([interval.hi for interval in self.intervals])

    @cached_property
    def least_s_N(self) -> Floats:
        """The least seconds of a microbatch in the slowest stage."""
        return np.array([interval.least_s for interval in self.intervals])

    @cached_property
    def most_s_N(self) -> Floats:
        """The most seconds of a microbatch in the slowest stage."""
        return np.array([i.most_s for i in self.intervals]) * (1 + ROUNDING)

    @cached_property
    def each_N(self) -> Floats:
        """The most that a microbatch may cost."""
        sizes_N = np.array(self.p.microbatch_sizes, dtype=np.float64)[self.b_N]
        return sizes_N / self.threshold * (1 + ROUNDING)

    @cached_property
    def left_s_N(self) -> Floats:
        """The step's seconds, less the slowest stage's after the first microbatch."""
        return self.slack.step_s * (1 + ROUNDING) - (self.lo_N - 1) * self.least_s_N

    @cached_property
    def _many_N(self) -> NDArray[np.bool_]:
        """Whether microbatches beyond `lo` each take the slowest stage's time."""
        return (self.least_s_N > 0) & (self.lo_N < self.hi_N)

    @cached_property
    def per_s_NQ(self) -> Floats:
        """The price of a second, by trade. Usual is what `hi` microbatches may cost per
        second of the step or, if known, one per second of the slowest stage."""
        usual_N = self.each_N * self.hi_N / self.slack.step_s
        known = self.least_s_N > 0
        usual_N[known] = self.each_N[known] / self.least_s_N[known]
        per_s_NQ = usual_N[:, None] * np.array(self.trades)
        per_s_NQ[self._many_N] = usual_N[self._many_N, None]
        return per_s_NQ

    @cached_property
    def budget_NQ(self) -> Floats:
        """The most that a pipeline may cost, including its priced seconds."""
        fixed_N = self.each_N * np.where(self._many_N, self.lo_N, self.hi_N)
        return fixed_N[:, None] + self.per_s_NQ * self.left_s_N[:, None]

    @cached_property
    def rest_NQJF(self) -> Floats:
        """The least that layers 0 to J take of the budget (`least_cost`)."""
        num_trades = len(self.trades)
        asked = CompletionQueries(
            b_X=np.repeat(self.b_N, num_trades),
            lo_X=np.repeat(self.lo_N, num_trades),
            most_s_X=np.repeat(self.most_s_N, num_trades),
            per_s_X=self.per_s_NQ.reshape(-1),
            per_weight_X=np.repeat(self.per_weight_N, num_trades),
        )
        rest_XJF = least_cost(self.slack, self.cost_O, asked)
        return rest_XJF.reshape(len(self.intervals), num_trades, *rest_XJF.shape[1:])


def interval_bound_ratios(s: PricingProgram) -> Floats:
    """Return each interval's least cost over its budget; 1 or more rules it out."""
    after_s_N = s.p.least_after_s_AB.sum(axis=0)[s.b_N]
    first_s_N = s.p.least_after_s_AB[s.p.sure_of_first_A].sum(axis=0)[s.b_N]
    spent_NQ = s.rest_NQJF[:, :, -1, 0] + s.per_s_NQ * first_s_N[:, None]
    late_N = after_s_N + s.p.fastest_s_BJ[s.b_N, -1] > s.left_s_N
    share_NQ = np.where(late_N[:, None], np.inf, spent_NQ / s.budget_NQ)
    return share_NQ.max(axis=1)


def grown_labels(
    s: PricingProgram,
    intervals_N: Ints,
    *,
    beam: int | None = None,
    most: int | None = None,
) -> tuple[Labels, Labels] | None:
    """Return all labels of these intervals, and those that are complete pipelines.

    With `beam`, keep only so many labels per first layer, those of least bound ratio.
    None if there are more than `most` labels.
    """
    first_NJ = longest_stages(s.slack, s.b_N, s.lo_N, s.most_s_N)
    active = _empty(s, intervals_N)
    parts, rows, num_labels = [active], np.arange(len(active)), len(active)
    for start in reversed(range(s.p.num_layers)):
        check_deadline()
        near = first_NJ[active.interval, active.start] <= start
        active, rows = active.select(near), rows[near]
        labels = _extended(s, active, rows, start)
        if start == 0:
            return joined(parts), labels.select(_reaches_threshold(s, labels))
        labels = undominated(
            labels, len(s.p.members_GM), ahead_matters=not s.p.holds_all
        )
        if beam is not None and len(labels) > beam:
            order = np.argsort(bound_ratios(s, labels), kind="stable")
            labels = labels.select(order[:beam])
        parts.append(labels)
        rows = np.concatenate([rows, num_labels + np.arange(len(labels))])
        active = joined([active, labels])
        num_labels += len(labels)
        if most is not None and num_labels > most:
            return None
    raise AssertionError("a model of no layers")


def _empty(s: PricingProgram, intervals_N: Ints) -> Labels:
    """Return the empty pipeline, once for every group of meshes before it."""
    num_groups = len(s.p.members_GM)
    interval = np.repeat(intervals_N, num_groups)
    zeros = np.zeros(len(interval))
    none = zeros.astype(np.int64)
    return Labels(
        interval=interval,
        mesh=none - 1,
        before=np.tile(np.arange(num_groups), len(intervals_N)),
        start=none + s.p.num_layers,
        ahead=none + 1,
        fill_s=zeros,
        owed_s=zeros,
        after_s_XA=s.p.least_after_s_AB.T[s.b_N[interval]],
        cost=zeros,
        used_XR=np.zeros((len(interval), len(s.p.scarce))),
        parent=none - 1,
    )


def _extended(s: PricingProgram, pool: Labels, pool_rows: Ints, start: int) -> Labels:
    """Prepend a stage from `start` on, where the threshold may still be reached."""
    labels, stage_s = _staged(s, pool, pool_rows, start)
    none = np.zeros(len(labels))
    alone = _seen(s, labels, stage_s, none, none)
    near = bound_ratios(s, alone) < 1
    if start == 0:
        labels = alone.select(near)
    else:
        labels = _hopped(s, labels.select(near), stage_s[near], start)
        labels = labels.select(bound_ratios(s, labels) < 1)
    return replace(labels, used_XR=_used(s, labels)) if s.p.scarce else labels


def _staged(
    s: PricingProgram, pool: Labels, pool_rows: Ints, start: int
) -> tuple[Labels, Floats]:
    """Return the labels with one more stage, and its seconds.

    `fill_s` is its time for a microbatch plus the time behind it, without a hop before.
    """
    p = s.p
    rows, m = _with_meshes(p, pool.before)
    n = pool.interval[rows]
    b, lo, end = s.b_N[n], s.lo_N[n], pool.start[rows]
    held = _held(s, pool.ahead[rows], lo)
    stage_s = p.meshes.busy_s_BMFU[b, m, held, p.range_IJ[start, end]]
    able = (stage_s * lo <= s.slack.left_s_BMIJ[b, m, start, end]) & (
        stage_s <= s.most_s_N[n]
    )
    rows, m, stage_s = rows[able], m[able], stage_s[able]
    old, o = pool.select(rows), p.meshes.first_M[m]
    if p.has_sends:
        long = (start == 0) & (old.ahead >= p.long_from)
        stage_s = stage_s + old.owed_s * np.where(long, p.long_first_factor, 1.0)
    labels = replace(
        old,
        mesh=m,
        start=np.full(len(old), start),
        fill_s=old.fill_s + stage_s,
        after_s_XA=_after(s, old, m, held[able], start),
        cost=old.cost + s.cost_M[m] + _work_cost(s, old, o, start),
        used_XR=old.used_XR + p.taken_OR[o][:, p.scarce],
        parent=pool_rows[rows],
    )
    fits = np.all(labels.used_XR <= p.room_R[p.scarce], axis=1)
    return labels.select(fits), stage_s[fits]


def _work_cost(s: PricingProgram, old: Labels, o: Ints, start: int) -> Floats | float:
    """Return what one more stage costs by the limit on work."""
    if s.p.work_limit is None:
        return 0.0
    weight = s.p.work_limit.weight_OU[o, s.p.range_IJ[start, old.start]]
    return s.per_weight_N[old.interval] * weight


def _after(s: PricingProgram, old: Labels, m: Ints, held: Ints, start: int) -> Floats:
    """Return the terms after the pipeline with one more stage, less what it hides."""
    p, b = s.p, s.b_N[old.interval]
    rows = p.range_IJ[start, old.start]
    own_s_XA = p.after_s_ABOU[:, b, p.meshes.first_M[m], rows].T
    drain_s = p.drain_s_BOU[b, p.meshes.option_BMFU[b, m, held, rows], rows]
    after_s = []
    for a, exposed in enumerate(p.exposed):
        later_s, own_s = old.after_s_XA[:, a], own_s_XA[:, a]
        if exposed == "drained":
            later_s = np.maximum(later_s - drain_s, p.least_after_s_AB[a, b])
        if exposed == "first" and start > 0:
            own_s = np.zeros_like(later_s)
        after_s.append(np.maximum(later_s, own_s))
    return np.column_stack(after_s)


def _hopped(s: PricingProgram, labels: Labels, stage_s: Floats, start: int) -> Labels:
    """Return the labels as seen from every group of meshes before them."""
    p = s.p
    before_G = p.meshes.first_M[[members[0] for members in p.members_GM]]
    num_groups = len(before_G)
    before = np.tile(np.arange(num_groups), len(labels))
    stage_s = np.repeat(stage_s, num_groups)
    labels = labels.select(np.repeat(np.arange(len(labels)), num_groups))
    o = p.meshes.first_M[labels.mesh]
    at = s.b_N[labels.interval], p.kind_J[start], before_G[before], o
    labels = replace(labels, before=before)
    if p.has_sends:
        factor = np.where(labels.ahead == 1, p.last_factor, 1.0)  # 1: the last stage
        returned_s = p.return_s_BKOO[at] * factor
        stage_s = stage_s + returned_s
        fill_s = labels.fill_s + returned_s
        labels = replace(labels, fill_s=fill_s, owed_s=p.send_s_BKOO[at])
    return _seen(s, labels, stage_s, p.hop_s_BKOO[at], p.link_s_BKOO[at])


def _seen(
    s: PricingProgram, labels: Labels, stage_s: Floats, hop_s: Floats, link_s: Floats
) -> Labels:
    """Return the labels as seen from the stage before the hop."""
    n = labels.interval
    lo, most_s = s.lo_N[n], s.most_s_N[n]
    slowest_s = np.minimum(s.slack.step_s / lo, most_s) if s.serves_hops else np.inf
    ahead = labels.ahead + exact_deltas(hop_s, slowest_s)
    if s.form == "closed":
        # the interval counts further microbatches of the slowest stage
        slow = np.maximum(stage_s, link_s) > most_s
        fill_s = np.where(slow, _NEVER_S, labels.fill_s + 2 * hop_s)
        return replace(labels, fill_s=fill_s, ahead=ahead)
    behind_s = prefix_behind_s(lo, stage_s, labels.fill_s, hop_s, link_s)
    return replace(labels, fill_s=behind_s, ahead=ahead)


def _held(s: PricingProgram, ahead: Ints, lo: Ints) -> Ints:
    """Return the index F of a stage with `ahead` of `lo` microbatches in flight."""
    return np.minimum(np.minimum(ahead, lo), s.p.meshes.busy_s_BMFU.shape[2]) - 1


def _with_meshes(p: Problem, before: Ints) -> tuple[Ints, Ints]:
    """Return rows and meshes: each row once with every mesh of its group `before`."""
    sizes_G = np.array([len(members) for members in p.members_GM])
    rows = np.repeat(np.arange(len(before)), sizes_G[before])
    firsts = np.cumsum(sizes_G[before]) - sizes_G[before]
    place = np.arange(len(rows)) - firsts[rows]
    starts_G = np.cumsum(sizes_G) - sizes_G
    return rows, np.concatenate(p.members_GM)[starts_G[before[rows]] + place]


def _used(s: PricingProgram, labels: Labels) -> Floats:
    """Return what labels take of scarce limits; 0 if no continuation exceeds them."""
    n, scarce = labels.interval, s.p.scarce
    time_s = labels.fill_s + _sure_after_s_XA(s, labels).sum(axis=1)
    left_XQ = s.budget_NQ[n] - s.per_s_NQ[n] * time_s[:, None]
    may_cost = left_XQ.min(axis=1) - labels.cost
    with np.errstate(divide="ignore"):
        more_XR = may_cost[:, None] / s.duals_R[scarce]
    fits_XR = labels.used_XR + more_XR <= s.p.room_R[scarce]
    return np.where(fits_XR, 0.0, labels.used_XR)


def bound_ratios(s: PricingProgram, labels: Labels) -> Floats:
    """Return the least cost of labels' completions over the budget; inf if too slow."""
    n, start = labels.interval, labels.start
    place = np.minimum(labels.ahead, s.rest_NQJF.shape[3]) - 1
    spent_XQ = labels.cost[:, None] + s.rest_NQJF[n, :, start, place]
    # remaining layers account for their share of the terms after the pipeline
    after_s_XA = _sure_after_s_XA(s, labels)
    sure_s = labels.fill_s + ((1 - s.p.share_AJ[:, start].T) * after_s_XA).sum(axis=1)
    spent_XQ += s.per_s_NQ[n] * sure_s[:, None]
    least_s = after_s_XA.sum(axis=1) + s.p.fastest_s_BJ[s.b_N[n], start]
    # remaining layers take longer than what they hide
    least_s = np.maximum(least_s, labels.after_s_XA.sum(axis=1))
    late = labels.fill_s + least_s > s.left_s_N[n]
    return np.where(late, np.inf, (spent_XQ / s.budget_NQ[n]).max(axis=1))


def _sure_after_s_XA(s: PricingProgram, labels: Labels) -> Floats:
    """Return the terms after the pipeline that no earlier stages can hide."""
    hidden_XA = np.outer(labels.start > 0, s.p.is_drained_A)
    least_s_XA = s.p.least_after_s_AB.T[s.b_N[labels.interval]]
    return np.where(hidden_XA, least_s_XA, labels.after_s_XA)


def _reaches_threshold(s: PricingProgram, found: Labels) -> NDArray[np.bool_]:
    """Return whether pipelines compute enough whole microbatches for their cost."""
    n = found.interval
    count = s.hi_N[n]
    if s.form == "closed":
        left_s = s.left_s_N[n] - found.fill_s - found.after_s_XA.sum(axis=1)
        with np.errstate(divide="ignore"):
            more = np.floor(left_s / s.least_s_N[n] * (1 + ROUNDING))
        count = np.minimum(s.lo_N[n] + more, count)
    return found.cost < s.each_N[n] * count


def template_of(s: PricingProgram, pool: Labels, found: Labels, row: int) -> Template:
    """Return the template of a complete label."""
    p, n = s.p, int(found.interval[row])
    b, stages, start, labels, at = int(s.b_N[n]), [], 0, found, row
    while start < p.num_layers:
        parent = int(labels.parent[at])
        end = int(pool.start[parent])
        held = _held(s, pool.ahead[parent], s.lo_N[n])
        where = b, int(labels.mesh[at]), int(held), p.range_IJ[start, end]
        option = int(p.meshes.option_BMFU[where])
        stages.append(TemplateStage(option=option, layers=(start, end)))
        start, labels, at = end, pool, parent
    return Template(microbatch_size=p.microbatch_sizes[b], stages=tuple(stages))
