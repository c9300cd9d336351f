# SPDX-License-Identifier: Apache-2.0
"""Computes the lower bound on the step time by column generation.

Owns `lower_bound`. At a fixed step time the restricted master (`restricted_master.py`)
maximises the sequences that fractions of copies of known templates, the columns,
compute. Any duals of the devices prove that a step time is too short if no template
computes as many sequences per price as all devices together would have to. So the step
time is bisected: at duals that no known column contradicts, pricing (`pricing.py`)
searches for a template of positive reduced cost. Either it finds one, which becomes a
column, or the step time is proven too short. Does not own integer copies
(`search/integer_master.py`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.completion import least_work
from hetjax.planner.bound.feasibility import fits
from hetjax.planner.bound.plain_columns import plain_start
from hetjax.planner.bound.pricing import solve_pricing
from hetjax.planner.bound.restricted_master import (
    STRICT,
    reaches,
    solve_restricted_master,
    stabilised_duals,
)
from hetjax.planner.model.deadline import TimeUp, check_deadline
from hetjax.planner.model.problem import Floats, Problem
from hetjax.planner.model.request import LARGE
from hetjax.planner.model.templates import Column, Form, column, stacked

_MAX_ROUNDS = 300
_NUM_BISECTIONS = 3
_PRECISION = 1e-4  # relative, of the least step time that columns reach
_LONGEST = 1e4  # times the compute bound; in longer steps only memory can be the limit
_GROWTH = 1.15
_LEAP = 2.0  # the growth where no template fits into the time
_DECISIVE_LABELS = 500_000  # to prove infeasibility; many more exhaust memory
_OUTLOOK_TOLERANCE = 0.02
_NEAR = 0.1  # relative: this close, price at the target, not halfway to it

PricingOutcome = Literal["columns", "proven", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Effort:
    """How close to the relaxation the bound should come.

    Not used if `only_below` labels or more were needed before. A step time that
    `most_labels` do not decide stays open.
    """

    tolerance: float
    most_labels: int
    only_below: int


_EFFORTS = (
    _Effort(tolerance=5e-4, most_labels=40_000, only_below=15_000),
    _Effort(tolerance=4e-3, most_labels=80_000, only_below=2**60),
)
_QUICK: dict[Form, _Effort] = {
    "closed": _Effort(tolerance=0.02, most_labels=10_000, only_below=2**60),
    "prefix": _Effort(tolerance=0.01, most_labels=40_000, only_below=2**60),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """A lower bound on the step time, and its proof.

    At `duals_R` (of devices of each class, then of fragments of nodes) no template
    computes as much in `step_s` as its price requires. `columns` are the templates
    found on the way; fractions of copies of them reach `relaxed_s`. At
    `heuristic_bound_s` heuristic pricing finds nothing, which proves nothing.
    """

    step_s: float
    heuristic_bound_s: float
    duals_R: Floats
    columns: tuple[Column, ...] = ()
    relaxed_s: float = np.inf
    num_labels: int = 0


def lower_bound(
    p: Problem,
    form: Form,
    *,
    seen: Bound | None = None,
    quick: bool = False,
    longest_s: float = 0.0,
    enough_s: float = np.inf,
) -> Bound:
    """Return a certified bound, close to the relaxation's optimum or to `enough_s`.

    It is at most 0.05 % below that if few labels were needed until then, otherwise
    0.4 %; with `quick`, 1 % (prefix form) or 2 % (closed form). It is lower where
    pricing reaches its limit on labels. A bound `seen` before shortens the search. In
    the prefix form, when the time is up (`model/deadline.py`), the bound is what was
    proven until then. Raises NoFeasiblePlan if not even fractions of pipelines compute
    the global batch within `_LONGEST` times the compute bound, or within `longest_s` if
    that is longer.
    """
    found = seen
    if found is None:
        if not fits(p):
            raise NoFeasiblePlan(
                got="no pipeline that fits into memory",
                allowed="a model whose layers fit into some pipeline of these devices",
                fix="allow remat or a smaller microbatch, or add devices",
            )
        found = _begun(p, form) or _initial(p)
        with _proven_so_far(form):
            found = _first_feasible(p, form, found, longest_s)
    if found.relaxed_s == np.inf:
        return found
    if quick and form == "closed":
        # exact pricing runs only once
        effort = _QUICK[form]
        close_s = found.relaxed_s * (1 - effort.tolerance)
        found, _ = _price_at(p, form, found, close_s, effort.most_labels)
        return _bisected(p, form, found, effort, min(close_s, found.relaxed_s))
    efforts = (_QUICK[form],) if quick else _EFFORTS
    effort = next(e for e in efforts if found.num_labels < e.only_below)
    return _close_gap(p, form, found, effort, enough_s)


def seen_in(p: Problem, bound: Bound) -> Bound:
    """Return the bound as the `seen` of `p`, the same problem with a limit on work.

    Raises NoFeasiblePlan if no pipelines compute the global batch within the limit, and
    TimeUp.
    """
    columns = tuple(column(p, c.template, "prefix") for c in bound.columns)
    duals_R = np.append(bound.duals_R, 0.0)
    found = replace(bound, columns=columns, duals_R=duals_R)
    found = replace(found, heuristic_bound_s=found.step_s, relaxed_s=np.inf)
    found = _first_feasible(p, "prefix", found, 0.0)
    return replace(found, duals_R=_with_paid(p, found))


def _with_paid(p: Problem, found: Bound) -> Floats:
    """Return duals of devices halfway between `found`'s and the columns' own, and the
    columns' price of work. `found` has none yet, and any price could prove a bound."""
    step_s, devices = found.relaxed_s * (1 - _PRECISION), len(p.room_R)
    paid_R = solve_restricted_master(p, stacked(found.columns), step_s).duals_R
    usual_R, room_R = found.duals_R, p.room_at(step_s)
    if not paid_R.any():  # no column computes anything in the time
        return usual_R
    usual_R = usual_R * float(paid_R @ room_R) / float(usual_R @ room_R)
    return np.append((usual_R + paid_R)[:devices] / 2, paid_R[devices:])


