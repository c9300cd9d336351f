# SPDX-License-Identifier: Apache-2.0
"""The restricted master problem: fractions of copies of the columns found so far.

Owns its linear programs at a fixed step time, which all share these letters (as in
`model/problem.py`; N columns):

    x_N         copies of each column                             (variable, >= 0)
    sequences_N what a copy computes in the step time, at most the global batch G
    taken_NR    what a copy takes of each limit R, on devices and on work
    room_R      the capacity of each limit
    duals_R     prices of one more unit of each limit

Programs are parametrised (disciplined parametrised programming) and cached by size, so
CVXPY compiles each size once and HiGHS gets only numbers. Programs are padded to their
size with columns that take and compute nothing. Compared with `scipy.linprog` this
costs 1.5 % of a search's CPU time (a search of two kinds in 16 devices: 900 programs in
2.25 s and 1.89 s of 23 s, medians of three). Does not own which columns there are
(`column_generation.py`), nor whole copies (`search/integer_master.py`).
"""

from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, NamedTuple, cast

import cvxpy as cp
import numpy as np

from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.solver import solve
from hetjax.planner.model.templates import Columns, most_microbatches

STRICT = 1e-6  # relative: beyond the tolerance of the linear programs' solver
_LEAST_COLUMNS = 32  # of a program; smaller programs are padded
_LEAST_PRICE = 1e-3  # share of the centre's price; devices without price slow pricing
# utility of a price, x being its ratio to the centre's: the least slope * x + offset
_UTILITY = ((8.0, 0.0), (4.0, 0.4), (2.0, 1.0), (1.0, 1.6), (0.0, 2.6))
_SOLVING = Lock()  # programs are shared, and searches may run in threads


