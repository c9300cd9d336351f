# SPDX-License-Identifier: Apache-2.0
"""The floor: quick plans for parts of the cluster, which no answer may be worse than.

A search of all devices can end with a plan that is slower than one for fewer: what the
model knows least about, such as a link that all replicas share, costs most where most
devices take part. So every kind, zone and node is planned alone, and all devices
without each kind and zone.

Owns in which order parts are looked at. Does not own which parts there are
(`parts.py`), whether they come before the whole (`find.py`), how one is planned
(`price_and_branch.py`), nor the search of the whole (`proposals.py`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

from hetjax.cluster.catalogue import device_spec
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.column_generation import compute_bound_s, heuristic_bound
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms import search_problem
from hetjax.planner.search.parts import parts_alone, parts_without
from hetjax.planner.search.price_and_branch import candidates
from hetjax.planner.search.proposals import Proposal, ScreenedProblem, degree_sets


def floor(
    request: PlanRequest, best_s: Callable[[], float] = lambda: math.inf
) -> Iterator[Proposal]:
    """Yield one proposal for every part that could be faster than `best_s` says.

    That is asked anew before each part. What computes most comes first. Parts of which
    no plan fits yield nothing.
    """
    for parts in (parts_alone(request), parts_without(request)):
        for part in sorted(parts, key=_peak_tflops, reverse=True):
            proposal = _quickly(part, best_s())
            if proposal is not None:
                yield proposal


def _peak_tflops(part: PlanRequest) -> float:
    nodes = part.cluster.nodes
    return sum(device_spec(node).peak_tflops * node.count for node in nodes)


def _quickly(part: PlanRequest, best_s: float) -> Proposal | None:
    """Solve the most promising problem of a part; None where none is."""
    best: ScreenedProblem | None = None
    for degrees in degree_sets(part):
        check_deadline()
        problem = search_problem(part, degrees, num_replicas=math.inf, tight=False)
        if compute_bound_s(problem) >= best_s:
            continue
        seen = heuristic_bound(problem, "closed", best_s)
        if seen is None:
            continue
        best_s = seen.relaxed_s
        best = ScreenedProblem(
            request=part,
            degrees=degrees,
            num_replicas=math.inf,
            problem=problem,
            heuristic_bound=seen,
        )
    if best is None:
        return None
    with suppress(NoFeasiblePlan):
        seen = best.heuristic_bound
        unplaced = candidates(best.problem, "closed", seen=seen, quick=True)
        return Proposal(look=best, unplaced=unplaced)
    return None