def heuristic_bound(p: Problem, form: Form, below_s: float = np.inf) -> Bound | None:
    """Estimate the least step time of fractions of heuristically priced columns.

    This is a first look and proves nothing. None if no templates were found that reach
    `below_s`.
    """
    if not fits(p):
        return None
    begin = _begun(p, form)
    if begin is not None and begin.relaxed_s <= below_s:
        found = begin
    elif below_s < np.inf:
        columns = columns_within(p, form, below_s)
        if not columns:
            return None
        relaxed_s = _least_step_s(p, columns, below_s)
        found = replace(_initial(p), columns=columns, relaxed_s=relaxed_s)
    else:
        try:
            found = _first_feasible(p, form, _initial(p), 0.0)
        except NoFeasiblePlan:
            return None
    return _close_heuristically(p, form, found, _OUTLOOK_TOLERANCE)


def columns_within(p: Problem, form: Form, step_s: float) -> tuple[Column, ...]:
    """Return columns whose fractions reach the step time; () if none are found."""
    found = _initial(p)
    while not reaches(p, stacked(found.columns), step_s):
        found, outcome = _price_at(p, form, found, step_s, 0)
        if outcome != "columns":
            return ()
    return found.columns


def compute_bound_s(p: Problem) -> float:
    """Return a lower bound on the step time, from devices that compute all the time.

    At any duals, a sequence costs at least the sum over its layers of the cheapest
    price times seconds. In a step, devices offer only their price times its seconds.
    Infinity if some layer fits nowhere.
    """
    duals_R = _rates(p)
    work_B = least_work(p, duals_R) / np.array(p.microbatch_sizes)
    devices = float(duals_R[: len(p.room_R)] @ p.room_R)
    return p.global_batch * float(work_B.min()) / devices


def _rates(p: Problem) -> Floats:
    """Return prices of devices by what they compute; all other limits are free."""
    free = len(p.fragments) + (p.work_limit is not None)
    return np.concatenate([p.rates_C, np.zeros(free)])


def _initial(p: Problem) -> Bound:
    """Return the bound that is known without a search."""
    proven_s = compute_bound_s(p) * (1 - STRICT)
    return Bound(step_s=proven_s, heuristic_bound_s=proven_s, duals_R=_rates(p))


def _begun(p: Problem, form: Form) -> Bound | None:
    """Return the initial bound with plain columns; None if there are none. Also None
    for few devices, where pricing alone finds more varied columns."""
    start = plain_start(p, form) if p.devices_C.sum() > LARGE else None
    if start is None:
        return None
    columns, step_s = start
    relaxed_s = _least_step_s(p, columns, step_s)
    return replace(_initial(p), columns=columns, relaxed_s=relaxed_s)


def _first_feasible(p: Problem, form: Form, found: Bound, longest_s: float) -> Bound:
    """Add columns until they reach some step time, if they do not yet.

    Raises NoFeasiblePlan if there are none. In the closed form, which proves nothing,
    also raises it if much work finds none.
    """
    if found.relaxed_s < np.inf:
        return found
    step_s = max(compute_bound_s(p), found.step_s)
    longest_s = max(_LONGEST * step_s, longest_s)
    while not reaches(p, stacked(found.columns), step_s):
        decisive = step_s > longest_s
        most = _DECISIVE_LABELS if decisive else 0
        found, outcome = _price_at(p, form, found, step_s, most)
        if decisive and outcome == "open" and form == "prefix":
            return found  # much work has found neither a plan nor a proof
        if decisive and outcome != "columns":
            raise no_pipelines_do(p)
        if outcome != "columns":
            step_s *= _GROWTH if found.columns else _LEAP
    return replace(found, relaxed_s=_least_step_s(p, found.columns, step_s))


