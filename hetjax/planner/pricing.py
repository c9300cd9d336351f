# SPDX-License-Identifier: Apache-2.0
"""Pricing: the templates that do as much as their devices are worth, or more.

Owns what is asked of the dynamic program (`suffixes.py`) at a fixed step time and fixed
prices of devices. Many microbatch counts are priced at once, in intervals, of which the
program thinks too well; an interval that this optimism keeps alive is split. So no
template that is worth its price is missed.

Does not own the prices (`master.py`).
"""

from collections.abc import Iterator

import numpy as np

from hetjax.planner.completion import Interval, Reach, intervals, reach
from hetjax.planner.problem import Floats, Ints, Problem
from hetjax.planner.suffixes import Labels, Search, pipelines, search_of, template_of
from hetjax.planner.templates import (
    ROUNDING,
    Column,
    Form,
    column,
    most_microbatches,
)

_FIRST_RATIO = 0.04  # width of the intervals that are tried first
_WORTH_STEP, _STEP_GROWTH = 0.93, 0.98
_MOST_COLUMNS = 60
_HARVEST_RATIO = 0.01
_MOST_HARVESTED = 1000
_LESS_STEP, _NUM_LESS = 0.5, 10
_FEW_LABELS, _MANY_LABELS = 1000, 20000


def price(
    p: Problem, form: Form, step_s: float, price_C: Floats, worth: float
) -> list[Column]:
    """Return templates that do `worth` sequences or more per unit of price.

    Some of the best of them; none only if there is none within the step time.
    """
    can = reach(p, form, step_s)
    todo = list(intervals(_most(p, can), _FIRST_RATIO))
    if not todo:
        return []
    search = search_of(p, form, can, price_C, todo)
    for rung in _rungs(search, worth):
        found = _priced(search, todo, price_C, rung)
        if found:
            return found
    return []


def harvest(
    p: Problem,
    form: Form,
    step_s: float,
    price_C: Floats,
    *,
    worth: float,
    least_worth: float,
) -> list[Column]:
    """Return many templates for whole copies to choose from.

    From those of about `worth` down to `least_worth`, and on as long as there are few.
    In the closed form, only those whose memory holds what slow hops ask for.
    """
    can = reach(p, form, step_s)
    todo = list(intervals(_most(p, can), _HARVEST_RATIO))
    if not todo:
        return []
    search = search_of(p, form, can, price_C, todo, serves_hops=form == "closed")
    columns: list[Column] = []
    for rung in _falling(worth, least_worth):
        found, kept = pipelines(search, rung)
        columns = _columns(search, found, kept, _MOST_HARVESTED)
        few = _FEW_LABELS if rung <= least_worth else _MANY_LABELS
        if len(found) > few:
            break
    return [c for c in columns if c.serves_hops]


def _falling(worth: float, least_worth: float) -> Iterator[float]:
    """Yield worths by small steps to the least, then by larger ones to next to none."""
    while worth > least_worth:
        worth = max(worth * _WORTH_STEP, least_worth)
        yield worth
    for n in range(1, _NUM_LESS):
        yield worth * _LESS_STEP**n


def _rungs(search: Search, worth: float) -> Iterator[float]:
    """Yield worths down to the given one, from above what any template could have.

    Few labels are worth a lot, so what is found early is found cheaply.
    """
    rung = _most_worth(search)
    if worth * (1 - ROUNDING) <= rung <= worth:
        yield worth
    step = _WORTH_STEP
    while rung > worth:
        rung = max(worth, rung * step)
        step *= _STEP_GROWTH
        yield rung


def _most_worth(search: Search) -> float:
    return float((search.worth_N / search.rest_NJF[:, -1, 1]).max())


def _priced(
    search: Search, todo: list[Interval], price_C: Floats, worth: float
) -> list[Column]:
    p, form, can = search.p, search.form, search.can
    while todo:
        found, kept = pipelines(search, worth)
        columns = _columns(search, found, kept, _MOST_COLUMNS)
        better = _better(columns, can.step_s, price_C, worth)
        if better:
            return better
        todo = _split([todo[n] for n in np.unique(kept.interval)])
        if todo:
            search = search_of(p, form, can, price_C, todo)
    return []


def _most(p: Problem, can: Reach) -> Ints:
    """The most microbatches that a pipeline could do, by microbatch size."""
    whole_B = can.most_BOIJ.max(axis=(1, 2, 3))
    return np.minimum(whole_B, p.global_batch // np.array(p.microbatch_sizes))


def _split(kept: list[Interval]) -> list[Interval]:
    """Halve intervals; those of one count have nothing more to tell."""
    halves = []
    for b, lo, hi in kept:
        if lo < hi:
            middle = (lo + hi) // 2
            halves += [Interval(b, lo, middle), Interval(b, middle + 1, hi)]
    return halves


def _columns(s: Search, pool: Labels, found: Labels, most: int) -> list[Column]:
    """Return the templates of the most promising whole pipelines, without repeats."""
    promise = s.worth_N[found.interval] / found.cost
    best = np.argsort(-promise, kind="stable")[:most]
    templates = {template_of(s, pool, found, int(row)): None for row in best}
    return [column(s.p, template, s.form) for template in templates]


def _better(
    columns: list[Column], step_s: float, price_C: Floats, worth: float
) -> list[Column]:
    """Return the columns that are in fact worth it, the best first."""
    if not columns:
        return []
    num_sequences = most_microbatches(columns, step_s) * np.array(
        [c.template.microbatch_size for c in columns]
    )
    ratio = num_sequences / (np.array([c.used for c in columns]) @ price_C)
    order = np.argsort(-ratio, kind="stable")
    return [columns[n] for n in order if ratio[n] >= worth * (1 - ROUNDING)]
