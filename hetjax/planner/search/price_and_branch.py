# SPDX-License-Identifier: Apache-2.0
"""The master problem: how many copies of which templates, in the least step time.

Owns the plans without places: the fastest, others that differ from it in kind, and the
cheapest within a step time. All begin with the relaxation (`column_generation.py`),
whose prices tell which templates are worth looking at, and end with whole copies
(`integer_master.py`). Does not own how templates are found (`pricing.py`), nor where
copies are placed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetjax.planner.bound.column_generation import (
    Bound,
    Outlook,
    columns_within,
    compute_bound_s,
    lower_bound,
    nothing_does,
)
from hetjax.planner.bound.pricing import harvest, price
from hetjax.planner.bound.restricted_master import Use, thrift, use
from hetjax.planner.model.problem import Floats, Problem
from hetjax.planner.model.templates import ROUNDING, Column, Form, Template, column
from hetjax.planner.search.integer_master import Copies, fewest_templates, whole_copies

_LEAST_WORTH = 0.01
# how much more than fractions of copies whole ones may take
_SLACKS = (1e-4, 0.002, 0.006, *(0.02 * 2**n for n in range(12)))
# relative: a plan this near to where none was found is good enough
_CLOSE, _CLOSE_QUICK = 4e-3, 0.015
_WASTE = 0.05
_LEAST_GAIN = 0.05  # of what devices are worth: also of those that would bring nothing
_MAX_ROUNDS = 100  # of more columns for the cheapest plan
_SAVED = 1e-3  # relative: what templates must save that are looked for
_LEAST_COST = 1e-3  # of the dearest: devices for nothing would be taken for nothing
_SLACK_OF_SEEN = 0.004  # so much more than fractions of copies without a harvest
# times of the longest gradient sum that are looked at, and that are tried
_NUM_SUMS, _MOST_TRIED = 24, 8
_OTHERS_SLACKS = (1e-4, 0.01, 0.03, 0.06)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A plan without places, its step time by a form, and what bounds it."""

    copies: tuple[Copies, ...]
    step_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        return self.step_s / self.bound_s - 1

    @property
    def templates(self) -> tuple[Template, ...]:
        return tuple(dict.fromkeys(c.template for c in self.copies))


def best_plan(p: Problem, form: Form, known: Sequence[Template] = ()) -> Layout:
    """Return a plan in whole copies and microbatches, and the bound by the same form.

    `known` templates, say of a plan for other devices, make the search shorter.
    NoFeasiblePlan if no pipelines that fit into memory do the global batch.
    """
    return _WholeSearch(p, form, lower_bound(p, form, known), _CLOSE).best()


def candidates(
    p: Problem,
    form: Form,
    num: int,
    *,
    seen: Outlook | None = None,
    quick: bool = False,
) -> list[Layout]:
    """Return the best plan, then at most `num` - 1 that are nearly as good.

    No plan has a pipeline of the kind of one in a plan before it: they are for a judge
    who may think otherwise than the form. What was `seen` before is gone on with. If it
    is to be `quick`, bound and plan are not so close. Errors as of `best_plan`.
    """
    bound = lower_bound(p, form, seen=seen, quick=quick)
    search = _WholeSearch(p, form, bound, _CLOSE_QUICK if quick else _CLOSE)
    found = [search.best()]
    while len(found) < num:
        other = search.unlike(found)
        if other is None:
            break
        found.append(other)
    return sorted(found, key=lambda layout: layout.step_s)


def cheapest(
    p: Problem,
    form: Form,
    step_s: float,
    usd_per_hour_C: Floats,
    known: Sequence[Template] = (),
) -> Layout | None:
    """Return the plan within the step time whose devices cost least, or nearly so.

    Devices that it leaves idle cost nothing. None if none was found. Its `bound_s` is
    that of computing alone: of any plan, not of one for this money.
    """
    cost_R = _costs(p, usd_per_hour_C)
    columns = columns_within(p, form, step_s, known)
    if not columns:
        return None
    for _ in range(_MAX_ROUNDS):
        seen = {c.template: c for c in columns}
        wanted = thrift(p, columns, step_s, cost_R)
        worth = wanted.worth * (1 + _SAVED)
        priced = price(p, form, step_s, wanted.prices_R, worth, most_labels=0)
        columns = tuple((seen | {c.template: c for c in priced.columns}).values())
        if len(columns) == len(seen):
            break
    few = harvest(p, form, step_s, wanted.prices_R, wanted.worth * (1 - _WASTE))
    columns = [c for c in (*columns, *few) if c.serves_hops]
    found = [
        copies
        for longest_s in _longest_sums(columns)
        if (
            copies := whole_copies(
                p, _beside(columns, longest_s), step_s, wanted.prices_R, cost_R
            )
        )
    ]
    if not found:
        return None
    copies = min(found, key=lambda copies: _cost(p, copies, cost_R))
    return _layout(p, form, copies, compute_bound_s(p))


def _cost(p: Problem, copies: Sequence[Copies], cost_R: Floats) -> float:
    """What the devices of all copies cost."""
    return sum(
        c.num_copies * float(p.taken_OR[s.option] @ cost_R)
        for c in copies
        for s in c.template.stages
    )


def _beside(columns: Sequence[Column], longest_s: float) -> list[Column]:
    """The columns that wait for sums of that time, and show no longer ones."""
    return [
        replace(c, after_s=c.after_s - c.sum_s + longest_s, sum_s=longest_s)
        for c in columns
        if c.sum_s <= longest_s
    ]


