# SPDX-License-Identifier: Apache-2.0
"""Completion bounds: the least cost of the rest of a pipeline, for pruning labels.

Owns the slack: the time that a stage can have in a step, whatever stands before and
after it. Owns the least cost of the layers before a stage, which follows from the
slack. Both are optimistic, so no column is pruned. Does not own the exact search
(`partial_pipelines.py`).

Letters of array names as in `model/problem.py`; V different places of a stage, S
options by rank, X queries.
"""

from dataclasses import dataclass, fields

import numpy as np

from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.templates import ROUNDING, Form

_CHUNK = 100_000  # numbers in a table, so that it stays in a processor's cache


@dataclass(frozen=True, kw_only=True, eq=False)
class Slack:
    """The time of each stage in a step if all other stages were the fastest possible.

    `left_s_BMIJ` is the time for the microbatches of a stage on layers I to J. The
    other tables are by place V, `place_IJ` (-1: no layers): stages with equal costs
    share a place. Within a place they are by rank S of options, those that hold more
    microbatches first. `option_BSV` is the option, `left_s_BSV` the time for its
    microbatches, and `each_s_BSV` the least time of one microbatch (inf: out of
    memory). `more_s_BSV` is what the stage adds otherwise to the pipeline's time: the
    hop to it, or for the first stage its terms after the pipeline, plus its share of
    the worst stage's terms. `num_holding_BFV` options hold F + 1 microbatches.
    `weight_BSV` is what a sequence takes of the limit on work, if there is one.
    """

    step_s: float
    left_s_BMIJ: Floats
    place_IJ: Ints
    option_BSV: Ints
    left_s_BSV: Floats
    each_s_BSV: Floats
    more_s_BSV: Floats
    num_holding_BFV: Ints
    weight_BSV: Floats | None

    @property
    def most_B(self) -> Ints:
        """The most microbatches of any stage, by microbatch size."""
        most_BSV = np.maximum(self.left_s_BSV, 0.0) / self.each_s_BSV
        return (most_BSV.max(axis=(1, 2)) * (1 + ROUNDING)).astype(np.int64)


def slack_at(p: Problem, form: Form, step_s: float) -> Slack:
    """Return the slack of every stage in the step."""
    before_s_BI = p.fastest_s_BJ
    with np.errstate(invalid="ignore"):  # inf - inf at sizes where nothing fits
        left_s_BOIJ = step_s - _after_s(p) - before_s_BI[:, None, :, None]
        if form == "closed":
            left_s_BOIJ -= (before_s_BI[:, -1:] - before_s_BI)[:, None, None, :]
    left_s_BOIJ = np.where(left_s_BOIJ > 0, left_s_BOIJ * (1 + ROUNDING), -1.0)
    place_IJ, start_V, end_V = _places(p, form)
    row_V = p.range_IJ[start_V, end_V]
    held_BOV = p.most_in_flight_BOU[:, :, row_V]
    option_BSV = _ranks(p, held_BOV, row_V)
    held_F = np.arange(1, p.meshes.busy_s_BMFU.shape[2] + 1)

    def ranked(values_BOV: Floats) -> Floats:
        return np.take_along_axis(values_BOV, option_BSV, axis=1)

    each_s_BOV = np.where(held_BOV > 0, _each_s(p, start_V, end_V), np.inf)
    weight_BSV = None
    if p.work_limit is not None:
        weight_OV = p.work_limit.weight_OU[:, row_V]
        weight_BSV = ranked(np.broadcast_to(weight_OV, each_s_BOV.shape))
    holds_BFSV = ranked(held_BOV.astype(float))[:, None] >= held_F[:, None, None]
    return Slack(
        step_s=step_s,
        left_s_BMIJ=left_s_BOIJ[:, p.meshes.first_M],
        place_IJ=place_IJ,
        option_BSV=option_BSV,
        left_s_BSV=ranked(left_s_BOIJ[:, :, start_V, end_V]),
        each_s_BSV=ranked(each_s_BOV),
        more_s_BSV=ranked(_more_s(p, start_V, end_V)),
        num_holding_BFV=holds_BFSV.sum(axis=2),
        weight_BSV=weight_BSV,
    )


