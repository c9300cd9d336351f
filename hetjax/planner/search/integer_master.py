# SPDX-License-Identifier: Apache-2.0
"""The integer master problem: integer copies of columns, and integer microbatches.

Owns the choice of columns, the number of copies, and the distribution of microbatches.
At a fixed step time, with the letters of `bound/restricted_master.py`:

    minimize    cost_N @ copies_N
    subject to  taken_NR.T @ copies_N <= room_R
                sequences_N @ copies_N >= G
                copies_N >= 0, integer

If the microbatches of these copies cannot add up to G, their numbers are variables,
too: copies_N <= microbatches_N <= most_N * copies_N, and sizes_N @ microbatches_N == G.
To get the fewest columns, the sum of the binary is_used_N is minimised, with
copies_N <= most_copies_N * is_used_N. Does not own where columns come from
(`bound/pricing.py`) nor the step time (`price_and_branch.py`).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cvxpy as cp
import numpy as np

from hetjax.planner.bound.restricted_master import most_sequences
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.solver import solve
from hetjax.planner.model.templates import Columns, Template

# Options of the solver. Its work is limited, not its time: plans must not depend on how
# busy the machine is.
_ANY = {"mip_rel_gap": 0.3, "mip_max_nodes": 500}
_CLOSE = {"mip_rel_gap": 0.005, "mip_max_nodes": 500}
_MOST_COLUMNS, _FEW_COLUMNS = 200, 60
_TIGHTENINGS = 20  # bisection steps for the shortest step with the same copies


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnCount:
    """Copies of one template with the same number of microbatches each."""

    template: Template
    num_copies: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidates:
    """Columns, and the most sequences that a copy of each computes in the step."""

    p: Problem
    columns: Columns
    step_s: float
    sequences_N: Ints

    @property
    def sizes_N(self) -> Ints:
        return self.columns.sizes_N

    @property
    def taken_NR(self) -> Floats:
        return self.columns.taken_NR

    @property
    def most_copies_N(self) -> Floats:
        return np.floor(self.p.room_R / np.maximum(self.taken_NR, 0.5)).min(axis=1)

    def rows(self, rows: Ints) -> "_Candidates":
        columns = self.columns.rows(rows)
        return replace(self, columns=columns, sequences_N=self.sequences_N[rows])

    def at(self, step_s: float) -> "_Candidates":
        sequences_N = most_sequences(self.p, self.columns, step_s)
        return replace(self, step_s=step_s, sequences_N=sequences_N)


def solve_integer_master(
    p: Problem,
    columns: Columns,
    step_s: float,
    duals_R: Floats,
    cost_R: Floats | None = None,
) -> list[ColumnCount]:
    """Return integer copies that compute the global batch within the step time; [] if
    none are found.

    Only the columns with most sequences per price at these duals are used. With
    `cost_R`, the copies have nearly the least cost.
    """
    c = _choice(p, columns, step_s, duals_R, _MOST_COLUMNS)
    if not c.columns:
        return []
    copies_N = cp.Variable(len(c.columns), integer=True)
    cost_N = c.taken_NR @ (duals_R if cost_R is None else cost_R)
    options = _ANY if cost_R is None else _CLOSE
    found_N = _solved(c, copies_N, cp.Minimize(cost_N @ copies_N), [], options)
    if found_N is None:
        return []
    return _shared_out(c, found_N) or _exact(c, cost_N, options)


def fewest_columns(
    p: Problem, columns: Columns, step_s: float, duals_R: Floats
) -> list[ColumnCount]:
    """Return integer copies of the fewest templates; [] if not easily found."""
    c = _choice(p, columns, step_s, duals_R, _FEW_COLUMNS)
    if not c.columns:
        return []
    copies_N = cp.Variable(len(c.columns), integer=True)
    is_used_N = cp.Variable(len(c.columns), boolean=True)
    limits = [copies_N <= cp.multiply(c.most_copies_N, is_used_N)]
    found_N = _solved(c, copies_N, cp.Minimize(cp.sum(is_used_N)), limits, _ANY)
    return [] if found_N is None else _shared_out(c, found_N)


def _choice(
    p: Problem,
    columns: Columns,
    step_s: float,
    duals_R: Floats,
    most_columns: int,
) -> _Candidates:
    """Return the columns with most sequences per price; of columns that take the same,
    only the best."""
    c = _Candidates(
        p=p,
        columns=columns,
        step_s=step_s,
        sequences_N=most_sequences(p, columns, step_s),
    )
    worth_N = c.sequences_N / (c.taken_NR @ duals_R)
    usable_N = (c.sequences_N > 0) & (c.taken_NR <= p.room_R).all(axis=1)
    order = np.argsort(-worth_N, kind="stable")
    order = order[usable_N[order]]
    kinds = np.column_stack([c.sizes_N, c.taken_NR])[order]
    _, firsts = np.unique(kinds, axis=0, return_index=True)
    return c.rows(order[np.sort(firsts)[:most_columns]])


def _solved(
    c: _Candidates,
    copies_N: cp.Variable,
    goal: cp.Minimize,
    limits: Sequence[cp.Constraint],
    options: dict[str, Any],
) -> Ints | None:
    """Return copies that could compute the global batch or more; None if not found."""
    check_deadline()
    limits = [
        *limits,
        copies_N >= 0,
        c.taken_NR.T @ copies_N <= c.p.room_R,
        c.sequences_N @ copies_N >= c.p.global_batch,
    ]
    with warnings.catch_warnings():  # the solver warns when its work limit is reached
        warnings.simplefilter("ignore", UserWarning)
        solve(cp.Problem(goal, limits), **options)
    if copies_N.value is None:
        return None
    found_N = np.rint(copies_N.value).astype(np.int64)
    enough = c.sequences_N @ found_N >= c.p.global_batch
    return found_N if enough and (c.taken_NR.T @ found_N <= c.p.room_R).all() else None


def _shared_out(c: _Candidates, copies_N: Ints) -> list[ColumnCount]:
    """Distribute the global batch over copies so that the step is shortest.

    [] if microbatches of these sizes do not add up to it.
    """
    used = np.flatnonzero(copies_N)
    c, copies_N = c.rows(used), copies_N[used]
    low_s, high_s = 0.0, c.step_s
    for _ in range(_TIGHTENINGS):
        middle_s = (low_s + high_s) / 2
        if _spared(c.at(middle_s), copies_N) is None:
            low_s = middle_s
        else:
            high_s = middle_s
    c = c.at(high_s)
    spared_N = _spared(c, copies_N)
    if spared_N is None:
        return []
    return _parts(c, copies_N, c.sequences_N // c.sizes_N * copies_N - spared_N)


def _spared(c: _Candidates, copies_N: Ints) -> Ints | None:
    """Return, by column, how many of their most microbatches the copies leave out to
    compute exactly the batch; None if impossible. Every copy keeps at least one."""
    most_N = c.sequences_N // c.sizes_N
    left = int(c.sequences_N @ copies_N) - c.p.global_batch
    if left < 0 or (most_N[copies_N > 0] == 0).any():
        return None
    spared_N = np.zeros_like(copies_N)
    for n in np.argsort(-c.sizes_N, kind="stable"):
        may = (int(most_N[n]) - 1) * int(copies_N[n])
        spared_N[n] = min(left // int(c.sizes_N[n]), may)
        left -= int(spared_N[n] * c.sizes_N[n])
    return spared_N if left == 0 else None


def _exact(
    c: _Candidates, cost_N: Floats, options: dict[str, Any]
) -> list[ColumnCount]:
    """Choose copies and microbatches together, so that they add up to the batch."""
    copies_N = cp.Variable(len(c.columns), integer=True)
    microbatches_N = cp.Variable(len(c.columns), integer=True)
    most_N = c.sequences_N // c.sizes_N
    limits = [
        microbatches_N >= copies_N,
        microbatches_N <= cp.multiply(most_N, copies_N),
        c.sizes_N @ microbatches_N == c.p.global_batch,
    ]
    goal = cp.Minimize(cost_N @ copies_N)
    found_N = _solved(c, copies_N, goal, limits, options)
    if found_N is None or microbatches_N.value is None:
        return []
    done_N = np.rint(microbatches_N.value).astype(np.int64)
    exact = c.sizes_N @ done_N == c.p.global_batch
    # the solver's tolerances or work limit may violate a constraint
    if not exact or (done_N < found_N).any() or (done_N > most_N * found_N).any():
        return []
    used = np.flatnonzero(found_N)
    return _parts(c.rows(used), found_N[used], done_N[used])


def _parts(c: _Candidates, copies_N: Ints, microbatches_N: Ints) -> list[ColumnCount]:
    """Spread the microbatches of each column over its copies as evenly as possible."""
    parts = []
    for template, num, total in zip(
        c.columns.templates, copies_N, microbatches_N, strict=True
    ):
        each, more = divmod(int(total), int(num))
        for copies, count in ((more, each + 1), (int(num) - more, each)):
            if copies:
                parts.append(
                    ColumnCount(
                        template=template,
                        num_copies=copies,
                        num_microbatches=count,
                    )
                )
    return parts
