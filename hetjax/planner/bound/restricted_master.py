# SPDX-License-Identifier: Apache-2.0
"""Fractions of copies: what devices can do at a step time, by linear programming.

Owns the best use of the devices by given columns, and the cheapest. Does not own which
columns there are (`column_generation.py`), nor whole copies (`integer_master.py`).

Letters of array names as in `problem.py`; N columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.templates import Column, most_microbatches

STRICT = 1e-6  # relative: beyond what the linear programs' solver takes for equal


def most_sequences(p: Problem, columns: Sequence[Column], step_s: float) -> Ints:
    """Return what each column does in the step; no more than the global batch has."""
    sizes_N = np.array([c.template.microbatch_size for c in columns])
    counts_N = most_microbatches(columns, step_s)
    sequences_N = sizes_N * np.minimum(counts_N, p.global_batch // sizes_N)
    if p.one_replica:
        return np.where(sequences_N == p.global_batch, sequences_N, 0)
    return sequences_N


def reaches(p: Problem, columns: Sequence[Column], step_s: float) -> bool:
    """Say whether fractions of copies do the global batch within the step time."""
    return use(p, columns, step_s).is_enough


@dataclass(frozen=True, kw_only=True, eq=False)
class Use:
    """The most sequences that fractions of copies do, whether these are the global
    batch, and how many more one more of each limit would bring."""

    sequences: float
    is_enough: bool
    gains_R: Floats


def use(p: Problem, columns: Sequence[Column], step_s: float) -> Use:
    """Make the best use of the devices within the step time."""
    if not columns:
        return Use(sequences=0.0, is_enough=False, gains_R=0 * p.room_R)
    sequences_N = most_sequences(p, columns, step_s)
    found = linprog(
        -sequences_N, A_ub=taken_by(columns).T, b_ub=p.room_R, method="highs"
    )
    assert found.success, found.message
    return Use(
        sequences=-found.fun,
        is_enough=-found.fun >= p.global_batch * (1 - 2 * STRICT),
        gains_R=-found.ineqlin.marginals,
    )


def taken_by(columns: Sequence[Column]) -> Floats:
    """What a copy of each takes of each limit; shape (N, R)."""
    return np.array([c.taken for c in columns], dtype=np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Thrift:
    """`prices_R` of devices, what they cost and what others would save with them; the
    sequences per unit of price that a template must do to save anything."""

    prices_R: Floats
    worth: float


def thrift(
    p: Problem, columns: Sequence[Column], step_s: float, cost_R: Floats
) -> Thrift:
    """Do the global batch at the least cost with fractions of copies.

    The columns must reach the step time.
    """
    sequences_N = most_sequences(p, columns, step_s)
    found = linprog(
        taken_by(columns) @ cost_R,
        A_ub=np.vstack([taken_by(columns).T, -sequences_N]),
        b_ub=np.append(p.room_R, -p.global_batch * (1 - 2 * STRICT)),
        method="highs",
    )
    assert found.success, found.message
    *saved_R, of_sequence = -found.ineqlin.marginals
    return Thrift(prices_R=cost_R + np.array(saved_R), worth=1 / of_sequence)
