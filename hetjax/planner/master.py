# SPDX-License-Identifier: Apache-2.0
"""The master problem: how many copies of which templates, in the least step time.

Owns the two sides of the answer. `lower_bound`: at a fixed step time the best use of
the devices is a linear program over templates; its dual prices ask the pricing for
better templates until there are none, and a step time at which even fractions of
copies do not reach the global batch is one that no plan can beat. `best_plan`: whole
copies and whole microbatches by mixed-integer programming. Does not own how templates
are found (`pricing.py`), nor where copies are placed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cvxpy as cp
import numpy as np
from scipy.optimize import linprog

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.pricing import harvest, price
from hetjax.planner.problem import Floats, Ints, Problem
from hetjax.planner.templates import (
    Column,
    Form,
    Template,
    column,
    most_microbatches,
)

_TOLERANCE = 5e-4  # relative, of the bound: how far below the relaxation it may stay
_MAX_ROUNDS = 60
_LEAST_PRICE = 1e-3  # of what a device could compute: free devices are hard to price
_MAX_DOUBLINGS = 8
_LONGEST = 1e4  # times the compute bound: only memory can still be in the way
_LEAST_WORTH = 0.01
_SLACKS = (0.0005, 0.002, 0.006, *(0.02 * 2**n for n in range(12)))
_CLOSE = 4e-3  # relative: a plan this near to where none was found is good enough
_WASTE = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """A step time below which the global batch cannot be done, and how we know.

    `prices_C` are what a device of each class is worth in sequences at that time, and
    `columns` the templates that were looked at on the way.
    """

    step_s: float
    prices_C: Floats
    columns: tuple[Column, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Copies of one template that do the same number of microbatches each."""

    template: Template
    num_copies: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A plan without places, its step time by a form, and what bounds it."""

    copies: tuple[Copies, ...]
    step_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        return self.step_s / self.bound_s - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class _Relaxed:
    """The linear program at one step time: sequences done, and prices of devices."""

    sequences: float
    prices_C: Floats


def _most(p: Problem, columns: Sequence[Column], step_s: float) -> Ints:
    """Microbatches of each column in the step; no more than the global batch has."""
    sizes_N = np.array([c.template.microbatch_size for c in columns])
    return np.minimum(most_microbatches(columns, step_s), p.global_batch // sizes_N)


def _relaxed(p: Problem, columns: Sequence[Column], step_s: float) -> _Relaxed:
    """Do the most sequences with fractions of copies."""
    used_NC = np.array([c.used for c in columns], dtype=np.float64)
    sizes_N = np.array([c.template.microbatch_size for c in columns])
    sequences_N = sizes_N * _most(p, columns, step_s)
    found = linprog(-sequences_N, A_ub=used_NC.T, b_ub=p.devices_C, method="highs")
    assert found.success, found.message
    return _Relaxed(sequences=-found.fun, prices_C=-found.ineqlin.marginals)


def lower_bound(p: Problem, form: Form) -> Bound:
    """Return a certified bound, close to the relaxation's optimum.

    NoFeasiblePlan if not even fractions of pipelines do the global batch.
    """
    columns = {c.template: c for c in _first_columns(p, form)}
    step_s = _reach(p, form, columns)
    for _ in range(_MAX_ROUNDS):
        step_s = _least_step_s(p, list(columns.values()), step_s)
        target_s = step_s * (1 - _TOLERANCE)
        prices_C, worth = _prices(p, list(columns.values()), target_s)
        better = price(p, form, target_s, prices_C, worth)
        if not better:
            return Bound(
                step_s=target_s, prices_C=prices_C, columns=tuple(columns.values())
            )
        columns |= {c.template: c for c in better}
    raise AssertionError("column generation did not end")


def _prices(
    p: Problem, columns: Sequence[Column], step_s: float
) -> tuple[Floats, float]:
    """Return prices of devices, and what a template that helps must be worth.

    If no template does more sequences per price, all devices together do less than the
    global batch, whatever the prices are.
    """
    relaxed = _relaxed(p, columns, step_s)
    prices_C = np.maximum(relaxed.prices_C, _LEAST_PRICE * p.rates_C * step_s)
    return prices_C, p.global_batch / float(prices_C @ p.devices_C)


def _compute_bound_s(p: Problem) -> float:
    """The step time if every device computed at its best rate all the time."""
    return p.global_batch / float(p.rates_C @ p.devices_C)


def _first_columns(p: Problem, form: Form) -> list[Column]:
    """Good templates on each class alone; on all of them if none holds the model."""
    alone = [
        np.where(np.arange(len(p.classes)) == c, p.rates_C, 1e6 * p.rates_C.max())
        for c in range(len(p.classes))
    ]
    for doubling in range(_MAX_DOUBLINGS):
        step_s = _compute_bound_s(p) * 1.5 * 2**doubling
        for tried in (alone, [p.rates_C]):
            columns = [
                found
                for rates_C in tried
                for found in price(p, form, step_s, rates_C * step_s, _LEAST_WORTH)
            ]
            if columns:
                return columns
    raise NoFeasiblePlan(
        got="no pipeline that fits into memory",
        allowed="a model of which some pipeline of these devices can hold all layers",
        fix="allow remat or a smaller microbatch, or add devices",
    )


def _reach(p: Problem, form: Form, columns: dict[Template, Column]) -> float:
    """Return a step time that the columns reach, after adding to them if need be."""
    step_s = _compute_bound_s(p)
    longest_s = _LONGEST * step_s
    while _relaxed(p, list(columns.values()), step_s).sequences < p.global_batch:
        if step_s < longest_s:
            step_s *= 1.5
            continue
        better = price(p, form, step_s, *_prices(p, list(columns.values()), step_s))
        if not better:
            raise _nothing_does(p)
        columns |= {c.template: c for c in better}
    return step_s


def _nothing_does(p: Problem) -> NoFeasiblePlan:
    sizes = ", ".join(map(str, p.microbatch_sizes))
    there = ", ".join(f"{c.num_devices} {c.name}" for c in p.classes)
    return NoFeasiblePlan(
        got=f"a global batch of {p.global_batch} sequences, which no pipelines do",
        allowed=f"a sum of microbatches of {sizes} over pipelines within {there}",
        fix="add devices, or give another global batch",
    )


def _least_step_s(p: Problem, columns: Sequence[Column], high_s: float) -> float:
    """Return the least step time, from one that is reached."""
    width = _TOLERANCE
    while _relaxed(p, columns, high_s * (1 - width)).sequences >= p.global_batch:
        high_s, width = high_s * (1 - width), min(2 * width, 0.5)
    low_s = high_s * (1 - width)
    while high_s - low_s > _TOLERANCE / 4 * high_s:
        middle_s = (low_s + high_s) / 2
        if _relaxed(p, columns, middle_s).sequences < p.global_batch:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s


def best_plan(p: Problem, form: Form) -> Layout:
    """Return a plan in whole copies and microbatches, and the bound by the same form.

    NoFeasiblePlan if no pipelines that fit into memory do the global batch.
    """
    bound = lower_bound(p, form)
    search = _WholeSearch(p, form, bound)
    low_s, best = bound.step_s, None
    for slack in _SLACKS:
        step_s = bound.step_s * (1 + slack)
        best = search.at(step_s)
        if best:
            break
        low_s = step_s
    if best is None:
        raise _nothing_does(p)
    while best.step_s > low_s * (1 + _CLOSE):
        middle_s = (low_s + best.step_s) / 2
        better = search.at(middle_s)
        if better:
            best = better
        else:
            low_s = middle_s
    return best


class _WholeSearch:
    """Looks for plans within a step time; what it has seen it keeps."""

    def __init__(self, p: Problem, form: Form, bound: Bound) -> None:
        self.p, self.bound = p, bound
        self.form: Form = form
        self.columns = {c.template: c for c in bound.columns if c.serves_hops}
        self.worth = p.global_batch / float(bound.prices_C @ p.devices_C)

    def at(self, step_s: float) -> Layout | None:
        """Return a plan within the step time, None if none was found."""
        return self._of_seen(step_s) or self._of_more(step_s)

    def _of_more(self, step_s: float) -> Layout | None:
        shorter = self.bound.step_s / step_s
        # what whole copies waste, cheaper templates have to leave room for
        share = max(3 * shorter - 2 - _WASTE, _LEAST_WORTH)
        found = harvest(
            self.p,
            self.form,
            step_s,
            self.bound.prices_C,
            worth=self.worth / shorter,
            least_worth=self.worth / shorter * share,
        )
        num_seen = len(self.columns)
        self.columns |= {c.template: c for c in found}
        return self._of_seen(step_s) if len(self.columns) > num_seen else None

    def _of_seen(self, step_s: float) -> Layout | None:
        columns = list(self.columns.values())
        if not columns:
            return None
        if _relaxed(self.p, columns, step_s).sequences < self.p.global_batch:
            return None
        copies = _whole(self.p, columns, step_s)
        return _layout(self.p, self.form, copies, self.bound) if copies else None


def _whole(p: Problem, columns: Sequence[Column], step_s: float) -> list[Copies]:
    """Take whole copies that do the global batch within the step time; none if none."""
    most_N = _most(p, columns, step_s)
    used_NC = np.array([c.used for c in columns], dtype=np.float64)
    usable = (most_N > 0) & (used_NC <= p.devices_C).all(axis=1)
    columns = [c for c, use in zip(columns, usable, strict=True) if use]
    if not columns:
        return []
    most_N, used_NC = most_N[usable], used_NC[usable]
    sizes_N = np.array([c.template.microbatch_size for c in columns])
    copies_N = cp.Variable(len(columns), integer=True)
    microbatches_N = cp.Variable(len(columns), integer=True)
    problem = cp.Problem(
        cp.Minimize(cp.sum(copies_N)),
        [
            copies_N >= 0,
            used_NC.T @ copies_N <= p.devices_C,
            microbatches_N >= copies_N,
            microbatches_N <= cp.multiply(most_N, copies_N),
            sizes_N @ microbatches_N == p.global_batch,
        ],
    )
    problem.solve(solver=cp.HIGHS)
    if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        return []
    assert copies_N.value is not None and microbatches_N.value is not None
    copies = np.rint(copies_N.value).astype(int)
    microbatches = np.rint(microbatches_N.value).astype(int)
    return [
        part
        for c, num, total in zip(columns, copies, microbatches, strict=True)
        if num
        for part in _shared_out(c, int(num), int(total))
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


def _layout(p: Problem, form: Form, copies: list[Copies], bound: Bound) -> Layout:
    step_s = max(column(p, c.template, form).time_s(c.num_microbatches) for c in copies)
    return Layout(copies=tuple(copies), step_s=step_s, bound_s=bound.step_s)


def candidates(p: Problem, form: Form, num: int) -> list[Layout]:
    return [best_plan(p, form)]


def cheapest(
    p: Problem, form: Form, step_s: float, usd_per_hour_C: Floats
) -> Layout | None:
    return None
