# SPDX-License-Identifier: Apache-2.0
"""Solves the pricing problem: finds templates of positive reduced cost, or proves that
there are none.

Owns the use of the dynamic program (`partial_pipelines.py`) at a fixed step time and
duals. A template that computes n sequences and takes t_R of the limits has reduced cost
n - threshold * (duals_R @ t_R). Many microbatch counts are priced at once, as an
interval, for which the program is optimistic. An interval that only this optimism keeps
is split. A heuristic pass keeps only the best labels. If it finds nothing, an exact
pass keeps all of them, so that no column is missed.

Does not own the duals (`column_generation.py`).
"""

from dataclasses import dataclass, replace

import numpy as np

from hetjax.planner.bound.completion import least_work, slack_at
from hetjax.planner.bound.labels import Labels, halved, initial_intervals, refined
from hetjax.planner.bound.partial_pipelines import (
    PricingProgram,
    bound_ratios,
    grown_labels,
    interval_bound_ratios,
    template_of,
)
from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.templates import (
    ROUNDING,
    Column,
    Columns,
    Form,
    column,
    most_microbatches,
    stacked,
)

# per pass: the width of intervals, and the trades of time against cost that prune them
_PASSES = (
    (0.6, (0.75,)),
    (0.15, (0.75,)),
    (0.04, (0.75,)),
    (0.04, (0.0, 0.6, 1.2)),
)
# labels and intervals that a heuristic pass keeps; more for certified bounds
_BEAM: dict[Form, int] = {"closed": 60, "prefix": 100}
_MOST_INTERVALS: dict[Form, int] = {"closed": 40, "prefix": 100}
_MOST_COLUMNS = 100
_ENUMERATION_BEAM, _MOST_ENUMERATED, _FEW_COLUMNS = 400, 600, 100
_LESS_WORTH, _NUM_LESS = 0.5, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PricingResult:
    """Columns of positive reduced cost, ordered by sequences per price, most first.

    If there are none here, this proves that none exist only if `is_complete`.
    `num_labels` is the work that was needed.
    """

    columns: tuple[Column, ...] = ()
    is_complete: bool = True
    num_labels: int = 0


def solve_pricing(
    p: Problem,
    form: Form,
    step_s: float,
    duals_R: Floats,
    threshold: float,
    *,
    most_labels: int | None = None,
) -> PricingResult:
    """Return some of the best columns with at least `threshold` sequences per unit of
    price within the step time.

    The exact pass gives up after `most_labels` labels (0: there is only the heuristic
    pass).
    """
    few = _MOST_INTERVALS[form] if most_labels == 0 else None
    program = _program(p, form, step_s, duals_R, threshold, most_intervals=few)
    if program is None:
        return PricingResult()
    found = _heuristic(program)
    if found.columns or most_labels == 0:
        return found
    return _exact(program, most_labels)


def _heuristic(program: PricingProgram) -> PricingResult:
    """Price while keeping only the labels of least bound ratio."""
    found = grown_labels(
        program,
        _alive(program, _MOST_INTERVALS[program.form]),
        beam=_BEAM[program.form],
    )
    assert found is not None
    pool, complete = found
    columns = _better(program, pool, complete)
    return PricingResult(columns=columns, is_complete=False, num_labels=len(pool))


def _exact(program: PricingProgram, most_labels: int | None) -> PricingResult:
    """Price while keeping all labels, and split intervals that only optimism keeps."""
    num_labels = 0
    while True:
        found = grown_labels(program, _alive(program), most=most_labels)
        if found is None:
            return PricingResult(
                is_complete=False, num_labels=num_labels + (most_labels or 0)
            )
        pool, complete = found
        num_labels += len(pool)
        better = _better(program, pool, complete)
        kept = [program.intervals[n] for n in np.unique(complete.interval)]
        parts = [part for interval in kept for part in halved(interval, program.form)]
        if better or not kept or not parts:
            return PricingResult(
                columns=better,
                is_complete=not kept or bool(better),
                num_labels=num_labels,
            )
        program = replace(program, intervals=parts, trades=_PASSES[-1][1])


