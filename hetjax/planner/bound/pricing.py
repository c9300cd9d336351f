# SPDX-License-Identifier: Apache-2.0
"""Pricing: the templates that do as much as their devices are worth, or more.

Owns what is asked of the dynamic program (`partial_pipelines.py`) at a fixed step time
and fixed prices of devices. Many microbatch counts are priced at once, in intervals, of
which the program thinks too well; an interval that this optimism keeps alive is split.
First only the most promising labels are kept; where that finds nothing, all of them: so
no template that is worth its price is missed.

Does not own the prices (`column_generation.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.planner.bound.completion import reach
from hetjax.planner.bound.intervals import divided, first_cells, narrowed
from hetjax.planner.bound.labels import Labels
from hetjax.planner.bound.partial_pipelines import (
    Search,
    least_work,
    pipelines,
    search_of,
    standing,
    standing_of,
    template_of,
)
from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.templates import (
    ROUNDING,
    Column,
    Form,
    column,
    most_microbatches,
)

# widths of cells, and trades of time against cost by which they may be ruled out
_PASSES = (
    (0.6, (0.75,)),
    (0.15, (0.75,)),
    (0.04, (0.75,)),
    (0.04, (0.0, 0.6, 1.2)),
)
# how many promising suffixes and cells are kept: more where a bound is to be certified
_BEAM: dict[Form, int] = {"closed": 60, "prefix": 100}
_MOST_CELLS: dict[Form, int] = {"closed": 40, "prefix": 100}
_MOST_COLUMNS = 100
_HARVEST_BEAM, _MOST_HARVESTED, _FEW_COLUMNS = 400, 600, 100
_LESS_WORTH, _NUM_LESS = 0.5, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """Templates that are worth their price, best first.

    None of them means that there are none at all only if `is_all`. `num_labels` is the
    work that it took.
    """

    columns: tuple[Column, ...] = ()
    is_all: bool = True
    num_labels: int = 0


def price(
    p: Problem,
    form: Form,
    step_s: float,
    price_R: Floats,
    worth: float,
    *,
    most_labels: int | None = None,
) -> Priced:
    """Return templates that do `worth` sequences or more per unit of price.

    Some of the best of those that do it within the step time; if not all are known
    after `most_labels` labels, that is it (0: after the most promising ones).
    """
    few = _MOST_CELLS[form] if most_labels == 0 else None
    search = _search(p, form, step_s, price_R, worth, _PASSES, most_cells=few)
    if search is None:
        return Priced()
    found = _promising(search, worth)
    if found.columns or most_labels == 0:
        return found
    return _priced(search, worth, most_labels)


def _promising(search: Search, worth: float) -> Priced:
    """Keep only labels that look good."""
    found = pipelines(
        search, _alive(search, _MOST_CELLS[search.form]), beam=_BEAM[search.form]
    )
    assert found is not None
    pool, whole = found
    columns = _better(_columns(search, pool, whole, _MOST_COLUMNS), search, worth)
    return Priced(columns=columns, is_all=False, num_labels=len(pool))


def _priced(search: Search, worth: float, most_labels: int | None) -> Priced:
    """Keep all labels, and divide the cells of those that look better than they are."""
    num_labels = 0
    while True:
        found = pipelines(search, _alive(search), most=most_labels)
        if found is None:
            return Priced(is_all=False, num_labels=num_labels + (most_labels or 0))
        pool, whole = found
        num_labels += len(pool)
        better = _better(_columns(search, pool, whole, _MOST_COLUMNS), search, worth)
        kept = [search.cells[n] for n in np.unique(whole.cell)]
        parts = [part for cell in kept for part in divided(cell, search.form)]
        if better or not kept or not parts:
            return Priced(
                columns=better, is_all=not kept or bool(better), num_labels=num_labels
            )
        search = search_of(
            search.p,
            search.form,
            search.can,
            search.price_R,
            parts,
            worth,
            _PASSES[-1][1],
        )


def harvest(
    p: Problem, form: Form, step_s: float, price_R: Floats, worth: float
) -> list[Column]:
    """Return many templates for whole copies to choose from.

    Promising ones of at least `worth`, and of less as long as there are few. In the
    closed form, only those whose memory holds what slow hops ask for.
    """
    columns: list[Column] = []
    for n in range(_NUM_LESS):
        rung = worth * _LESS_WORTH**n
        search = _search(
            p,
            form,
            step_s,
            price_R,
            rung,
            _PASSES,
            most_cells=_MOST_CELLS[form],
            serves_hops=form == "closed",
        )
        if search is None:
            continue
        found = pipelines(search, _alive(search, _MOST_CELLS[form]), beam=_HARVEST_BEAM)
        assert found is not None
        columns = _columns(search, *found, _MOST_HARVESTED)
        if len(columns) > _FEW_COLUMNS:
            break
    return [c for c in columns if c.serves_hops]


def _search(
    p: Problem,
    form: Form,
    step_s: float,
    price_R: Floats,
    worth: float,
    passes: Sequence[tuple[float, Sequence[float]]],
    *,
    most_cells: int | None = None,
    serves_hops: bool = False,
) -> Search | None:
    """Return the search among cells that are not ruled out; None if all are.

    Of the most promising ones only, if there are to be `most_cells`.
    """
    can = reach(p, form, step_s)
    sizes_B = np.array(p.microbatch_sizes)
    most_B = np.minimum(can.most_B, p.global_batch // sizes_B)
    left_s_B = step_s - p.least_after_s_AB.sum(axis=0) - p.fastest_s_BJ[:, -1]
    work_s_B = least_work(p, price_R) * worth / sizes_B
    alive = list(first_cells(p, form, most_B, left_s_B, work_s_B))
    search, num_dropped = None, 0
    for ratio, trades in passes:
        cells = [part for wide in alive for part in narrowed(wide, form, ratio)]
        if not cells:
            return search if num_dropped else None
        search = search_of(
            p, form, can, price_R, cells, worth, trades, serves_hops=serves_hops
        )
        num_alive = len(_alive(search))
        alive = [cells[n] for n in _alive(search, most_cells)]
        num_dropped += num_alive - len(alive)
    return search


def _alive(search: Search, most_cells: int | None = None) -> Ints:
    """The cells that are not ruled out: the most promising of each count first."""
    share_N = standing(search)
    alive_N = np.flatnonzero(share_N < 1)
    count_N = search.lo_N * len(search.p.microbatch_sizes) + search.b_N
    return alive_N[_best_of_each(count_N[alive_N], share_N[alive_N], most_cells)]


def _best_of_each(kind_N: Ints, value_N: Floats, most: int | None) -> Ints:
    """The rows of least value: the best of each kind, then the seconds, and so on."""
    order = np.lexsort((value_N, kind_N))
    is_first_N = np.diff(kind_N[order], prepend=-1) != 0
    firsts = np.flatnonzero(is_first_N)
    rank = np.arange(len(order)) - firsts[np.cumsum(is_first_N) - 1]
    return order[np.lexsort((value_N[order], rank))][:most]


def _columns(s: Search, pool: Labels, found: Labels, most: int) -> list[Column]:
    """Return the templates of the most promising whole pipelines, without repeats."""
    best = np.argsort(standing_of(s, found), kind="stable")[:most]
    templates = {template_of(s, pool, found, int(row)): None for row in best}
    return [column(s.p, template, s.form) for template in templates]


def _better(columns: list[Column], s: Search, worth: float) -> tuple[Column, ...]:
    """Return the columns that are in fact worth it, the best first."""
    if not columns:
        return ()
    sizes = np.array([c.template.microbatch_size for c in columns])
    num_sequences = most_microbatches(columns, s.can.step_s) * sizes
    num_sequences = np.minimum(num_sequences, s.p.global_batch // sizes * sizes)
    ratio = num_sequences / (np.array([c.taken for c in columns]) @ s.price_R)
    order = np.argsort(-ratio, kind="stable")
    return tuple(columns[n] for n in order if ratio[n] >= worth * (1 - ROUNDING))
