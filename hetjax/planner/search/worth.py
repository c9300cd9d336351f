# SPDX-License-Identifier: Apache-2.0
"""Computes the worth of every kind of device, class of nodes and zone: the best plan
without it, and the best plan on it alone.

Owns which parts are compared with the best plan. Does not own the search for their
plans (`floor.py`, `first_plans.py`), nor why devices are idle (`idle.py`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from hetjax.planner.model.objectives import Objective, score, within
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Found
from hetjax.planner.search.first.parts import (
    nodes_by_class,
    nodes_by_kind,
    nodes_by_zone,
)
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

Nodes = frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instead:
    """The best plan found on some nodes, and how much worse it is than the best plan by
    the objective, as a share. `is_searched` is False if there was only a quick look."""

    predicted: Predicted
    worse: float
    is_searched: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """A kind of device, a class of nodes or a zone: its number of devices, how many the
    best plan uses, and the best found `without` it and `alone` on it (None if none)."""

    part: str
    num_devices: int
    num_used: int
    without: Instead | None
    alone: Instead | None


def best_plan(
    request: PlanRequest,
    objective: Objective,
    simulated: Iterable[Predicted],
    counts: Callable[[Plan], bool],
) -> Predicted | None:
    """Return the best plan that is within the limits and for which `counts` is true;
    None if there is none."""
    return min(
        (f for f in simulated if within(f, objective) and counts(f.plan)),
        key=lambda found: score(found, request.cluster, objective),
        default=None,
    )


def worse_by(ours: float, theirs: float) -> float:
    """Return by how much the other score is worse, as a share; 0 if both are 0.

    >>> worse_by(2.0, 3.0), worse_by(0.0, 0.0)
    (0.5, 0.0)
    """
    return theirs / ours - 1 if ours else (math.inf if theirs else 0.0)


def worth_of_parts(
    found: Found,
    chosen: Plan,
    simulated: Iterable[Predicted],
    searched: Collection[Nodes],
) -> tuple[Worth, ...]:
    """Return the worth of every part by the plans simulated under h1f1b, compared with
    the best of these (`Found.best_h1f1b`).

    Devices in use are those of `chosen`, which differs from the best plan if a run
    moves to another one. `searched` are the sets of nodes that were searched, not just
    looked at quickly. Empty if there is only one part.
    """
    request, plans = found.request, list(simulated)
    ours = score(found.best_h1f1b, request.cluster, found.objective)
    whole = request.cluster.names

    def instead(nodes: Nodes) -> Instead | None:
        best = best_plan(
            request, found.objective, plans, lambda plan: plan.nodes <= nodes
        )
        if best is None:
            return None
        worse = worse_by(ours, score(best, request.cluster, found.objective))
        is_searched = nodes in searched or best.plan.nodes in searched
        # others may be better than a plan that is kept because a move does not pay
        return Instead(predicted=best, worse=max(worse, 0.0), is_searched=is_searched)

    names: dict[Nodes, list[str]] = {}
    used = chosen.used_devices()
    for part, nodes in _parts(request):
        if nodes != whole:
            names.setdefault(nodes, []).append(part)
    return tuple(
        Worth(
            part=", ".join(parts),
            num_devices=sum(request.cluster.node(name).count for name in nodes),
            num_used=sum(name in nodes for name, _ in used),
            without=instead(whole - nodes),
            alone=instead(nodes),
        )
        for nodes, parts in names.items()
    )


def _parts(request: PlanRequest) -> Iterator[tuple[str, Nodes]]:
    """Yield every class of nodes, every kind, and every zone with a name."""
    # a class that has all nodes of its kind has the kind's name
    yield from (nodes_by_class(request) | nodes_by_kind(request)).items()
    for zone, nodes in nodes_by_zone(request).items():
        if zone:
            yield f"zone {zone}", nodes
