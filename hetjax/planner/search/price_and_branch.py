# SPDX-License-Identifier: Apache-2.0
"""Price and branch: finds copies of templates with the least step time.

Owns the unplaced plans: the fastest, others of different kinds, and the cheapest within
a step time. Each search starts with the relaxation (`bound/column_generation.py`),
whose duals decide which columns to enumerate. It ends with integer copies
(`integer_master.py`). Does not own pricing (`bound/pricing.py`), nor the placement of
copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.planner.bound.column_generation import (
    Bound,
    columns_within,
    compute_bound_s,
    lower_bound,
    no_pipelines_do,
)
from hetjax.planner.bound.pricing import enumerate_columns, solve_pricing
from hetjax.planner.bound.restricted_master import (
    STRICT,
    min_cost_master,
    most_sequences,
    solve_restricted_master,
)
from hetjax.planner.model.problem import Floats, Problem
from hetjax.planner.model.templates import (
    ROUNDING,
    Columns,
    Form,
    Template,
    column,
    stacked,
)
from hetjax.planner.search.integer_master import (
    ColumnCount,
    fewest_columns,
    solve_integer_master,
)

_LEAST_THRESHOLD = 0.01
# relative: how much more time than the relaxation integer copies may take
_SLACKS = (1e-4, 0.002, 0.006, *(0.02 * 2**n for n in range(12)))
# relative: a plan this close to a step time at which none was found is good enough
_CLOSE, _CLOSE_QUICK = 4e-3, 0.015
_WASTE = 0.05
_LEAST_GAIN = 0.05  # share of devices' worth that counts even if their dual is 0
_MAX_ROUNDS = 100  # of more columns for the cheapest plan
_SAVED = 1e-3  # relative: the least saving of new templates
_LEAST_COST = 1e-3  # of the dearest device; free devices would be wasted
_SLACK_OF_SEEN = 0.004  # relative to the relaxation: below, no columns are enumerated
# times of the longest gradient sum that are considered, and that are solved
_NUM_SUMS, _MOST_TRIED = 24, 8
_OTHERS_SLACKS = (1e-4, 0.01, 0.03, 0.06)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnplacedPlan:
    """An unplaced plan, its step time by a form, and the bound on that."""

    copies: tuple[ColumnCount, ...]
    step_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        return self.step_s / self.bound_s - 1

    @property
    def templates(self) -> tuple[Template, ...]:
        return tuple(dict.fromkeys(c.template for c in self.copies))


def candidates(
    p: Problem,
    form: Form,
    num: int = 1,
    *,
    seen: Bound | None = None,
    quick: bool = False,
) -> list[UnplacedPlan]:
    """Return the best plan in whole copies and microbatches, with the bound by the same
    form; then at most `num` - 1 that are nearly as good.

    A later plan has no pipelines of a kind in earlier plans, since the simulator may
    rank kinds differently from the form. The search continues from the bound `seen`. If
    `quick`, bound and plan are less close. Raises NoFeasiblePlan if no pipelines that
    fit into memory compute the global batch.
    """
    bound = lower_bound(p, form, seen=seen, quick=quick)
    search = _PriceAndBranch(p, form, bound, _CLOSE_QUICK if quick else _CLOSE)
    found = [search.best()]
    while len(found) < num:
        other = search.unlike(found)
        if other is None:
            break
        found.append(other)
    return sorted(found, key=lambda unplaced: unplaced.step_s)


def cheapest(
    p: Problem, form: Form, step_s: float, usd_per_hour_C: Floats
) -> UnplacedPlan | None:
    """Return a plan within the step time whose devices cost least, or nearly so.

    Idle devices cost nothing. None if no plan was found. Its `bound_s` is that of
    computing alone, for plans of any cost.
    """
    cost_R = _costs(p, usd_per_hour_C)
    columns = columns_within(p, form, step_s)
    if not columns:
        return None
    for _ in range(_MAX_ROUNDS):
        seen = {c.template: c for c in columns}
        wanted = min_cost_master(p, stacked(columns), step_s, cost_R)
        threshold = wanted.threshold * (1 + _SAVED)
        priced = solve_pricing(
            p, form, step_s, wanted.duals_R, threshold, most_labels=0
        )
        columns = tuple((seen | {c.template: c for c in priced.columns}).values())
        if len(columns) == len(seen):
            break
    few = enumerate_columns(
        p, form, step_s, wanted.duals_R, wanted.threshold * (1 - _WASTE)
    )
    serving = stacked([c for c in (*columns, *few) if c.serves_hops])
    found = [
        copies
        for longest_s in _longest_sums(serving)
        if (
            copies := solve_integer_master(
                p, serving.beside(longest_s), step_s, wanted.duals_R, cost_R
            )
        )
    ]
    if not found:
        return None
    copies = min(found, key=lambda copies: _cost(p, copies, cost_R))
    return _unplaced(p, form, copies, compute_bound_s(p))


def _cost(p: Problem, copies: Sequence[ColumnCount], cost_R: Floats) -> float:
    """Return the cost of the devices of all copies."""
    return sum(
        c.num_copies * float(p.taken_OR[s.option] @ cost_R)
        for c in copies
        for s in c.template.stages
    )


def _longest_sums(columns: Columns) -> list[float]:
    """Return some of the possible times of the longest gradient sum."""
    sums = np.unique(columns.sum_s_N)
    if len(sums) <= _NUM_SUMS:
        return [float(s) for s in sums]
    near = np.geomspace(max(sums[0], sums[-1] * 1e-3), sums[-1], _NUM_SUMS)
    return [float(s) for s in np.unique(sums[np.searchsorted(sums, near * 0.999)])]


def kind_of(p: Problem, template: Template) -> tuple[object, ...]:
    """Return the kind of a pipeline: its microbatch size and meshes, without cuts and
    remat."""
    options = [p.options[s.option] for s in template.stages]
    meshes = tuple((o.device_class, o.tensor, o.data) for o in options)
    return template.microbatch_size, meshes


def _costs(p: Problem, usd_per_hour_C: Floats) -> Floats:
    """Return the cost of devices; free ones cost a little, by their speed."""
    most = float(usd_per_hour_C.max()) or 1.0
    least_C = _LEAST_COST * most * p.rates_C / p.rates_C.max()
    cost_C = np.maximum(usd_per_hour_C, least_C)
    return np.concatenate([cost_C, np.zeros(len(p.fragments))])


def _unplaced(
    p: Problem, form: Form, copies: Sequence[ColumnCount], bound_s: float
) -> UnplacedPlan:
    columns = [column(p, c.template, form) for c in copies]
    longest_s = max(column.sum_s for column in columns)
    step_s = max(
        column.time_s(c.num_microbatches) - column.sum_s + longest_s
        for column, c in zip(columns, copies, strict=True)
    )
    return UnplacedPlan(copies=tuple(copies), step_s=float(step_s), bound_s=bound_s)


class _PriceAndBranch:
    """Searches for plans within a step time; keeps all columns seen."""

    def __init__(self, p: Problem, form: Form, bound: Bound, close: float) -> None:
        self.p, self.bound, self.close = p, bound, close
        self.form: Form = form
        self.seen = {c.template: c for c in bound.columns if c.serves_hops}
        self.columns = stacked([*self.seen.values()])
        self.threshold = p.global_batch / float(bound.duals_R @ p.room_R)

    def best(self) -> UnplacedPlan:
        """Return a plan with about the least step time that can be found."""
        low_s, best = self.bound.step_s, None
        for slack in _SLACKS:
            step_s = self.bound.relaxed_s * (1 + slack)
            best = self._at(step_s)
            if best:
                break
            low_s = step_s
        if best is None:
            raise no_pipelines_do(self.p)
        while best.step_s > low_s * (1 + self.close):
            middle_s = (low_s + best.step_s) / 2
            better = self._integer_plan(self.columns, middle_s)
            if better:
                best = better
            else:
                low_s = middle_s
        return self._with_fewer(best)

    def unlike(self, others: Sequence[UnplacedPlan]) -> UnplacedPlan | None:
        """Return a plan with other kinds of pipelines, nearly as good as the first."""
        kinds = {kind_of(self.p, t) for unplaced in others for t in unplaced.templates}
        is_other_N = [kind_of(self.p, t) not in kinds for t in self.columns.templates]
        others_of = self.columns.rows(np.flatnonzero(is_other_N))
        for slack in _OTHERS_SLACKS:
            found = self._integer_plan(others_of, others[0].step_s * (1 + slack))
            if found:
                return found
        return None

    def _at(self, step_s: float) -> UnplacedPlan | None:
        """Return a plan within the step time; None if none was found."""
        found = self._integer_plan(self.columns, step_s)
        if found or step_s < self.bound.relaxed_s * (1 + _SLACK_OF_SEEN):
            return found
        self._see_more(step_s)
        return self._integer_plan(self.columns, step_s)

    def _see_more(self, step_s: float) -> None:
        """Enumerate columns whose integer copies may reach the step time."""
        shorter = self.bound.step_s / step_s
        # integer copies waste devices, so templates of less worth may be needed
        share = max(3 * shorter - 2 - _WASTE, _LEAST_THRESHOLD)
        threshold = self.threshold / shorter * share
        found = enumerate_columns(
            self.p, self.form, step_s, self.bound.duals_R, threshold
        )
        self.seen |= {c.template: c for c in found}
        self.columns = stacked([*self.seen.values()])

    def _integer_plan(self, columns: Columns, step_s: float) -> UnplacedPlan | None:
        for waiting, duals_R in self._waiting(columns, step_s)[:_MOST_TRIED]:
            copies = solve_integer_master(self.p, waiting, step_s, duals_R)
            if copies:
                return self._unplaced(copies)
        return None

    def _with_fewer(self, unplaced: UnplacedPlan) -> UnplacedPlan:
        """Return a plan with this step time and fewer templates, if easily found."""
        step_s = unplaced.step_s * (1 + ROUNDING)
        if len(unplaced.templates) == 1:
            return unplaced
        copies: list[ColumnCount] = []
        for waiting, duals_R in self._waiting(self.columns, step_s)[:1]:
            copies = fewest_columns(self.p, waiting, step_s, duals_R)
        other = self._unplaced(copies) if copies else unplaced
        return other if len(other.templates) < len(unplaced.templates) else unplaced

    def _waiting(self, columns: Columns, step_s: float) -> list[tuple[Columns, Floats]]:
        """Return sets of columns whose fractions compute the batch, all waiting for the
        same longest sum, with the devices' duals; most sequences first."""
        choices = []
        least_R = _LEAST_GAIN * self.threshold * self.bound.duals_R
        for longest_s in _longest_sums(columns):
            waiting = columns.beside(longest_s)
            if not self._may_do(waiting, step_s):
                continue
            used = solve_restricted_master(self.p, waiting, step_s)
            if used.is_enough:
                choices.append((used.sequences, waiting, used.duals_R + least_R))
        choices.sort(key=lambda choice: -choice[0])
        return [(waiting, duals_R) for _, waiting, duals_R in choices]

    def _may_do(self, columns: Columns, step_s: float) -> bool:
        """Return whether the columns might compute the batch. They cannot if at the
        bound's duals every column computes too little for its price."""
        price_N = columns.taken_NR @ self.bound.duals_R
        sequences_N = most_sequences(self.p, columns, step_s)
        worth = float(self.bound.duals_R @ self.p.room_R)
        needed_N = self.p.global_batch * price_N * (1 - 2 * STRICT)
        return bool((sequences_N * worth >= needed_N).any())

    def _unplaced(self, copies: Sequence[ColumnCount]) -> UnplacedPlan:
        return _unplaced(self.p, self.form, copies, self.bound.step_s)
