# SPDX-License-Identifier: Apache-2.0
"""The restricted master problem: fractions of copies of the columns found so far.

Owns its linear programs at a fixed step time, which all share these letters (as in
`model/problem.py`; N columns):

    x_N         copies of each column                             (variable, >= 0)
    sequences_N what a copy does within the step time, at most the global batch G
    taken_NR    what a copy takes of each limit R on devices
    room_R      what there is of each limit
    duals_R     prices of one more of each limit

Programs are parametrised (disciplined parametrised programming) and kept by size, so
that CVXPY compiles each size once and HiGHS gets only numbers; columns that fill a size
up take and do nothing. Against `scipy.linprog` that is 1.5 % of a search's CPU time
more (a search of two kinds in 16 devices: 900 programs in 2.25 s and 1.89 s of 23 s,
medians of three). Does not own which columns there are (`column_generation.py`), nor
whole copies (`search/integer_master.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, cast

import cvxpy as cp
import numpy as np

from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.templates import Column, most_microbatches

STRICT = 1e-6  # relative: beyond what the linear programs' solver takes for equal
_LEAST_COLUMNS = 32  # of a program: smaller ones are filled up to it
_LEAST_PRICE = 1e-3  # of what a device could compute: free devices are hard to price
# the utility of a price, by what it is of the centre's: the least of slope * x + offset
_UTILITY = ((8.0, 0.0), (4.0, 0.4), (2.0, 1.0), (1.0, 1.6), (0.0, 2.6))
_SOLVING = Lock()  # programs are shared, and searches may run in threads


def most_sequences(p: Problem, columns: Sequence[Column], step_s: float) -> Ints:
    """Return what each column does in the step; no more than the global batch has."""
    if not columns:
        return np.zeros(0, dtype=np.int64)
    sizes_N = np.array([c.template.microbatch_size for c in columns])
    counts_N = most_microbatches(columns, step_s)
    sequences_N = sizes_N * np.minimum(counts_N, p.global_batch // sizes_N)
    if p.one_replica:
        return np.where(sequences_N == p.global_batch, sequences_N, 0)
    return sequences_N


def taken_by(columns: Sequence[Column], num_limits: int) -> Floats:
    """Return what a copy of each takes of each limit; shape (N, R)."""
    taken_NR = np.array([c.taken for c in columns], dtype=np.float64)
    return taken_NR.reshape(len(columns), num_limits)


@dataclass(frozen=True, kw_only=True, eq=False)
class MasterSolution:
    """The most sequences that fractions of copies do, whether these are the global
    batch, and how many more one more of each limit would bring."""

    sequences: float
    is_enough: bool
    duals_R: Floats


def solve_restricted_master(
    p: Problem, columns: Sequence[Column], step_s: float
) -> MasterSolution:
    """Do as much as the devices can within the step time.

    maximize    sequences_N @ x_N
    subject to  taken_NR.T @ x_N <= room_R      (duals_R)
    """
    if not columns:
        return MasterSolution(sequences=0.0, is_enough=False, duals_R=0 * p.room_R)
    sequences_N = most_sequences(p, columns, step_s)
    program = _master(_size(columns), len(p.room_R))
    found = program.solve(
        sequences_N=_filled(sequences_N, program.num_columns),
        taken_NR=_filled(taken_by(columns, len(p.room_R)), program.num_columns),
        room_R=p.room_R,
    )
    assert found is not None
    return MasterSolution(
        sequences=found.value,
        is_enough=found.value >= p.global_batch * (1 - 2 * STRICT),
        duals_R=found.duals["room"],
    )


def reaches(p: Problem, columns: Sequence[Column], step_s: float) -> bool:
    """Say whether fractions of copies do the global batch within the step time."""
    return solve_restricted_master(p, columns, step_s).is_enough


@dataclass(frozen=True, kw_only=True, eq=False)
class MinCost:
    """`duals_R` of devices, what they cost and what others would save with them; the
    sequences per unit of price that a template must do to save anything."""

    duals_R: Floats
    threshold: float


def min_cost_master(
    p: Problem, columns: Sequence[Column], step_s: float, cost_R: Floats
) -> MinCost:
    """Do the global batch at the least cost. The columns must reach the step time.

    minimize    (taken_NR @ cost_R) @ x_N
    subject to  taken_NR.T @ x_N <= room_R      (what others would save)
                sequences_N @ x_N >= G          (what a sequence costs)
    """
    program = _min_cost(_size(columns), len(p.room_R))
    taken_NR = taken_by(columns, len(p.room_R))
    sequences_N = most_sequences(p, columns, step_s)
    found = program.solve(
        cost_N=_filled(taken_NR @ cost_R, program.num_columns),
        sequences_N=_filled(sequences_N, program.num_columns),
        taken_NR=_filled(taken_NR, program.num_columns),
        room_R=p.room_R,
        batch=p.global_batch * (1 - 2 * STRICT),
    )
    assert found is not None
    return MinCost(
        duals_R=cost_R + found.duals["room"], threshold=1 / float(found.duals["batch"])
    )


def stabilised_duals(
    p: Problem, columns: Sequence[Column], step_s: float, centre_R: Floats
) -> Floats:
    """Return duals that no column contradicts, near the given ones.

    There are such as long as the columns do not reach the step time. Of them, those
    whose shares of the centre's, scaled to the same worth, are of most utility u, which
    is concave: no price far below the centre's is made up for by one far above.

        maximize    sum over R of u(duals_R / centre_R)
        subject to  taken_NR @ duals_R >= sequences_N / G
                    room_R @ duals_R == 1
                    duals_R >= a small part of centre_R, if there is room for it
    """
    centre_R = centre_R / float(centre_R @ p.room_R)
    program = _duals(_size(columns), len(centre_R))
    needed_N = most_sequences(p, columns, step_s) / p.global_batch * (1 + STRICT)
    least_R = _LEAST_PRICE * centre_R
    for floor_R in (least_R, 0 * least_R):
        found = program.solve(
            taken_NR=_filled(taken_by(columns, len(centre_R)), program.num_columns),
            needed_N=_filled(needed_N, program.num_columns),
            room_R=p.room_R,
            per_centre_R=np.divide(
                1, centre_R, out=np.zeros_like(centre_R), where=centre_R > 0
            ),
            floor_R=floor_R,
        )
        if found is not None:
            return np.maximum(found.variable, least_R)
    raise AssertionError("columns that reach the step time contradict all duals")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Solved:
    value: float
    variable: Floats
    duals: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Program:
    """A parametrised program for any numbers of one size."""

    num_columns: int
    variable: cp.Variable
    parameters: Mapping[str, cp.Parameter]
    constraints: Mapping[str, cp.Constraint]
    problem: cp.Problem

    def solve(self, **values: Floats | float) -> _Solved | None:
        """Solve it for these values of all parameters; None if there is no solution."""
        with _SOLVING:
            for name, parameter in self.parameters.items():
                parameter.value = values[name]
            self.problem.solve(solver=cp.HIGHS)
            if self.problem.status != cp.OPTIMAL:
                return None
            return _Solved(
                value=float(cast(float, self.problem.value)),
                variable=np.asarray(self.variable.value, dtype=np.float64),
                duals={name: c.dual_value for name, c in self.constraints.items()},
            )


@cache
def _master(num_columns: int, num_limits: int) -> _Program:
    x_N = cp.Variable(num_columns, nonneg=True)
    sequences_N = cp.Parameter(num_columns, nonneg=True)
    taken_NR = cp.Parameter((num_columns, num_limits), nonneg=True)
    room_R = cp.Parameter(num_limits, nonneg=True)
    within = taken_NR.T @ x_N <= room_R
    return _Program(
        num_columns=num_columns,
        variable=x_N,
        parameters={"sequences_N": sequences_N, "taken_NR": taken_NR, "room_R": room_R},
        constraints={"room": within},
        problem=cp.Problem(cp.Maximize(sequences_N @ x_N), [within]),
    )


@cache
def _min_cost(num_columns: int, num_limits: int) -> _Program:
    x_N = cp.Variable(num_columns, nonneg=True)
    cost_N = cp.Parameter(num_columns, nonneg=True)
    sequences_N = cp.Parameter(num_columns, nonneg=True)
    taken_NR = cp.Parameter((num_columns, num_limits), nonneg=True)
    room_R, batch = cp.Parameter(num_limits, nonneg=True), cp.Parameter(nonneg=True)
    within, enough = taken_NR.T @ x_N <= room_R, sequences_N @ x_N >= batch
    return _Program(
        num_columns=num_columns,
        variable=x_N,
        parameters={
            "cost_N": cost_N,
            "sequences_N": sequences_N,
            "taken_NR": taken_NR,
            "room_R": room_R,
            "batch": batch,
        },
        constraints={"room": within, "batch": enough},
        problem=cp.Problem(cp.Minimize(cost_N @ x_N), [within, enough]),
    )


@cache
def _duals(num_columns: int, num_limits: int) -> _Program:
    duals_R = cp.Variable(num_limits)
    taken_NR = cp.Parameter((num_columns, num_limits), nonneg=True)
    needed_N = cp.Parameter(num_columns, nonneg=True)
    room_R = cp.Parameter(num_limits, nonneg=True)
    per_centre_R = cp.Parameter(num_limits, nonneg=True)
    floor_R = cp.Parameter(num_limits, nonneg=True)
    share_R = cp.multiply(per_centre_R, duals_R)
    utility_R = cp.minimum(*(slope * share_R + offset for slope, offset in _UTILITY))
    limits = [
        taken_NR @ duals_R >= needed_N,
        room_R @ duals_R == 1,
        duals_R >= floor_R,
    ]
    return _Program(
        num_columns=num_columns,
        variable=duals_R,
        parameters={
            "taken_NR": taken_NR,
            "needed_N": needed_N,
            "room_R": room_R,
            "per_centre_R": per_centre_R,
            "floor_R": floor_R,
        },
        constraints={},
        problem=cp.Problem(cp.Maximize(cp.sum(utility_R)), limits),
    )


def _size(columns: Sequence[Column]) -> int:
    """The next power of two, so that few sizes are compiled."""
    return max(1 << (len(columns) - 1).bit_length() if columns else 0, _LEAST_COLUMNS)


def _filled(values: Floats | Ints, num_columns: int) -> Floats:
    """The values, by column, with zeros up to so many columns."""
    rest = np.zeros((num_columns - len(values), *values.shape[1:]))
    return np.concatenate([values.astype(np.float64), rest])
