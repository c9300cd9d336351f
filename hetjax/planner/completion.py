# SPDX-License-Identifier: Apache-2.0
"""What the rest of a pipeline must at least cost, for pruning the search.

Owns the time that a stage can have in a step whatever stands before and after it, and
from it the least cost of the layers before a stage. All are optimistic: nothing good is
pruned. Does not own the exact search (`suffixes.py`).

Letters of array names as in `problem.py`; V different places of a stage, X questions.
"""

from dataclasses import dataclass, fields

import numpy as np

from hetjax.planner.problem import Floats, Ints, Problem
from hetjax.planner.templates import ROUNDING, Form

_CHUNK = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Reach:
    """What stages could do in a step if all others were the fastest there are.

    `left_s_BMIJ` is the time for the microbatches of a stage on layers I to J. The same
    by `place_IJ` (-1: no layers), where stages are told apart only if they differ:
    `left_s_BMV`, what one microbatch takes at least, `each_s_BMFV` (inf: out of
    memory), and `more_s_BMV`, what the stage adds besides to the time of the pipeline:
    the hop to it, or what comes after the pipeline because it is the first, and its
    share in what comes after the pipeline because of the worst stage.
    """

    step_s: float
    left_s_BMIJ: Floats
    place_IJ: Ints
    left_s_BMV: Floats
    each_s_BMFV: Floats
    more_s_BMV: Floats

    @property
    def most_B(self) -> Ints:
        """The most microbatches of any stage, by microbatch size."""
        most_BMV = np.maximum(self.left_s_BMV, 0.0) / self.each_s_BMFV[:, :, 0]
        return (most_BMV.max(axis=(1, 2)) * (1 + ROUNDING)).astype(np.int64)


def reach(p: Problem, form: Form, step_s: float) -> Reach:
    """Return what is left of the step for every stage."""
    before_s_BI, first_M = p.fastest_s_BJ, p.meshes.first_M
    with np.errstate(invalid="ignore"):  # sizes at which nothing fits: inf - inf
        left_s_BMIJ = step_s - _after_s(p) - before_s_BI[:, None, :, None]
        if form == "closed":
            left_s_BMIJ -= (before_s_BI[:, -1:] - before_s_BI)[:, None, None, :]
    left_s_BMIJ = np.where(left_s_BMIJ > 0, left_s_BMIJ * (1 + ROUNDING), -1.0)
    place_IJ, start_V, end_V = _places(p, form)
    row_V = p.range_IJ[start_V, end_V]
    each_s_BMFV = p.meshes.busy_s_BMFU[..., row_V]
    if p.has_sends:
        send_s_BMK = p.send_s_BKOO.min(axis=3).swapaxes(1, 2)[:, first_M]
        return_s_BMK = p.return_s_BKOO.min(axis=2).swapaxes(1, 2)[:, first_M]
        sent_s_BMV = send_s_BMK[:, :, p.kind_J[end_V]] * (end_V < p.num_layers)
        returned_s_BMV = return_s_BMK[:, :, p.kind_J[start_V]] * (start_V > 0)
        each_s_BMFV += (sent_s_BMV + returned_s_BMV)[:, :, None]
    hop_s_BMK = p.hop_s_BKOO.min(axis=2).swapaxes(1, 2)[:, first_M]
    after_s_ABMV = p.after_s_ABOU[:, :, first_M][..., row_V]
    first_s_BMV = after_s_ABMV[p.is_first_A].sum(axis=0)
    first_s_BMV -= p.least_after_s_AB[p.is_first_A].sum(axis=0)[:, None, None]
    share_AV = p.share_AJ[:, end_V] - p.share_AJ[:, start_V]
    mean_s_BMV = (after_s_ABMV * share_AV[:, None, None]).sum(axis=0)
    return Reach(
        step_s=step_s,
        left_s_BMIJ=left_s_BMIJ,
        place_IJ=place_IJ,
        left_s_BMV=left_s_BMIJ[:, :, start_V, end_V],
        each_s_BMFV=each_s_BMFV,
        more_s_BMV=mean_s_BMV
        + np.where(start_V > 0, 2 * hop_s_BMK[:, :, p.kind_J[start_V]], first_s_BMV),
    )


def _after_s(p: Problem) -> Floats:
    """What comes after the pipeline because of any stage, the first being the best."""
    after_s_ABMU = p.after_s_ABOU[:, :, p.meshes.first_M]
    first_s_BMU = after_s_ABMU[p.is_first_A].sum(axis=0)
    after_s_BMIJ = (after_s_ABMU.sum(axis=0) - first_s_BMU)[..., p.range_IJ]
    after_s_BMIJ[:, :, 0] += first_s_BMU[..., p.range_IJ[0]]
    least_s_B = p.least_after_s_AB[p.is_first_A].sum(axis=0)
    after_s_BMIJ[:, :, 1:] += least_s_B[:, None, None, None]
    return after_s_BMIJ


