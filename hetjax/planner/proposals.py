# SPDX-License-Identifier: Apache-2.0
"""What the model proposes: layouts with a bound, one tensor degree after the other.

Owns which problems are solved for a request: the same tensor degree for all stages, or
all degrees at once where replicas may be cut unlike; all nodes, or some of them, since
a gradient sum is as fast as the slowest way between replicas, which the model does not
choose. Does not own how a problem is solved
(`master.py`), nor whose layout is best in the end (`find.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from hetjax.cluster.catalogue import device_price_per_hour
from hetjax.cluster.cluster import part_of
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.master import (
    Copies,
    Layout,
    candidates,
    cheapest,
    lower_bound,
)
from hetjax.planner.objectives import Objective
from hetjax.planner.placement import ORDERS, Pipeline, placed
from hetjax.planner.problem import Problem
from hetjax.planner.request import NodeClass, Request
from hetjax.planner.terms import bound_problem, search_problem
from hetjax.plans.plan import Plan

_NUM_LAYOUTS = 4  # of every problem, for the judge to choose from
_SLACKS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)  # of step times that may be cheaper


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """Layouts on a part of the cluster at some tensor degrees, best first."""

    request: Request
    degrees: tuple[int, ...]
    problem: Problem
    layouts: tuple[Layout, ...]

    @property
    def step_s(self) -> float:
        """The model's time of the best layout."""
        return self.layouts[0].step_s


def proposals(
    request: Request,
    objective: Objective,
    progress: Callable[[str], None] = lambda line: None,
    *,
    whole: bool = False,
) -> list[Proposal]:
    """Return what every set of tensor degrees comes to on every part of the cluster.

    Parts that could not be faster than what was found if all their devices computed all
    the time are left out, and all of them if only the `whole` is asked for.
    """
    found: list[Proposal] = []
    for part in [request] if whole else parts_of(request):
        for degrees in degree_sets(part):
            proposal = _proposal(part, degrees, objective, found)
            if proposal is not None:
                found.append(proposal)
                progress(
                    f"{_devices(part)}, tensor {' or '.join(map(str, degrees))}: "
                    f"{proposal.step_s:.4g} s by the model"
                )
    return sorted(found, key=lambda p: p.step_s)


def lower_bound_s(request: Request) -> float:
    """Return what no plan simulates faster than; inf if none fits into memory.

    Whatever the tensor degrees of its stages: see `Found`.
    """
    try:
        return lower_bound(bound_problem(request, request.degrees), "prefix").step_s
    except NoFeasiblePlan:
        return math.inf


def parts_of(request: Request) -> Iterator[Request]:
    """The whole cluster, then parts whose slowest ways may be faster.

    All classes but one, and one class alone; one node of each class.
    """
    classes = request.classes
    chosen: dict[tuple[str, ...], None] = {}
    for kept in (
        classes,
        *combinations(classes, len(classes) - 1),
        *((nodes,) for nodes in classes),
    ):
        chosen[tuple(node.name for nodes in kept for node in nodes.nodes)] = None
    for nodes in classes:
        chosen[(nodes.nodes[0].name,)] = None
    for names in chosen:
        if names:
            yield replace(request, cluster=part_of(request.cluster, names))


def degree_sets(request: Request) -> list[tuple[int, ...]]:
    """Return the tensor degrees that one plan may mix."""
    if request.unequal_tensor:
        return [request.degrees]
    return [(degree,) for degree in request.degrees]


def plans_of(proposal: Proposal) -> Iterator[Plan]:
    """Place the proposal's layouts on nodes, in every order that fits."""
    for layout in proposal.layouts:
        pipelines = pipelines_of(proposal.problem, layout.copies)
        for order in ORDERS:
            plan = placed(proposal.request, pipelines, order)
            if plan is not None:
                yield plan


def pipelines_of(p: Problem, copies: Sequence[Copies]) -> list[Pipeline]:
    """Write copies of templates out as replicas."""
    return [
        Pipeline(
            num_microbatches=c.num_microbatches,
            microbatch_size=c.template.microbatch_size,
            stages=tuple((p.options[s.option], s.layers) for s in c.template.stages),
        )
        for c in copies
        for _ in range(c.num_copies)
    ]


def _proposal(
    request: Request,
    degrees: Sequence[int],
    objective: Objective,
    found: Sequence[Proposal],
) -> Proposal | None:
    """None if nothing fits, or if the part cannot be as fast as what was found."""
    p = search_problem(request, degrees)
    fewer = objective.wish != "time" or objective.max_usd_per_hour is not None
    if found and not fewer and _compute_s(p) > min(f.step_s for f in found):
        return None
    try:
        layouts = candidates(p, "closed", _NUM_LAYOUTS)
    except NoFeasiblePlan:
        return None
    if fewer:
        layouts = [*layouts, *_cheaper(request, p, layouts[0].step_s)]
    return Proposal(
        request=request, degrees=tuple(degrees), problem=p, layouts=tuple(layouts)
    )


def _compute_s(p: Problem) -> float:
    """The step time if every device computed at its best rate all the time."""
    return p.global_batch / float(p.rates_C @ p.devices_C)


def _cheaper(request: Request, p: Problem, step_s: float) -> Iterator[Layout]:
    """Layouts that take longer for less money, or with fewer lost nodes."""
    for wish in (_usd_per_hour, _losses_per_hour):
        prices_C = np.array([wish(nodes) for nodes in request.classes])
        if not prices_C.any():
            continue
        for slack in _SLACKS:
            layout = cheapest(p, "closed", slack * step_s, prices_C)
            if layout is not None:
                yield layout


def _devices(request: Request) -> str:
    return " + ".join(f"{c.num_devices} {c.name}" for c in request.classes)


def _usd_per_hour(nodes: NodeClass) -> float:
    """Of one device; 0 where nobody tells."""
    return device_price_per_hour(nodes.nodes[0]) or 0.0


def _losses_per_hour(nodes: NodeClass) -> float:
    """Of a device's share in its node."""
    return (nodes.nodes[0].preemptions_per_hour or 0.0) / nodes.devices_per_node
