# SPDX-License-Identifier: Apache-2.0
"""Whole copies of templates, and whole microbatches, by mixed-integer programming.

Owns which of some columns are taken, how often, and how their microbatches are shared
out. Does not own where columns come from (`pricing.py`) nor the step time
(`master.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np

from hetjax.planner.problem import Floats, Ints, Problem
from hetjax.planner.relaxation import most_sequences
from hetjax.planner.templates import Column, Template

# options of the solver: plans must not depend on how busy the machine is, so its work
# is limited and not its time
_ANY = {"mip_max_nodes": 2000}
_CHEAP = {"mip_rel_gap": 0.005, "mip_max_nodes": 2000}
_QUICK = {"mip_rel_gap": 0.2, "mip_max_nodes": 50}
_MOST_COLUMNS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Copies of one template that do the same number of microbatches each."""

    template: Template
    num_copies: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Choice:
    """What can be chosen: columns, the most that each does and takes, the variables."""

    columns: tuple[Column, ...]
    taken_NR: Floats
    most_copies_N: Ints
    copies_N: cp.Variable
    microbatches_N: cp.Variable
    limits: list[cp.Constraint]


def whole_copies(
    p: Problem, columns: Sequence[Column], step_s: float, price_R: Floats
) -> list[Copies]:
    """Take whole copies that do the global batch within the step time; none if none.

    Of those columns that at these prices do most for what they take.
    """
    c = _choice(p, columns, step_s, price_R)
    return _solved(c, cp.Minimize(0), c.limits, _ANY) if c else []


def cheapest_copies(
    p: Problem,
    columns: Sequence[Column],
    step_s: float,
    price_R: Floats,
    cost_R: Floats,
) -> list[Copies]:
    """Take those of them that cost nearly the least, by what devices cost."""
    c = _choice(p, columns, step_s, price_R)
    if c is None:
        return []
    cost = (c.taken_NR @ cost_R) @ c.copies_N
    return _solved(c, cp.Minimize(cost), c.limits, _CHEAP)


def fewest_templates(
    p: Problem, columns: Sequence[Column], step_s: float, price_R: Floats
) -> list[Copies]:
    """Take copies of few distinct templates, if such are easily found."""
    c = _choice(p, columns, step_s, price_R)
    if c is None:
        return []
    is_used_N = cp.Variable(len(c.columns), boolean=True)
    limits = [*c.limits, c.copies_N <= cp.multiply(c.most_copies_N, is_used_N)]
    return _solved(c, cp.Minimize(cp.sum(is_used_N)), limits, _QUICK)


def _best_columns(
    p: Problem, columns: Sequence[Column], step_s: float, price_R: Floats
) -> list[Column]:
    """Those that do most for their price, of those that take the same the best."""
    sequences_N = most_sequences(p, columns, step_s)
    taken_NR = np.array([c.taken for c in columns], dtype=np.float64)
    worth_N = sequences_N / np.maximum(taken_NR @ price_R, 1e-30)
    best: dict[tuple[object, ...], Column] = {}
    for n in np.argsort(-worth_N, kind="stable"):
        c = columns[n]
        if sequences_N[n] and (taken_NR[n] <= p.room_R).all():
            best.setdefault((c.template.microbatch_size, *c.taken), c)
    return list(best.values())[:_MOST_COLUMNS]


def _choice(
    p: Problem, columns: Sequence[Column], step_s: float, price_R: Floats
) -> _Choice | None:
    """None if no column does anything in that time."""
    best = _best_columns(p, columns, step_s, price_R)
    if not best:
        return None
    sizes_N = np.array([c.template.microbatch_size for c in best])
    most_N = most_sequences(p, best, step_s) // sizes_N
    taken_NR = np.array([c.taken for c in best], dtype=np.float64)
    copies_N = cp.Variable(len(best), integer=True)
    microbatches_N = cp.Variable(len(best), integer=True)
    most_copies_NR = p.room_R / np.maximum(taken_NR, 0.5)
    return _Choice(
        columns=tuple(best),
        taken_NR=taken_NR,
        most_copies_N=most_copies_NR.min(axis=1).astype(np.int64),
        copies_N=copies_N,
        microbatches_N=microbatches_N,
        limits=[
            copies_N >= 0,
            taken_NR.T @ copies_N <= p.room_R,
            microbatches_N >= copies_N,
            microbatches_N <= cp.multiply(most_N, copies_N),
            sizes_N @ microbatches_N == p.global_batch,
        ],
    )


def _solved(
    c: _Choice,
    wish: cp.Minimize,
    limits: list[cp.Constraint],
    options: dict[str, Any],
) -> list[Copies]:
    problem = cp.Problem(wish, limits)
    problem.solve(solver=cp.HIGHS, **options)
    copies_N, microbatches_N = c.copies_N.value, c.microbatches_N.value
    if copies_N is None or microbatches_N is None:
        return []
    copies = np.rint(copies_N).astype(int)
    microbatches = np.rint(microbatches_N).astype(int)
    return [
        part
        for used, num, total in zip(c.columns, copies, microbatches, strict=True)
        if num
        for part in _shared_out(used, int(num), int(total))
    ]


def _shared_out(c: Column, num_copies: int, num_microbatches: int) -> list[Copies]:
    """Spread microbatches over copies as evenly as possible."""
    each, more = divmod(num_microbatches, num_copies)
    parts = [(more, each + 1), (num_copies - more, each)]
    return [
        Copies(template=c.template, num_copies=n, num_microbatches=m)
        for n, m in parts
        if n
    ]
