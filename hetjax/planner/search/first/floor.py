# SPDX-License-Identifier: Apache-2.0
"""The floor: quick plans for parts of the cluster; no answer may be worse than these.

A search of all devices can end with a plan that is slower than one for fewer devices.
Costs that the model knows least about, such as a link that all replicas share, are
largest where most devices take part. So these are planned alone: every kind, zone,
class, and kind within a zone, and one node of each class. So are all devices without
each kind, zone and class.

Owns the order in which parts are planned. Does not own which parts there are
(`parts.py`), whether they come before the whole (`first_plans.py`), how a part is
planned (`price_and_branch.py`), nor the search of the whole (`proposals.py`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.prices import device_price_per_hour
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.hops import Holders
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.first.parts import parts_alone, parts_without
from hetjax.planner.search.first.proposals import (
    Proposal,
    degree_sets,
    holders_matter,
    most_promising,
)
from hetjax.planner.search.price_and_branch import candidates


def floor(
    request: PlanRequest,
    best_s: Callable[[], float] = lambda: math.inf,
    *,
    by_cost: bool = False,
) -> Iterator[Proposal]:
    """Yield a proposal for every part that could be faster than `best_s()`. Yield
    another one if it matters whether only like nodes hold the same layers.

    `best_s` is called before each part. Parts that compute most come first, or, with
    `by_cost`, those that compute most for their price. Parts without a feasible plan
    yield nothing.
    """
    first = _tflops_per_usd if by_cost else _peak_tflops
    for parts in (parts_alone(request), parts_without(request)):
        for part in sorted(parts, key=first, reverse=True):
            for holders in _holders(part):
                proposal = _quickly(part, best_s(), holders)
                if proposal is not None:
                    yield proposal


def _holders(part: PlanRequest) -> tuple[Holders, ...]:
    """Return the holders to plan for; for a large part only like nodes."""
    if part.is_large:
        return ("alike",)
    matter = any(holders_matter(part, degrees) for degrees in degree_sets(part))
    return ("any", "alike") if matter else ("any",)


def _peak_tflops(part: PlanRequest) -> float:
    nodes = part.cluster.nodes
    return sum(device_spec(node).peak_tflops * node.count for node in nodes)


def _tflops_per_usd(part: PlanRequest) -> float:
    """Return a part's TFLOP/s per USD per hour; 0 if a price is unknown."""
    usd = 0.0
    for node in part.cluster.nodes:
        price = device_price_per_hour(node, part.usd_per_kwh)
        usd += math.inf if price is None else price * node.count
    return _peak_tflops(part) / usd if usd else math.inf


def _quickly(part: PlanRequest, best_s: float, holders: Holders) -> Proposal | None:
    """Solve the most promising problem of a part; None if there is none."""
    look = most_promising(part, math.inf, best_s, holders=holders)
    if look is None:
        return None
    with suppress(NoFeasiblePlan):
        seen = look.heuristic_bound
        unplaced = candidates(look.problem, "closed", seen=seen, quick=True)
        return Proposal(look=look, unplaced=unplaced)
    return None