def _close_gap(
    p: Problem, form: Form, found: Bound, effort: _Effort, enough_s: float
) -> Bound:
    """Bring the proven step time as close to the columns' step time, or to `enough_s`,
    as the effort says.

    In the prefix form, when the time is up, return what was proven until then.
    """
    with _proven_so_far(form):
        for _ in range(_MAX_ROUNDS):
            found = _close_heuristically(p, form, found, effort.tolerance, enough_s)
            close_s = min(found.relaxed_s * (1 - effort.tolerance), enough_s)
            if found.step_s >= close_s:
                break
            found, outcome = _price_at(p, form, found, close_s, effort.most_labels)
            if outcome == "open":
                return _bisected(p, form, found, effort, close_s)
    return found


def _proven_so_far(form: Form) -> AbstractContextManager[None]:
    """Return a context that, in the prefix form, keeps the bound so far on TimeUp."""
    return suppress(TimeUp) if form == "prefix" else nullcontext()


def _close_heuristically(
    p: Problem, form: Form, found: Bound, tolerance: float, enough_s: float = np.inf
) -> Bound:
    """Add columns as long as heuristic pricing finds some, up to `enough_s`."""
    for _ in range(_MAX_ROUNDS):
        close_s = min(found.relaxed_s * (1 - tolerance), enough_s)
        if max(found.heuristic_bound_s, found.step_s) >= close_s:
            break
        step_s = (found.heuristic_bound_s + close_s) / 2
        if found.heuristic_bound_s > close_s * (1 - _NEAR):
            step_s = close_s
        found, _ = _price_at(p, form, found, step_s, 0)
    return found


def _bisected(
    p: Problem, form: Form, found: Bound, effort: _Effort, open_s: float
) -> Bound:
    """Prove the best bound possible below a step time that stayed open."""
    with _proven_so_far(form):
        for _ in range(_NUM_BISECTIONS):
            if open_s * (1 - effort.tolerance) <= found.step_s:
                break
            step_s = (found.step_s + open_s) / 2
            found, outcome = _price_at(p, form, found, step_s, effort.most_labels)
            if outcome == "open":
                open_s = step_s
            open_s = min(open_s, found.relaxed_s)
    return found


def _price_at(
    p: Problem,
    form: Form,
    found: Bound,
    step_s: float,
    most_labels: int | None,
) -> tuple[Bound, PricingOutcome]:
    """Run pricing at duals that the known columns do not contradict."""
    check_deadline()
    duals_R = stabilised_duals(p, stacked(found.columns), step_s, found.duals_R)
    threshold = p.global_batch / float(duals_R @ p.room_at(step_s))
    priced = solve_pricing(p, form, step_s, duals_R, threshold, most_labels=most_labels)
    found = replace(found, num_labels=found.num_labels + priced.num_labels)
    columns = tuple({c.template: c for c in (*found.columns, *priced.columns)}.values())
    if len(columns) > len(found.columns):
        relaxed_s = found.relaxed_s
        if relaxed_s < np.inf:
            relaxed_s = _least_step_s(p, columns, relaxed_s)
        return replace(found, columns=columns, relaxed_s=relaxed_s), "columns"
    heuristic_bound_s = max(found.heuristic_bound_s, step_s)
    found = replace(found, heuristic_bound_s=heuristic_bound_s)
    # columns that are already known contradict these duals, too
    if not priced.is_complete or priced.columns:
        return found, "open"
    return replace(found, step_s=step_s, duals_R=duals_R), "proven"


def _least_step_s(p: Problem, columns: Sequence[Column], high_s: float) -> float:
    """Return the least step time that columns reach, given one that they reach."""
    rows, width = stacked(columns), 4 * _PRECISION
    while reaches(p, rows, high_s * (1 - width)):
        high_s, width = high_s * (1 - width), min(2 * width, 0.5)
    low_s = high_s * (1 - width)
    while high_s - low_s > _PRECISION * high_s:
        middle_s = (low_s + high_s) / 2
        if reaches(p, rows, middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def no_pipelines_do(p: Problem) -> NoFeasiblePlan:
    sizes = ", ".join(map(str, p.microbatch_sizes))
    there = ", ".join(f"{c.num_devices} {c.name}" for c in p.classes)
    return NoFeasiblePlan(
        got=f"a global batch of {p.global_batch} sequences that no plan can make up",
        allowed=f"a sum of microbatches of {sizes} sequences on {there}",
        fix="add devices, or give another global batch",
    )