def enumerate_columns(
    p: Problem, form: Form, step_s: float, duals_R: Floats, threshold: float
) -> list[Column]:
    """Return many columns for the integer master to choose from.

    They have at least `threshold` sequences per price; lower values are tried as long
    as there are few columns. In the closed form, memory must hold the launch-ahead that
    slow hops need.
    """
    columns: list[Column] = []
    for n in range(_NUM_LESS):
        rung = threshold * _LESS_WORTH**n
        program = _program(
            p,
            form,
            step_s,
            duals_R,
            rung,
            most_intervals=_MOST_INTERVALS[form],
            serves_hops=form == "closed",
        )
        if program is None:
            continue
        found = grown_labels(
            program, _alive(program, _MOST_INTERVALS[form]), beam=_ENUMERATION_BEAM
        )
        assert found is not None
        columns = _columns(program, *found, _MOST_ENUMERATED)
        if len(columns) > _FEW_COLUMNS:
            break
    return [c for c in columns if c.serves_hops]


def _program(
    p: Problem,
    form: Form,
    step_s: float,
    duals_R: Floats,
    threshold: float,
    *,
    most_intervals: int | None = None,
    serves_hops: bool = False,
) -> PricingProgram | None:
    """Return the program of the intervals not ruled out; None if all are.

    With `most_intervals` it has only so many, those of least bound ratio.
    """
    slack = slack_at(p, form, step_s)
    sizes_B = np.array(p.microbatch_sizes)
    most_B = np.minimum(slack.most_B, p.global_batch // sizes_B)
    left_s_B = step_s - p.least_after_s_AB.sum(axis=0) - p.fastest_s_BJ[:, -1]
    work_s_B = least_work(p, duals_R) * threshold / sizes_B
    alive = list(initial_intervals(p, form, most_B, left_s_B, work_s_B))
    program, num_dropped = None, 0
    for ratio, trades in _PASSES:
        intervals = [part for wide in alive for part in refined(wide, form, ratio)]
        if not intervals:
            return program if num_dropped else None
        program = PricingProgram(
            p=p,
            form=form,
            slack=slack,
            duals_R=duals_R,
            threshold=threshold,
            intervals=intervals,
            trades=trades,
            serves_hops=serves_hops,
        )
        num_alive = len(_alive(program))
        alive = [intervals[n] for n in _alive(program, most_intervals)]
        num_dropped += num_alive - len(alive)
    return program


def _alive(program: PricingProgram, most_intervals: int | None = None) -> Ints:
    """Return the intervals that are not ruled out: the best of each count first."""
    share_N = interval_bound_ratios(program)
    alive_N = np.flatnonzero(share_N < 1)
    count_N = program.lo_N * len(program.p.microbatch_sizes) + program.b_N
    return alive_N[_best_of_each(count_N[alive_N], share_N[alive_N], most_intervals)]


def _best_of_each(kind_N: Ints, value_N: Floats, most: int | None) -> Ints:
    """Return the rows of least value: the best of each kind, then the second best, and
    so on."""
    order = np.lexsort((value_N, kind_N))
    is_first_N = np.diff(kind_N[order], prepend=-1) != 0
    firsts = np.flatnonzero(is_first_N)
    rank = np.arange(len(order)) - firsts[np.cumsum(is_first_N) - 1]
    return order[np.lexsort((value_N[order], rank))][:most]


def _columns(s: PricingProgram, pool: Labels, found: Labels, most: int) -> list[Column]:
    """Return the templates of the best complete pipelines, without repeats."""
    best = np.argsort(bound_ratios(s, found), kind="stable")[:most]
    templates = {template_of(s, pool, found, int(row)): None for row in best}
    return [column(s.p, template, s.form) for template in templates]


def _better(s: PricingProgram, pool: Labels, found: Labels) -> tuple[Column, ...]:
    """Return the columns that reach the threshold, the best first."""
    columns = _columns(s, pool, found, _MOST_COLUMNS)
    if not columns:
        return ()
    rows = stacked(columns)
    num_sequences = most_microbatches(rows, s.slack.step_s) * rows.sizes_N
    most = s.p.global_batch // rows.sizes_N * rows.sizes_N
    num_sequences = np.minimum(num_sequences, most)
    ratio = num_sequences / _prices(s, rows, num_sequences)
    order = np.argsort(-ratio, kind="stable")
    return tuple(columns[n] for n in order if ratio[n] >= s.threshold * (1 - ROUNDING))


def _prices(s: PricingProgram, columns: Columns, sequences_N: Ints) -> Floats:
    """Return the price of a copy of each column that computes so many sequences."""
    devices_R, work_R = np.split(s.duals_R, [len(s.p.room_R)])
    return columns.taken_NR @ devices_R + sequences_N * columns.weight_N * work_R.sum()
