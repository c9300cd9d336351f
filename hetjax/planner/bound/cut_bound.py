# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on the step time that count the traffic across a cut of the network.

Owns how a cut improves a bound. The result is the least of three bounds: for plans
whose sequences all cross the cut, and for plans with either side as home
(`model/network_cuts.py`). Does not own the proof at a step time
(`column_generation.py`).
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf

import numpy as np

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.column_generation import Bound, lower_bound, seen_in
from hetjax.planner.model.deadline import TimeUp
from hetjax.planner.model.network_cuts import Cut, WorkLimit, cuts_of, trained_elements
from hetjax.planner.model.problem import Floats, Problem, merged_ranges
from hetjax.planner.model.request import PlanRequest

_MOST_CUTS = 2  # the cuts that are slowest to cross
_WORTH = 1.01  # times the bound so far; cuts that cannot reach this are skipped


def bound_by_cuts(
    request: PlanRequest,
    p: Problem,
    best_s: float,
    within: Callable[[Problem, float], float],
    *,
    parts: int = 1,
    enough_s: float = inf,
) -> float:
    """Return the bound `best_s`, improved by cuts of the network, up to `enough_s`.

    `within` returns the bound of a problem with a limit on work; larger bounds than its
    second argument are not needed. The problem has `parts` microbatches, and `parts`
    sequences, for each real one.
    """
    for cut in cuts_of(request)[:_MOST_CUTS]:
        if cut.crossing_s < best_s * _WORTH or best_s >= enough_s:
            break
        least_s = min(cut.crossing_s, enough_s)
        for home in (cut.side, frozenset(range(len(p.classes))) - cut.side):
            if least_s > best_s:
                limited = replace(p, work_limit=_limit(request, p, cut, home, parts))
                least_s = min(least_s, within(limited, least_s))
        best_s = max(best_s, least_s)
    return best_s


def bound_within(bound: Bound, p: Problem, enough_s: float) -> float:
    """Return the bound by columns within the problem's limit on work. When the time is
    up, return the bound without the limit."""
    try:
        with suppress(TimeUp):
            seen = seen_in(p, bound)
            return lower_bound(p, "prefix", seen=seen, enough_s=enough_s).step_s
    except NoFeasiblePlan:
        return inf
    return bound.step_s


def _limit(
    request: PlanRequest, p: Problem, cut: Cut, home: frozenset[int], parts: int
) -> WorkLimit:
    """Return the limit on the work of the side that is not home."""
    away_O1 = np.array([[o.device_class not in home] for o in p.options])
    return WorkLimit(
        weight_OU=away_O1 * _share_U(request, p),
        most_sequences=lambda step_s: parts * cut.most_sequences(step_s),
    )


def _share_U(request: PlanRequest, p: Problem) -> Floats:
    """Return the share of the model's trained elements in every range of layers."""
    elements_L = trained_elements(request.model)
    kinds = tuple(int(kind) for kind in p.kind_J[1:])
    _, counts_KU = merged_ranges(kinds)
    _, first_K = np.unique(kinds, return_index=True)
    share_K = np.array([elements_L[at] / sum(elements_L) for at in first_K])
    return share_K @ counts_KU