def _longest_sums(columns: Sequence[Column]) -> list[float]:
    """Some of the times that the longest gradient sum may take."""
    sums = np.unique([c.sum_s for c in columns])
    if len(sums) <= _NUM_SUMS:
        return [float(s) for s in sums]
    near = np.geomspace(max(sums[0], sums[-1] * 1e-3), sums[-1], _NUM_SUMS)
    return [float(s) for s in np.unique(sums[np.searchsorted(sums, near * 0.999)])]


def kind_of(p: Problem, template: Template) -> tuple[object, ...]:
    """Return what pipelines of a kind have in common: all but the cuts and remat."""
    options = [p.options[s.option] for s in template.stages]
    meshes = tuple((o.device_class, o.tensor, o.data) for o in options)
    return template.microbatch_size, meshes


def _costs(p: Problem, usd_per_hour_C: Floats) -> Floats:
    """What devices cost, those for nothing a little by their speed."""
    most = float(usd_per_hour_C.max()) or 1.0
    least_C = _LEAST_COST * most * p.rates_C / p.rates_C.max()
    cost_C = np.maximum(usd_per_hour_C, least_C)
    return np.concatenate([cost_C, np.zeros(len(p.fragments))])


def _layout(p: Problem, form: Form, copies: Sequence[Copies], bound_s: float) -> Layout:
    columns = [column(p, c.template, form) for c in copies]
    longest_s = max(column.sum_s for column in columns)
    step_s = max(
        column.time_s(c.num_microbatches) - column.sum_s + longest_s
        for column, c in zip(columns, copies, strict=True)
    )
    return Layout(copies=tuple(copies), step_s=float(step_s), bound_s=bound_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Waiting:
    """Columns that wait for the same longest sum, and the best use of them."""

    columns: list[Column]
    used: Use


class _WholeSearch:
    """Looks for plans within a step time; what it has seen it keeps."""

    def __init__(self, p: Problem, form: Form, bound: Bound, close: float) -> None:
        self.p, self.bound, self.close = p, bound, close
        self.form: Form = form
        self.columns = {c.template: c for c in bound.columns if c.serves_hops}
        self.worth = p.global_batch / float(bound.prices_R @ p.room_R)

    def best(self) -> Layout:
        """Return a plan in about the least time that any was found for."""
        low_s, best = self.bound.step_s, None
        for slack in _SLACKS:
            step_s = self.bound.reached_s * (1 + slack)
            best = self._at(step_s)
            if best:
                break
            low_s = step_s
        if best is None:
            raise nothing_does(self.p)
        while best.step_s > low_s * (1 + self.close):
            middle_s = (low_s + best.step_s) / 2
            better = self._of(self.columns.values(), middle_s)
            if better:
                best = better
            else:
                low_s = middle_s
        return self._with_fewer(best)

    def unlike(self, others: Sequence[Layout]) -> Layout | None:
        """Return a plan of other kinds of pipelines, nearly as good as the first."""
        kinds = {kind_of(self.p, t) for layout in others for t in layout.templates}
        columns = [
            c for t, c in self.columns.items() if kind_of(self.p, t) not in kinds
        ]
        for slack in _OTHERS_SLACKS:
            found = self._of(columns, others[0].step_s * (1 + slack))
            if found:
                return found
        return None

    def _at(self, step_s: float) -> Layout | None:
        """Return a plan within the step time, None if none was found."""
        found = self._of(self.columns.values(), step_s)
        if found or step_s < self.bound.reached_s * (1 + _SLACK_OF_SEEN):
            return found
        self._see_more(step_s)
        return self._of(self.columns.values(), step_s)

    def _see_more(self, step_s: float) -> None:
        """Look for templates of which whole copies may do it."""
        shorter = self.bound.step_s / step_s
        # what whole copies waste, cheaper templates have to leave room for
        share = max(3 * shorter - 2 - _WASTE, _LEAST_WORTH)
        worth = self.worth / shorter * share
        found = harvest(self.p, self.form, step_s, self.bound.prices_R, worth)
        self.columns |= {c.template: c for c in found}

    def _of(self, columns: Iterable[Column], step_s: float) -> Layout | None:
        for waiting in self._waiting(list(columns), step_s)[:_MOST_TRIED]:
            price_R = self._prices(waiting.used)
            copies = whole_copies(self.p, waiting.columns, step_s, price_R)
            if copies:
                return self._layout(copies)
        return None

    def _with_fewer(self, layout: Layout) -> Layout:
        """The same step time with fewer distinct templates, if easily found."""
        step_s = layout.step_s * (1 + ROUNDING)
        if len(layout.templates) == 1:
            return layout
        copies: list[Copies] = []
        for waiting in self._waiting(list(self.columns.values()), step_s)[:1]:
            price_R = self._prices(waiting.used)
            copies = fewest_templates(self.p, waiting.columns, step_s, price_R)
        other = self._layout(copies) if copies else layout
        return other if len(other.templates) < len(layout.templates) else layout

    def _waiting(self, columns: list[Column], step_s: float) -> list[_Waiting]:
        """Columns that do the batch beside each other, those that do most first."""
        choices = []
        for longest_s in _longest_sums(columns):
            waiting = _beside(columns, longest_s)
            used = use(self.p, waiting, step_s)
            if used.is_enough:
                choices.append(_Waiting(columns=waiting, used=used))
        return sorted(choices, key=lambda choice: -choice.used.sequences)

    def _prices(self, used: Use) -> Floats:
        """What devices would bring in this time."""
        return used.gains_R + _LEAST_GAIN * self.worth * self.bound.prices_R

    def _layout(self, copies: Sequence[Copies]) -> Layout:
        return _layout(self.p, self.form, copies, self.bound.step_s)