def _ranks(p: Problem, held_BOV: Ints, row_V: Ints) -> Ints:
    """Return the options by place, those that hold more first.

    If memory never limits the microbatches in flight, there is one option per mesh.
    """
    if not p.holds_all:
        order_BSV = np.argsort(-held_BOV, axis=1, kind="stable")
        return order_BSV[:, : max(1, int((held_BOV > 0).sum(axis=1).max()))]
    option_BMV = p.meshes.option_BMFU[:, :, 0, row_V]
    held_BMV = np.take_along_axis(held_BOV, option_BMV, axis=1)
    order_BSV = np.argsort(-held_BMV, axis=1, kind="stable")
    return np.take_along_axis(option_BMV, order_BSV, axis=1)


def _each_s(p: Problem, start_V: Ints, end_V: Ints) -> Floats:
    """Return the least time of a microbatch at each place under each option."""
    row_V = p.range_IJ[start_V, end_V]
    each_s_BOV = np.nan_to_num(p.busy_s_BOU[..., row_V], nan=np.inf)
    if p.has_sends:
        sent_s_BOK = p.send_s_BKOO.min(axis=3).swapaxes(1, 2)
        returned_s_BOK = p.return_s_BKOO.min(axis=2).swapaxes(1, 2)
        each_s_BOV += sent_s_BOK[:, :, p.kind_J[end_V]] * (end_V < p.num_layers)
        each_s_BOV += returned_s_BOK[:, :, p.kind_J[start_V]] * (start_V > 0)
    return each_s_BOV


def _more_s(p: Problem, start_V: Ints, end_V: Ints) -> Floats:
    """Return what a stage adds to the pipeline's time besides its microbatches."""
    after_s_ABOV = p.after_s_ABOU[..., p.range_IJ[start_V, end_V]]
    share_AV = p.share_AJ[:, end_V] - p.share_AJ[:, start_V]
    mean_s_BOV = (after_s_ABOV * share_AV[:, None, None]).sum(axis=0)
    first_s_BOV = after_s_ABOV[p.sure_of_first_A].sum(axis=0)
    first_s_BOV -= p.least_after_s_AB[p.sure_of_first_A].sum(axis=0)[:, None, None]
    hop_s_BOK = p.hop_s_BKOO.min(axis=2).swapaxes(1, 2)
    hop_s_BOV = 2 * hop_s_BOK[:, :, p.kind_J[start_V]]
    return mean_s_BOV + np.where(start_V > 0, hop_s_BOV, first_s_BOV)


def _after_s(p: Problem) -> Floats:
    """Return the least terms after a pipeline with a given stage, by that stage; if it
    is not the first, the first stage is the best possible."""
    first_s_BOU = p.after_s_ABOU[p.sure_of_first_A].sum(axis=0)
    after_s_BOIJ = (p.after_s_ABOU.sum(axis=0) - first_s_BOU)[..., p.range_IJ]
    after_s_BOIJ[:, :, 0] += first_s_BOU[..., p.range_IJ[0]]
    least_s_B = p.least_after_s_AB[p.sure_of_first_A].sum(axis=0)
    after_s_BOIJ[:, :, 1:] += least_s_B[:, None, None, None]
    return after_s_BOIJ


def _places(p: Problem, form: Form) -> tuple[Ints, Ints, Ints]:
    """Give ranges of layers with equal costs the same number; return the numbers, and
    the first range with each number.

    In the prefix form these ranges also have equally many layers before them.
    """
    starts, ends = np.triu_indices(p.num_layers + 1, k=1)
    before = starts if form == "prefix" else np.where(starts, p.kind_J[starts], -1)
    after = np.where(ends < p.num_layers, p.kind_J[ends], -1)
    matters = np.column_stack([p.range_IJ[starts, ends], starts == 0, before, after])
    _, firsts, places = np.unique(
        matters, axis=0, return_index=True, return_inverse=True
    )
    place_IJ = np.full_like(p.range_IJ, -1)
    place_IJ[starts, ends] = places.reshape(-1)
    return place_IJ, starts[firsts], ends[firsts]


