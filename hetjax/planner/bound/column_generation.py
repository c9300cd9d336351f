# SPDX-License-Identifier: Apache-2.0
"""The relaxed master problem: fractions of copies, and a bound that is certified.

Owns `lower_bound`. At a fixed step time the best use of the devices is a linear program
over templates. Any prices of devices prove that a step time is too short if no template
does as much per price as all devices together would have to. So the step time is
bisected: at prices that no template seen so far contradicts, the pricing looks for
one that does; either it finds some, or the time is proven. Does not own how templates
are found (`pricing.py`) nor whole copies (`integer_master.py`).
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.optimize import linprog

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.feasibility import fits
from hetjax.planner.bound.partial_pipelines import least_work
from hetjax.planner.bound.pricing import price
from hetjax.planner.bound.restricted_master import (
    STRICT,
    most_sequences,
    reaches,
    taken_by,
)
from hetjax.planner.model.deadline import TimeUp, check
from hetjax.planner.model.problem import Floats, Problem
from hetjax.planner.model.templates import (
    Column,
    Form,
    Template,
    column,
    exists,
)

_MAX_ROUNDS = 300
_NUM_BISECTIONS = 3
_PRECISION = 1e-4  # relative, of the least step time that columns reach
_LEAST_PRICE = 1e-3  # of what a device could compute: free devices are hard to price
_LONGEST = 1e4  # times the compute bound: only memory can still be in the way
_GROWTH = 1.15
_LEAP = 2.0  # where no template fits into the time
_DECISIVE_LABELS = 500_000  # to say that nothing fits; with many more memory ends
_OUTLOOK_TOLERANCE = 0.02
_NEAR = 0.1  # relative: a last step, not half the way
# what prices of so many times a device's rate are wished for
_LEVELS, _WISHES = np.array([0.1, 0.2, 0.3, 0.4]), np.array([8.0, 4.0, 2.0, 1.0])

Outcome = Literal["better", "proven", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Effort:
    """How close to the relaxation the bound is to come.

    Not tried after `only_below` labels; a step time that `most_labels` do not decide
    is left open.
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
    """A step time below which the global batch cannot be done, and how we know.

    At `prices_R`, of devices of each class and then of fragments of nodes, nothing
    does as much as it costs. `columns` are the templates seen on the way: fractions of
    copies of them reach `reached_s`.
    """

    step_s: float
    reached_s: float
    prices_R: Floats
    columns: tuple[Column, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Outlook:
    """What is known on the way to a bound.

    `prices_R` prove that `too_short_s` is; fractions of columns reach `reached_s`.

    What only promising labels show is that `believed_s` is too short, too.
    """

    too_short_s: float
    believed_s: float
    prices_R: Floats
    columns: tuple[Column, ...]
    reached_s: float = np.inf
    num_labels: int = 0


def lower_bound(
    p: Problem,
    form: Form,
    known: Sequence[Template] = (),
    *,
    seen: Outlook | None = None,
    quick: bool = False,
    longest_s: float = 0.0,
) -> Bound:
    """Return a certified bound, close to the relaxation's optimum.

    Within 0.05 % of it where that is little work, else within 0.4 %, or 1 to 2 % if it
    is to be `quick`; or further below where that cannot be decided with a fair amount
    of work. `known` templates, or what was `seen` before, make the search shorter.
    NoFeasiblePlan if not even fractions of pipelines do the global batch, in the time
    of any sensible plan or in `longest_s`. Where the time is up (`deadline.py`) what is
    proven of it by then, in the prefix form.
    """
    found = seen
    if found is None:
        if not fits(p):
            raise _nothing_fits()
        found = _beginning(p, form, known)
        with _proven_so_far(form):
            found = _reached(p, form, found, longest_s)
    if quick and form == "closed" and found.reached_s < np.inf:
        # what promising labels do not show is looked for only once
        effort = _QUICK[form]
        close_s = found.reached_s * (1 - effort.tolerance)
        found, _ = _asked(p, form, found, close_s, effort.most_labels)
        open_s = min(close_s, found.reached_s)
        return _bound(_bisected(p, form, found, effort, open_s))
    efforts = (_QUICK[form],) if quick else _EFFORTS
    for effort in efforts if found.reached_s < np.inf else ():
        if found.num_labels < effort.only_below:
            found = _closer(p, form, found, effort)
            break
    return _bound(found)


def _bound(found: Outlook) -> Bound:
    return Bound(
        step_s=found.too_short_s,
        reached_s=found.reached_s,
        prices_R=found.prices_R,
        columns=found.columns,
    )


def outlook(p: Problem, form: Form, below_s: float = np.inf) -> Outlook | None:
    """Return about the least step time of fractions of promising templates.

    A first look, that proves nothing. None if no templates were found that reach
    `below_s`.
    """
    if not fits(p):
        return None
    found = _beginning(p, form, ())
    if below_s < np.inf:
        columns = columns_within(p, form, below_s)
        if not columns:
            return None
        reached_s = _least_step_s(p, columns, below_s)
        found = replace(found, columns=columns, reached_s=reached_s)
    else:
        try:
            found = _reached(p, form, found, 0.0)
        except NoFeasiblePlan:
            return None
    return _believed(p, form, found, _OUTLOOK_TOLERANCE)


def columns_within(
    p: Problem, form: Form, step_s: float, known: Sequence[Template] = ()
) -> tuple[Column, ...]:
    """Return columns of which fractions reach the step time; none if none are found."""
    found = _beginning(p, form, known)
    while not reaches(p, found.columns, step_s):
        found, outcome = _asked(p, form, found, step_s, 0)
        if outcome != "better":
            return ()
    return found.columns


def compute_bound_s(p: Problem) -> float:
    """Return a step time in which devices that compute all the time cannot do it.

    At any prices a sequence takes, for its layers wherever each is cheapest, so much
    price times seconds; the devices have no more of it than their price in the step.
    Infinity if some layer fits nowhere.
    """
    prices_R = _rates(p)
    work_B = least_work(p, prices_R) / np.array(p.microbatch_sizes)
    return p.global_batch * float(work_B.min()) / float(prices_R @ p.room_R)


def _rates(p: Problem) -> Floats:
    """Prices of devices by what they compute."""
    return np.concatenate([p.rates_C, np.zeros(len(p.fragments))])


def _beginning(p: Problem, form: Form, known: Sequence[Template]) -> Outlook:
    """What is known without a search: the compute bound, and given templates."""
    columns = [column(p, t, form) for t in known if exists(p, t)]
    too_short_s = compute_bound_s(p) * (1 - STRICT)
    return Outlook(
        too_short_s=too_short_s,
        believed_s=too_short_s,
        prices_R=_rates(p),
        columns=_distinct(columns),
    )


def _reached(p: Problem, form: Form, found: Outlook, longest_s: float) -> Outlook:
    """Add columns until they reach some step time.

    NoFeasiblePlan if none do, or in the closed form, which bounds nothing, if none are
    found with a great deal of work.
    """
    step_s = compute_bound_s(p)
    longest_s = max(_LONGEST * step_s, longest_s)
    enough = reaches(p, found.columns, longest_s)
    while not reaches(p, found.columns, step_s):
        outcome: Outcome = "open"
        if not enough:
            decisive = step_s > longest_s
            most = _DECISIVE_LABELS if decisive else 0
            found, outcome = _asked(p, form, found, step_s, most)
            if decisive and outcome == "open" and form == "prefix":
                return found  # with so much work neither a plan nor that there is none
            if decisive and outcome != "better":
                raise nothing_does(p)
        if outcome != "better":
            step_s *= _GROWTH if found.columns else _LEAP
    return replace(found, reached_s=_least_step_s(p, found.columns, step_s))


def _closer(p: Problem, form: Form, found: Outlook, effort: _Effort) -> Outlook:
    """Bring the columns' step time and a proof as close together as the effort says.

    In the prefix form, what is proven so far where the time is up.
    """
    with _proven_so_far(form):
        for _ in range(_MAX_ROUNDS):
            found = _believed(p, form, found, effort.tolerance)
            close_s = found.reached_s * (1 - effort.tolerance)
            if found.too_short_s >= close_s:
                break
            found, outcome = _asked(p, form, found, close_s, effort.most_labels)
            if outcome == "open":
                return _bisected(p, form, found, effort, close_s)
    return found


def _proven_so_far(form: Form) -> AbstractContextManager[None]:
    """Where a bound is all that is wanted, one that is not close is worth having."""
    return suppress(TimeUp) if form == "prefix" else nullcontext()


def _believed(p: Problem, form: Form, found: Outlook, tolerance: float) -> Outlook:
    """Go on as long as promising labels show how to come closer."""
    for _ in range(_MAX_ROUNDS):
        close_s = found.reached_s * (1 - tolerance)
        if max(found.believed_s, found.too_short_s) >= close_s:
            break
        step_s = (found.believed_s + close_s) / 2
        if found.believed_s > close_s * (1 - _NEAR):
            step_s = close_s
        found, _ = _asked(p, form, found, step_s, 0)
    return found


def _bisected(
    p: Problem, form: Form, found: Outlook, effort: _Effort, open_s: float
) -> Outlook:
    """Prove what can be proven below a step time that was left open."""
    with _proven_so_far(form):
        for _ in range(_NUM_BISECTIONS):
            if open_s * (1 - effort.tolerance) <= found.too_short_s:
                break
            step_s = (found.too_short_s + open_s) / 2
            found, outcome = _asked(p, form, found, step_s, effort.most_labels)
            if outcome == "open":
                open_s = step_s
            open_s = min(open_s, found.reached_s)
    return found


def _asked(
    p: Problem, form: Form, found: Outlook, step_s: float, most_labels: int | None
) -> tuple[Outlook, Outcome]:
    """Look for templates that contradict prices that the columns do not."""
    check()
    prices_R = _prices(p, found.columns, step_s, found.prices_R)
    worth = p.global_batch / float(prices_R @ p.room_R)
    priced = price(p, form, step_s, prices_R, worth, most_labels=most_labels)
    found = replace(found, num_labels=found.num_labels + priced.num_labels)
    columns = _distinct([*found.columns, *priced.columns])
    if len(columns) > len(found.columns):
        reached_s = found.reached_s
        if reached_s < np.inf:
            reached_s = _least_step_s(p, columns, reached_s)
        return replace(found, columns=columns, reached_s=reached_s), "better"
    believed_s = max(found.believed_s, step_s)
    if not priced.is_all or priced.columns:  # known ones contradict these prices, too
        return replace(found, believed_s=believed_s), "open"
    proven = replace(
        found, too_short_s=step_s, prices_R=prices_R, believed_s=believed_s
    )
    return proven, "proven"


def _distinct(columns: Iterable[Column]) -> tuple[Column, ...]:
    return tuple({c.template: c for c in columns}.values())


def _least_step_s(p: Problem, columns: Sequence[Column], high_s: float) -> float:
    """Return the least step time that columns reach, from one that they do."""
    width = 4 * _PRECISION
    while reaches(p, columns, high_s * (1 - width)):
        high_s, width = high_s * (1 - width), min(2 * width, 0.5)
    low_s = high_s * (1 - width)
    while high_s - low_s > _PRECISION * high_s:
        middle_s = (low_s + high_s) / 2
        if reaches(p, columns, middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def _prices(
    p: Problem, columns: Sequence[Column], step_s: float, centre_R: Floats
) -> Floats:
    """Return prices at which no column does as much as it costs, near the given ones.

    There are such as long as the columns do not reach the step time.
    """
    centre_R = centre_R / float(centre_R @ p.room_R)
    sequences_N = most_sequences(p, columns, step_s) if columns else np.zeros(0)
    taken_NR = taken_by(columns) if columns else np.zeros((0, len(centre_R)))
    needed_N = sequences_N / p.global_batch * (1 + STRICT)
    wished = np.flatnonzero(centre_R > 0)
    # prices first, then what parts of the levels they reach
    num_prices, num_levels = len(centre_R), len(_LEVELS)
    worth_RL = np.zeros((len(wished), num_prices + len(wished) * num_levels))
    for row, r in enumerate(wished):
        worth_RL[row, r] = -1 / centre_R[r]
        first = num_prices + row * num_levels
        worth_RL[row, first : first + num_levels] = 1.0
    no_parts = np.zeros((len(sequences_N), worth_RL.shape[1] - num_prices))
    least_R = _LEAST_PRICE * centre_R
    for floor_R in (least_R, 0 * least_R):  # there may be no room for least prices
        found = linprog(
            np.concatenate([np.zeros(num_prices), -np.tile(_WISHES, len(wished))]),
            A_ub=np.vstack([np.hstack([-taken_NR, no_parts]), worth_RL]),
            b_ub=np.concatenate([-needed_N, np.zeros(len(wished))]),
            A_eq=np.concatenate([p.room_R, np.zeros(no_parts.shape[1])])[None],
            b_eq=[1.0],
            bounds=[(floor, None) for floor in floor_R]
            + [(0, level) for _ in wished for level in _LEVELS],
            method="highs",
        )
        if found.success:
            break
    assert found.success, found.message
    return np.maximum(found.x[:num_prices], least_R)


def _nothing_fits() -> NoFeasiblePlan:
    return NoFeasiblePlan(
        got="no pipeline that fits into memory",
        allowed="a model of which some pipeline of these devices can hold all layers",
        fix="allow remat or a smaller microbatch, or add devices",
    )


def nothing_does(p: Problem) -> NoFeasiblePlan:
    sizes = ", ".join(map(str, p.microbatch_sizes))
    there = ", ".join(f"{c.num_devices} {c.name}" for c in p.classes)
    return NoFeasiblePlan(
        got=f"a global batch of {p.global_batch} sequences, which no pipelines do",
        allowed=f"a sum of microbatches of {sizes} over pipelines within {there}",
        fix="add devices, or give another global batch",
    )
