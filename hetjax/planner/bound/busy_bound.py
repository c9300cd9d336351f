# SPDX-License-Identifier: Apache-2.0
"""Lower bound on the step time, from devices that never wait.

Owns the linear program that distributes layers and sequences among devices, ignoring
pipelines, and the bound that its duals prove. Does not own the meaning of a limit on
work (`cut_bound.py`).

    y_P       share of the batch for which layers of one kind run under one option
    busy_PC   seconds of a device of each class in a step, if y_P is 1
    weight_P  what that takes of the limit on work, in whole sequences
    room_C    devices of each class

    minimize    t
    subject to  busy_PC.T @ y_P <= room_C * t           (price_C)
                weight_P @ y_P  <= most                 (price of work)
                sum of y_P over each kind's options = 1

No plan is faster: a plan has such shares y_P, and its devices compute for
busy_PC.T @ y_P in total. Prices with price_C @ room_C = 1 prove

    t >= sum over kinds of the least (busy_PC @ price_C + weight_P * price)
         - most * price

The code evaluates this formula, so the bound does not depend on the solver.
"""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import cvxpy as cp
import numpy as np

from hetjax.planner.bound.restricted_master import STRICT
from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.solver import solve

_TOLERANCE = 1e-3  # relative, of a bound within a limit on work


def busy_bound_s(p: Problem, enough_s: float = inf) -> float:
    """Return a lower bound on the step of all plans, within the limit on work if there
    is one; inf if some layer fits nowhere. Larger bounds than `enough_s` are not
    sought."""
    work = _work(p)
    if not work.fits:
        return inf
    low_s = work.least_s(inf) * (1 - STRICT)
    if p.work_limit is None:
        return low_s
    # `least_s` falls as the limit on work rises, and the limit rises with the step
    most = p.work_limit.most_sequences
    high_s = min(enough_s, work.least_s(most(low_s)) * (1 - STRICT))
    while high_s > low_s * (1 + _TOLERANCE):
        middle_s = min((low_s + high_s) / 2, 2 * low_s)
        if work.least_s(most(middle_s)) * (1 - STRICT) >= middle_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


@dataclass(frozen=True, eq=False)
class _Work:
    """Work by pair P of kind and option; pairs without enough memory are left out."""

    kind_P: Ints
    busy_PC: Floats
    weight_P: Floats
    room_C: Floats

    @property
    def fits(self) -> bool:
        """Whether every kind has an option."""
        return len(np.unique(self.kind_P)) == 1 + self.kind_P.max(initial=-1)

    def least_s(self, most: float) -> float:
        """Return the bound that the best prices prove with limit `most` on work."""
        if self._least_of_kinds(self.weight_P) > most:
            return inf
        problem, limit, by_class, by_work = self._program
        limit.value = min(most, float(self.weight_P.sum()))
        solve(problem)
        price_C = np.maximum(by_class.dual_value, 0)
        price = max(float(by_work.dual_value), 0.0)
        whole = float(price_C @ self.room_C)
        if not whole > 0:
            return 0.0
        # the program's unit of time is `_unit_s`, so prices of work are per unit, too
        price_C, price = price_C / whole, price / whole * self._unit_s
        cost_P = self.busy_PC @ price_C + self.weight_P * price
        return self._least_of_kinds(cost_P) - limit.value * price

    def _least_of_kinds(self, cost_P: Floats) -> float:
        least_K = np.full(1 + self.kind_P.max(), inf)
        np.minimum.at(least_K, self.kind_P, cost_P)
        return float(least_K.sum())

    @property
    def _unit_s(self) -> float:
        """The seconds that are 1 in the program, so that its numbers are similar."""
        return float(self.busy_PC.max())

    @cached_property
    def _program(self) -> tuple[cp.Problem, cp.Parameter, Any, Any]:
        y_P = cp.Variable(len(self.kind_P), nonneg=True)
        t, limit = cp.Variable(), cp.Parameter(nonneg=True)
        of_kind_KP = np.arange(1 + self.kind_P.max())[:, None] == self.kind_P
        by_class = self.busy_PC.T / self._unit_s @ y_P <= self.room_C * t
        by_work = self.weight_P @ y_P <= limit
        constraints = [by_class, by_work, of_kind_KP.astype(float) @ y_P == 1]
        return cp.Problem(cp.Minimize(t), constraints), limit, by_class, by_work


def _work(p: Problem) -> _Work:
    _, first_K, count_K = np.unique(p.kind_J[1:], return_index=True, return_counts=True)
    each_s_BOL = p.layer_s_BOL / np.array(p.microbatch_sizes)[:, None, None]
    seconds_OK = each_s_BOL.min(axis=0)[:, first_K] * count_K * p.global_batch
    o_P, kind_P = np.nonzero(np.isfinite(seconds_OK))
    weight_P = np.zeros(len(o_P))
    if p.work_limit is not None:
        rows_K = p.range_IJ[first_K, first_K + 1]
        share_OK = p.work_limit.weight_OU[:, rows_K] * count_K
        weight_P = share_OK[o_P, kind_P] * p.global_batch
    return _Work(
        kind_P=kind_P,
        busy_PC=seconds_OK[o_P, kind_P][:, None] * p.used_OC[o_P],
        weight_P=weight_P,
        room_C=p.devices_C,
    )
