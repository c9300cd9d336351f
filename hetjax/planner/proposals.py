# SPDX-License-Identifier: Apache-2.0
"""What the model proposes: layouts with a bound, one tensor degree after the other.

Owns which problems are solved for a request: the same tensor degree for all stages, or
all degrees at once where replicas may be cut unlike; all device classes, or some of
them where fewer devices may be what is wished. Does not own how a problem is solved
(`master.py`), nor whose layout is best in the end (`find.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.cluster.catalogue import device_price_per_hour
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.master import Copies, Layout, candidates, cheapest, lower_bound
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
    """Layouts at some tensor degrees, best first, and the degrees' certified bound."""

    degrees: tuple[int, ...]
    problem: Problem
    layouts: tuple[Layout, ...]
    bound_s: float

    @property
    def step_s(self) -> float:
        """The model's time of the best layout."""
        return self.layouts[0].step_s


def proposals(
    request: Request, objective: Objective, progress: Callable[[str], None]
) -> list[Proposal]:
    """Return what every set of tensor degrees comes to; none where nothing fits."""
    found = []
    for degrees in degree_sets(request):
        proposal = _proposal(request, degrees, objective)
        told = "nothing fits in memory"
        if proposal is not None:
            found.append(proposal)
            told = (
                f"model {proposal.step_s:.4g} s, no plan below {proposal.bound_s:.4g} s"
            )
        progress(f"tensor {' or '.join(map(str, degrees))}: {told}")
    return sorted(found, key=lambda p: p.step_s)


def degree_sets(request: Request) -> list[tuple[int, ...]]:
    """Return the tensor degrees that one plan may mix."""
    if request.unequal_tensor:
        return [request.degrees]
    return [(degree,) for degree in request.degrees]


def plans_of(request: Request, proposal: Proposal) -> Iterator[Plan]:
    """Place the proposal's layouts on nodes, in every order that fits."""
    for layout in proposal.layouts:
        pipelines = pipelines_of(proposal.problem, layout.copies)
        for order in ORDERS:
            plan = placed(request, pipelines, order)
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
    request: Request, degrees: Sequence[int], objective: Objective
) -> Proposal | None:
    try:
        p = search_problem(request, degrees)
        bound_s = lower_bound(bound_problem(request, degrees), "prefix").step_s
        layouts = candidates(p, "closed", _NUM_LAYOUTS)
    except NoFeasiblePlan:
        return None
    if objective.wish != "time" or objective.max_usd_per_hour is not None:
        layouts = [*layouts, *_cheaper(request, p, layouts[0].step_s)]
    return Proposal(
        degrees=tuple(degrees), problem=p, layouts=tuple(layouts), bound_s=bound_s
    )


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


def _usd_per_hour(nodes: NodeClass) -> float:
    """Of one device; 0 where nobody tells."""
    return device_price_per_hour(nodes.nodes[0]) or 0.0


def _losses_per_hour(nodes: NodeClass) -> float:
    """Of a device's share in its node."""
    return (nodes.nodes[0].preemptions_per_hour or 0.0) / nodes.devices_per_node