def most_sequences(p: Problem, columns: Columns, step_s: float) -> Ints:
    """Return the sequences of each column in the step, at most the global batch."""
    sizes_N = columns.sizes_N
    counts_N = most_microbatches(columns, step_s)
    sequences_N = sizes_N * np.minimum(counts_N, p.global_batch // sizes_N)
    if p.one_replica:
        return np.where(sequences_N == p.global_batch, sequences_N, 0)
    return sequences_N


@dataclass(frozen=True, kw_only=True, eq=False)
class MasterSolution:
    """The most sequences that fractions of copies compute, whether these are the global
    batch, and how many more one more unit of each limit would bring."""

    sequences: float
    is_enough: bool
    duals_R: Floats


def solve_restricted_master(
    p: Problem, columns: Columns, step_s: float
) -> MasterSolution:
    """Maximise what the devices compute within the step time.

    maximize    sequences_N @ x_N
    subject to  taken_NR.T @ x_N <= room_R      (duals_R)
    """
    room_R = p.room_at(step_s)
    sequences_N = most_sequences(p, columns, step_s)
    found = _solved(
        _master(_size(columns), len(room_R)),
        sequences_N=sequences_N,
        taken_NR=_taken_NR(p, columns, sequences_N),
        room_R=room_R,
    )
    assert found is not None
    return MasterSolution(
        sequences=found.value,
        is_enough=found.value >= p.global_batch * (1 - 2 * STRICT),
        duals_R=found.duals[0],
    )


def reaches(p: Problem, columns: Columns, step_s: float) -> bool:
    """Return whether fractions of copies compute the batch within the step time."""
    return solve_restricted_master(p, columns, step_s).is_enough


@dataclass(frozen=True, kw_only=True, eq=False)
class MinCost:
    """`duals_R`: each device's cost plus what other columns would save with it.
    `threshold`: the sequences per unit of price from which a template saves cost."""

    duals_R: Floats
    threshold: float


def min_cost_master(
    p: Problem, columns: Columns, step_s: float, cost_R: Floats
) -> MinCost:
    """Compute the global batch at the least cost. The columns must reach the step time.

    minimize    (taken_NR @ cost_R) @ x_N
    subject to  taken_NR.T @ x_N <= room_R      (what others would save)
                sequences_N @ x_N >= G          (what a sequence costs)
    """
    sequences_N = most_sequences(p, columns, step_s)
    taken_NR, room_R = _taken_NR(p, columns, sequences_N), p.room_at(step_s)
    found = _solved(
        _min_cost(_size(columns), len(room_R)),
        cost_N=taken_NR @ cost_R,
        sequences_N=sequences_N,
        taken_NR=taken_NR,
        room_R=room_R,
        batch=p.global_batch * (1 - 2 * STRICT),
    )
    assert found is not None
    saved_R, batch = found.duals
    return MinCost(duals_R=cost_R + saved_R, threshold=1 / float(batch))


def stabilised_duals(
    p: Problem, columns: Columns, step_s: float, centre_R: Floats
) -> Floats:
    """Return duals that no column contradicts, near `centre_R`.

    They exist as long as the columns do not reach the step time. The program maximises
    the utility u of their ratios to the centre's duals, both scaled to the same worth.
    u is concave, so a price far above the centre's cannot make up for one far below.

        maximize    sum over R of u(duals_R / centre_R)
        subject to  taken_NR @ duals_R >= sequences_N / G
                    room_R @ duals_R == 1
                    duals_R >= a small part of centre_R, if that is feasible
    """
    room_R, sequences_N = p.room_at(step_s), most_sequences(p, columns, step_s)
    centre_R = centre_R / float(centre_R @ room_R)
    needed_N = sequences_N / p.global_batch * (1 + STRICT)
    shares_R = np.divide(1, centre_R, out=np.zeros_like(centre_R), where=centre_R > 0)
    least_R = _LEAST_PRICE * centre_R
    for floor_R in (least_R, 0 * least_R):
        found = _solved(
            _duals(_size(columns), len(room_R)),
            taken_NR=_taken_NR(p, columns, sequences_N),
            needed_N=needed_N,
            room_R=room_R,
            per_centre_R=shares_R,
            floor_R=floor_R,
        )
        if found is not None:
            return np.maximum(found.variable, least_R)
    raise AssertionError("columns that reach the step time contradict all duals")


class _Solved(NamedTuple):
    value: float
    variable: Floats
    duals: list[Any]  # one per constraint, in order


def _solved(program: cp.Problem, **values: Floats | Ints | float) -> _Solved | None:
    """Solve the program for these parameter values; None if there is no solution.

    Values for fewer columns than the program has are padded with zeros.
    """
    with _SOLVING:
        for parameter in program.parameters():
            value = np.asarray(values[parameter.name()], dtype=np.float64)
            filled = np.zeros(parameter.shape)
            filled[tuple(map(slice, value.shape))] = value
            parameter.value = filled
        solve(program)
        if program.status != cp.OPTIMAL:
            return None
        return _Solved(
            value=float(cast(float, program.value)),
            variable=np.asarray(program.variables()[0].value, dtype=np.float64),
            duals=[constraint.dual_value for constraint in program.constraints],
        )


@cache
def _master(num_columns: int, num_limits: int) -> cp.Problem:
    x_N = cp.Variable(num_columns, nonneg=True)
    sequences_N = _parameter("sequences_N", num_columns)
    within = _within(x_N, num_limits)
    return cp.Problem(cp.Maximize(sequences_N @ x_N), [within])


@cache
def _min_cost(num_columns: int, num_limits: int) -> cp.Problem:
    x_N = cp.Variable(num_columns, nonneg=True)
    cost_N = _parameter("cost_N", num_columns)
    enough = _parameter("sequences_N", num_columns) @ x_N >= _parameter("batch")
    within = _within(x_N, num_limits)
    return cp.Problem(cp.Minimize(cost_N @ x_N), [within, enough])


@cache
def _duals(num_columns: int, num_limits: int) -> cp.Problem:
    duals_R = cp.Variable(num_limits)
    share_R = cp.multiply(_parameter("per_centre_R", num_limits), duals_R)
    utility_R = cp.minimum(*(slope * share_R + offset for slope, offset in _UTILITY))
    limits = [
        _parameter("taken_NR", num_columns, num_limits) @ duals_R
        >= _parameter("needed_N", num_columns),
        _parameter("room_R", num_limits) @ duals_R == 1,
        duals_R >= _parameter("floor_R", num_limits),
    ]
    return cp.Problem(cp.Maximize(cp.sum(utility_R)), limits)


def _within(x_N: cp.Variable, num_limits: int) -> cp.Constraint:
    taken_NR = _parameter("taken_NR", x_N.size, num_limits)
    return taken_NR.T @ x_N <= _parameter("room_R", num_limits)


def _parameter(name: str, *shape: int) -> cp.Parameter:
    return cp.Parameter(shape, name=name, nonneg=True)


def _size(columns: Columns) -> int:
    """Return the number of columns of a program: a power of two, so that few sizes are
    compiled."""
    num = 1 << max(len(columns) - 1, 0).bit_length()
    return max(num, _LEAST_COLUMNS)


def _taken_NR(p: Problem, columns: Columns, sequences_N: Ints) -> Floats:
    """Return what a copy takes of each limit; of work, in proportion to sequences."""
    if p.work_limit is None:
        return columns.taken_NR
    return np.column_stack([columns.taken_NR, columns.weight_N * sequences_N])
