# SPDX-License-Identifier: Apache-2.0
"""Generates proposals that keep a tied embedding in one class of nodes.

Where the head is the embedding, its gradients are summed over the first and the last
stage. If a slow link joins their nodes, that sum can take longer than all messages of
pipelines that return to their first nodes. Templates do not include this sum: their
first and last stages are priced separately.

Owns the problems in which both ends are on one class. Does not own how a problem is
solved (`price_and_branch.py`), nor which plan is best (`incumbents.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from hetjax.planner.model.network_cuts import cuts_of
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.first.proposals import (
    Proposal,
    degree_sets,
    look_below,
    most_promising,
    solved,
)

_NUM_UNPLACED = 2
_MUCH = 0.1  # of the best step so far
_FILLED = 1.2  # times the best step: other schedules fill a pipeline's waiting time


def tied_ends(request: PlanRequest, best_s: Callable[[], float]) -> Iterator[Proposal]:
    """Yield proposals of one replica and of several, with both ends on each class.

    By the model, they could be faster than `best_s()`. There are none if summing the
    elements that the first and last layer share takes little of that time, across
    every cut.
    """
    sums_s = (cut.tied_bytes / cut.bytes_per_s for cut in cuts_of(request))
    if max(sums_s, default=0.0) < _MUCH * best_s():
        return
    for device_class in range(len(request.classes)):
        ends = partial(with_ends_on, device_class=device_class)
        for degrees in degree_sets(request):
            near_s = _FILLED * best_s()
            if look := look_below(near_s, request, degrees, 1, ends):
                yield from solved(look, _NUM_UNPLACED, quick=False)
        if look := most_promising(request, 2, best_s(), ends):
            yield from solved(look, _NUM_UNPLACED, quick=False)


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
