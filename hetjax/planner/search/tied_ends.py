# SPDX-License-Identifier: Apache-2.0
"""Proposals that keep a tied embedding in one class of nodes.

Where the head is the embedding, its gradients are summed over the first stage and the
last. If these are on nodes that a slow link joins, that sum can take longer than all
messages of pipelines that come back to where they began. Templates know nothing of it:
their first and last stage are priced apart.

Owns the problems in which both ends are on one class. Does not own how a problem is
solved (`price_and_branch.py`), nor which plan is best (`incumbents.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.column_generation import compute_bound_s, heuristic_bound
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.network_cuts import cuts_of
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms import search_problem
from hetjax.planner.search.price_and_branch import candidates
from hetjax.planner.search.proposals import Proposal, ScreenedProblem, degree_sets

_NUM_UNPLACED = 2
_MUCH = 0.1  # of the best step so far


def tied_ends(request: PlanRequest, best_s: Callable[[], float]) -> Iterator[Proposal]:
    """Yield proposals of one replica and of several, with both ends on each class.

    Those that could be faster than `best_s` says, by the model. None where summing the
    first and last layer's common elements across every cut takes little of that.
    """
    sums_s = (cut.tied_bytes / cut.bytes_per_s for cut in cuts_of(request))
    if max(sums_s, default=0.0) < _MUCH * best_s():
        return
    for device_class in range(len(request.classes)):
        for num_replicas in (1, 2):
            look = _most_promising(request, device_class, num_replicas, best_s())
            if look is None:
                continue
            seen = look.heuristic_bound
            with suppress(NoFeasiblePlan):
                found = candidates(look.problem, "closed", _NUM_UNPLACED, seen=seen)
                yield Proposal(look=look, unplaced=found, bound_s=found[0].bound_s)


def _most_promising(
    request: PlanRequest, device_class: int, num_replicas: int, best_s: float
) -> ScreenedProblem | None:
    """The problem of the tensor degrees that promise most; None if none promises."""
    best: ScreenedProblem | None = None
    for degrees in degree_sets(request):
        check_deadline()
        p = search_problem(request, degrees, num_replicas=num_replicas)
        p = with_ends_on(p, device_class)
        if compute_bound_s(p) >= best_s:
            continue
        seen = heuristic_bound(p, "closed", best_s)
        if seen is not None:
            best_s = seen.relaxed_s
            best = ScreenedProblem(
                request=request,
                degrees=degrees,
                num_replicas=num_replicas,
                problem=p,
                heuristic_bound=seen,
            )
    return best


def with_ends_on(p: Problem, device_class: int) -> Problem:
    """Return the problem of pipelines that begin and end on devices of the class."""
    ends = {int(p.kind_J[1]), int(p.kind_J[-1])}
    is_end_U = np.zeros(int(p.range_IJ.max()) + 1, dtype=np.bool_)
    for start, end in zip(*np.triu_indices(p.num_layers + 1, k=1), strict=True):
        held = p.kind_J[start + 1 : end + 1]
        is_end_U[p.range_IJ[start, end]] |= bool(ends & set(map(int, held)))
    away_O = np.array([o.device_class != device_class for o in p.options])
    forbidden_OU = away_O[:, None] & is_end_U
    held_BOU = np.where(forbidden_OU, 0, p.most_in_flight_BOU)
    return replace(p, most_in_flight_BOU=held_BOU)