def _places(p: Problem, form: Form) -> tuple[Ints, Ints, Ints]:
    """Number the ranges of layers by all that matters; the first of each number.

    In the prefix form the layers before count one by one.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Questions:
    """What is asked of the layers before a stage.

    The least cost of `lo` microbatches at a size where no stage takes more than
    `most_s` for each, and a second of getting through costs `per_s` more.
    """

    b_X: Ints
    lo_X: Ints
    most_s_X: Floats
    per_s_X: Floats

    def take(self, rows: Ints) -> "Questions":
        return Questions(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def least_cost(can: Reach, cost_M: Floats, asked: Questions) -> Floats:
    """Return the least cost of layers 0 to J for every question.

    Shape (X, J, F). F + 1 microbatches are in flight in the stage that ends at J; the
    last of F is "more than any stage can hold", without limits F = 0 stands for all.
    If the layers have a second less to do it, they cost at least `per_s` more.
    """
    num_held, num_ends = can.each_s_BMFV.shape[2], len(can.place_IJ)
    num_ahead = num_held + (num_held > 1)
    cost_XJF = np.full((len(asked.b_X), num_ends, num_ahead), np.inf)
    # those alike in depth and length of stages together
    order = np.lexsort((asked.most_s_X, np.minimum(asked.lo_X, num_held), asked.b_X))
    for of_b in np.split(order, np.flatnonzero(np.diff(asked.b_X[order])) + 1):
        for at in range(0, len(of_b), _CHUNK):
            rows = of_b[at : at + _CHUNK]
            found_XJF = _least_cost(can, cost_M, asked.take(rows))
            most = found_XJF.shape[2]
            cost_XJF[rows, :, :most] = found_XJF
            cost_XJF[rows, :, most:num_held] = found_XJF[:, :, -1:]
    cost_XJF[:, 0] = 0.0
    return cost_XJF


def _least_cost(can: Reach, cost_M: Floats, asked: Questions) -> Floats:
    """The same for one microbatch size, and for F up to the most in flight."""
    b, lo_X = int(asked.b_X[0]), asked.lo_X
    # no more are in flight than there are
    most = min(int(lo_X.max()), can.each_s_BMFV.shape[2])
    num_ends, num_places = len(can.place_IJ), can.each_s_BMFV.shape[3]
    places = _in_reach(can, b, int(lo_X.min()), float(asked.most_s_X.max()))
    stage_XFV = _stage_cost(can, cost_M, asked, most, places)
    new_V = np.full(num_places + 1, -1)
    new_V[places] = np.arange(len(places))
    place_IJ = new_V[can.place_IJ]
    # the stage before has one more in flight; more than can be held is too many,
    # unless that is because there are no more
    num_earlier = most + 1 if most == can.each_s_BMFV.shape[2] > 1 else most
    cost_XJF = np.full((len(lo_X), num_ends, num_earlier), np.inf)
    cost_XJF[:, 0] = 0.0
    earlier_F = np.minimum(np.arange(1, most + 1), num_earlier - 1)
    for j in range(1, num_ends):
        starts = np.flatnonzero(place_IJ[:j, j] >= 0)
        if len(starts):
            stage_XFI = stage_XFV[:, :, place_IJ[starts, j]]
            before_XFI = cost_XJF[:, starts[None], earlier_F[:, None]]
            cost_XJF[:, j, :most] = (stage_XFI + before_XFI).min(axis=2)
    return cost_XJF[:, :, :most]


def _stage_cost(
    can: Reach, cost_M: Floats, asked: Questions, most: int, places: Ints
) -> Floats:
    """The least cost of a stage at each of the places; shape (X, F, V)."""
    b = int(asked.b_X[0])
    held_XF = np.minimum(np.arange(most), asked.lo_X[:, None] - 1)
    each_s_MFV = can.each_s_BMFV[b, :, :most, places].transpose(1, 2, 0)
    more_s_MV, left_s_MV = can.more_s_BMV[b][:, places], can.left_s_BMV[b][:, places]
    through_s_MFV = each_s_MFV + more_s_MV[:, None]
    through_s_MFV = np.where(np.isfinite(through_s_MFV), through_s_MFV, 0.0)
    best_XFV = np.full((*held_XF.shape, len(places)), np.inf)
    all_alike = bool((asked.lo_X >= most).all())
    for m, cost in enumerate(cost_M):
        most_s_XV = np.minimum(
            left_s_MV[m] / asked.lo_X[:, None], asked.most_s_X[:, None]
        )
        at = slice(None) if all_alike else held_XF
        stage_XFV = asked.per_s_X[:, None, None] * through_s_MFV[m][at] + cost
        stage_XFV[each_s_MFV[m][at] > most_s_XV[:, None]] = np.inf
        np.minimum(best_XFV, stage_XFV, out=best_XFV)
    return best_XFV


def _in_reach(can: Reach, b: int, lo: int, most_s: float) -> Ints:
    """The places where some stage is fast enough."""
    most_s_MV = np.minimum(can.left_s_BMV[b] / lo, most_s)
    return np.flatnonzero((can.each_s_BMFV[b, :, 0] <= most_s_MV).any(axis=0))


def longest_stages(can: Reach, b_N: Ints, lo_N: Ints, most_s_N: Floats) -> Ints:
    """Return the earliest first layer of a stage that ends at J; J if there is none."""
    each_s_BV = can.each_s_BMFV[:, :, 0].min(axis=1)
    left_s_BV = can.left_s_BMV.max(axis=1)
    most_s_NV = np.minimum(left_s_BV[b_N] / lo_N[:, None], most_s_N[:, None])
    does_NV = each_s_BV[b_N] <= most_s_NV
    does_NIJ = does_NV[:, can.place_IJ] & (can.place_IJ >= 0)
    ends_J = np.arange(len(can.place_IJ))
    return np.where(does_NIJ.any(axis=1), does_NIJ.argmax(axis=1), ends_J)