def least_work(p: Problem, duals_R: Floats) -> Floats:
    """Return the least cost times seconds of a microbatch, by microbatch size.

    inf at a size at which some layer fits nowhere.
    """
    cost_O1 = (p.taken_OR @ duals_R[: len(p.room_R)])[:, None]
    fits_BOL = np.isfinite(p.layer_s_BOL)
    work_BOL = np.where(fits_BOL, p.layer_s_BOL, 0.0) * cost_O1
    return np.where(fits_BOL, work_BOL, np.inf).min(axis=1).sum(axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class CompletionQueries:
    """Queries X for the least cost of the layers before a stage.

    Each asks for the least cost of `lo` microbatches of size `b`, where no stage takes
    more than `most_s` for each. A second of passing through the layers costs `per_s`,
    and a unit of the limit on work costs `per_weight`.
    """

    b_X: Ints
    lo_X: Ints
    most_s_X: Floats
    per_s_X: Floats
    per_weight_X: Floats

    def select(self, rows: Ints) -> "CompletionQueries":
        return CompletionQueries(
            **{f.name: getattr(self, f.name)[rows] for f in fields(self)}
        )


def least_cost(slack: Slack, cost_O: Floats, asked: CompletionQueries) -> Floats:
    """Return the least cost of layers 0 to J for every query.

    Shape (X, J, F). F + 1 microbatches are in flight in the stage that ends at J. The
    last F is "more than any stage can hold". If memory is no limit, F = 0 stands for
    all. With a second less for the layers, they cost at least `per_s` more.
    """
    num_held, num_ends = slack.num_holding_BFV.shape[1], len(slack.place_IJ)
    num_ahead = num_held + (num_held > 1)
    cost_XJF = np.full((len(asked.b_X), num_ends, num_ahead), np.inf)
    # process queries with similar depth and stage times together
    order = np.lexsort((asked.most_s_X, np.minimum(asked.lo_X, num_held), asked.b_X))
    num_rows = max(_CHUNK // slack.option_BSV[0].size, 16)
    for of_b in np.split(order, np.flatnonzero(np.diff(asked.b_X[order])) + 1):
        for at in range(0, len(of_b), num_rows):
            rows = of_b[at : at + num_rows]
            found_XFJ = _least_cost(slack, cost_O, asked.select(rows))
            most = found_XFJ.shape[1]
            cost_XJF[rows, :, :most] = found_XFJ.swapaxes(1, 2)
            cost_XJF[rows, :, most:num_held] = found_XFJ[:, -1, :, None]
    cost_XJF[:, 0] = 0.0
    return cost_XJF


def _least_cost(slack: Slack, cost_O: Floats, asked: CompletionQueries) -> Floats:
    """Return `least_cost` for one microbatch size, F up to the most in flight; shape
    (X, F, J)."""
    b, lo_X = int(asked.b_X[0]), asked.lo_X
    num_held, num_ends = slack.num_holding_BFV.shape[1], len(slack.place_IJ)
    most = min(int(lo_X.max()), num_held)  # no more are in flight than there are
    places = _in_reach(slack, b, int(lo_X.min()), float(asked.most_s_X.max()))
    stage_XFV = _stage_cost(slack, cost_O, asked, most, places)
    new_V = np.full(slack.each_s_BSV.shape[2] + 1, -1)
    new_V[places] = np.arange(len(places))
    place_IJ = new_V[slack.place_IJ]
    # the last F: more than any stage can hold, or no more than there are microbatches
    too_many = num_held > 1 and most == num_held
    cost_XFJ = np.full((len(lo_X), most + 1, num_ends), np.inf)
    cost_XFJ[:, :, 0] = 0.0
    for j in range(1, num_ends):
        starts = np.flatnonzero(place_IJ[:j, j] >= 0)
        if not len(starts):
            continue
        first, end = starts[0], starts[-1] + 1
        # the last place has cost inf, for ranges where no stage is fast enough
        total_XFI = stage_XFV[:, :, place_IJ[first:end, j]]
        # the stage before has one more in flight
        total_XFI += cost_XFJ[:, 1:, first:end]
        cost_XFJ[:, :most, j] = total_XFI.min(axis=2)
        if not too_many:
            cost_XFJ[:, most, j] = cost_XFJ[:, most - 1, j]
    return cost_XFJ[:, :most]


def _stage_cost(
    slack: Slack, cost_O: Floats, asked: CompletionQueries, most: int, places: Ints
) -> Floats:
    """Return the least cost of a stage at each of the places, and inf as the last;
    shape (X, F, V + 1)."""
    b = int(asked.b_X[0])
    each_s_SV, left_s_SV = (
        slack.each_s_BSV[b][:, places],
        slack.left_s_BSV[b][:, places],
    )
    through_s_SV = each_s_SV + slack.more_s_BSV[b][:, places]
    through_s_SV = np.where(np.isfinite(through_s_SV), through_s_SV, 0.0)
    most_s_XSV = np.minimum(
        left_s_SV / asked.lo_X[:, None, None], asked.most_s_X[:, None, None]
    )
    stage_XSV = asked.per_s_X[:, None, None] * through_s_SV
    stage_XSV += cost_O[slack.option_BSV[b][:, places]]
    if slack.weight_BSV is not None:
        weight_SV = slack.weight_BSV[b][:, places]
        stage_XSV += asked.per_weight_X[:, None, None] * weight_SV
    stage_XSV[each_s_SV > most_s_XSV] = np.inf
    num_holding_FV = slack.num_holding_BFV[b, :most][:, places]
    if most == 1:
        best_XFV = stage_XSV.min(axis=1, keepdims=True)
    else:
        np.minimum.accumulate(stage_XSV, axis=1, out=stage_XSV)
        best_XFV = stage_XSV[:, num_holding_FV - 1, np.arange(len(places))]
    best_XFV[:, num_holding_FV == 0] = np.inf
    if (asked.lo_X < most).any():  # no more are in flight than there are
        held_XF = np.minimum(np.arange(most), asked.lo_X[:, None] - 1)
        best_XFV = np.take_along_axis(best_XFV, held_XF[:, :, None], axis=1)
    nowhere_XF1 = np.full((*best_XFV.shape[:2], 1), np.inf)
    return np.concatenate([best_XFV, nowhere_XF1], axis=2)


def _in_reach(slack: Slack, b: int, lo: int, most_s: float) -> Ints:
    """Return the places where some stage is fast enough."""
    most_s_SV = np.minimum(slack.left_s_BSV[b] / lo, most_s)
    return np.flatnonzero((slack.each_s_BSV[b] <= most_s_SV).any(axis=0))


def longest_stages(slack: Slack, b_N: Ints, lo_N: Ints, most_s_N: Floats) -> Ints:
    """Return the earliest first layer of a stage that ends at J; J if there is none."""
    each_s_BV = slack.each_s_BSV.min(axis=1)
    left_s_BV = slack.left_s_BSV.max(axis=1)
    most_s_NV = np.minimum(left_s_BV[b_N] / lo_N[:, None], most_s_N[:, None])
    does_NV = each_s_BV[b_N] <= most_s_NV
    does_NIJ = does_NV[:, slack.place_IJ] & (slack.place_IJ >= 0)
    ends_J = np.arange(len(slack.place_IJ))
    return np.where(does_NIJ.any(axis=1), does_NIJ.argmax(axis=1), ends_J)
