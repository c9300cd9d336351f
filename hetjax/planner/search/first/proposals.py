# SPDX-License-Identifier: Apache-2.0
"""Generates the model's proposals: unplaced plans with a bound, by tensor degree.

Owns which problems are solved for a request. Stages have the same tensor degree, or all
degrees at once where replicas may be sharded differently. Nodes are all, or some of
them, since gradient sums between unlike nodes take longer than the model says. Does not
own how a problem is solved (`price_and_branch.py`), nor the choice of the best plan
(`find.py`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from hetjax.cluster.prices import device_price_per_hour
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.column_generation import (
    Bound,
    compute_bound_s,
    heuristic_bound,
)
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.hops import HOLDERS, Holders, sync_bytes_per_s
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.request import NodeClass, PlanRequest
from hetjax.planner.model.seating import ORDERS, UnplacedReplica, place
from hetjax.planner.model.terms.terms import options_of, search_problem
from hetjax.planner.search.first.parts import (
    parts_alone,
    parts_without,
    searches_parts,
)
from hetjax.planner.search.price_and_branch import (
    ColumnCount,
    UnplacedPlan,
    candidates,
    cheapest,
)
from hetjax.plans.plan import Plan

_NUM_UNPLACED = 3  # per problem, for the simulator to choose from
_DOUBT, _DOUBT_FEW, _DOUBT_MANY = 1.05, 1.3, 1.02
_TIGHT_GAIN = 0.98
_MUCH_FASTER = 1.5  # ratio from which sums between like nodes get separate problems
_NUM_CHEAPER = 2  # problems that are searched for slower and cheaper plans
_SLACKS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)  # step times that may be cheaper


@dataclass(frozen=True, kw_only=True, eq=False)
class ScreenedProblem:
    """A problem (a part of the cluster at some tensor degrees), and the heuristic bound
    from a first look. Gradient sums are priced for `num_replicas` replicas and these
    `holders` of layers. If `tight`, the extra memory of several layers is left out, so
    plans may not fit."""

    request: PlanRequest
    degrees: tuple[int, ...]
    num_replicas: float
    holders: Holders
    tight: bool
    problem: Problem
    heuristic_bound: Bound

    @property
    def relaxed_s(self) -> float:
        return self.heuristic_bound.relaxed_s

    @property
    def counted(self) -> tuple[Holders, bool]:
        """How the problem is priced; step times are comparable only if it is equal."""
        return self.holders, self.tight


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """Layouts (unplaced plans) for a problem, best first.

    `bound_s` is the model's lower bound on a layout's time; infinity if none is known.
    """

    look: ScreenedProblem
    unplaced: Sequence[UnplacedPlan]
    bound_s: float = math.inf

    @property
    def nodes(self) -> frozenset[str]:
        """The names of the nodes that the layouts may use."""
        return self.look.request.cluster.names

    @property
    def step_s(self) -> float:
        """The model's time of the best layout."""
        return self.unplaced[0].step_s

    def progress_line(self) -> str:
        """Return a line of text with the model's time of the best layout."""
        look = self.look
        degrees = " or ".join(map(str, look.degrees))
        sums = ", one replica" if look.num_replicas == 1 else ""
        there = " + ".join(f"{c.num_devices} {c.name}" for c in look.request.classes)
        return f"{there}, tensor {degrees}{sums}: {self.step_s:.4g} s by the model"


def proposals(
    request: PlanRequest,
    *,
    fewer: bool = False,
    whole: bool = False,
    quick: bool = False,
) -> Iterator[Proposal]:
    """Yield a proposal for every set of tensor degrees on every part of the cluster.

    Proposals that do not promise nearly the best time so far are left out, and, with
    `whole`, all parts. `fewer`: slower plans on fewer devices count, too. `quick`:
    plans are less close to the best, and none keeps each layer on like nodes to make
    gradient sums faster; in large clusters all do. The first proposal, the most
    promising for the whole, comes early.
    """
    looks: list[ScreenedProblem] = []
    first: ScreenedProblem | None = None
    for look in _looks(request, fewer, whole, quick):
        # parts come after the whole
        if first is None and looks and not _is_whole(look, request):
            first = min(looks, key=lambda look: look.relaxed_s)
            yield from _proposed(first, quick)
        looks.append(look)
    looks.sort(key=lambda look: look.relaxed_s)
    least_s_of = {look.counted: look.relaxed_s for look in reversed(looks)}
    for look in looks:
        near_s = least_s_of[look.counted] * _doubt(look.num_replicas, fewer)
        if look is not first and look.relaxed_s <= near_s:
            yield from _proposed(look, quick)
    # not of parts: a part without some devices is another part
    wholes = [look for look in looks if _is_whole(look, request)]
    for look in wholes[:_NUM_CHEAPER] if fewer else ():
        yield from _cheaper(look)


def _looks(
    request: PlanRequest, fewer: bool, whole: bool, quick: bool
) -> Iterator[ScreenedProblem]:
    """Yield a first look at every problem, except those whose compute bound is already
    far above the best look so far."""
    least_s_of = defaultdict[tuple[Holders, bool], float](lambda: math.inf)
    for part, degrees, num_replicas, holders in _problems(request, whole, quick):
        relaxed_s = math.inf
        for tight in (False, True)[: 2 if searches_parts(request) else 1]:
            check_deadline()
            p = search_problem(
                part,
                degrees,
                num_replicas=num_replicas,
                holders=holders,
                tight=tight,
            )
            counted = holders, tight
            near_s = least_s_of[counted] * _doubt(num_replicas, fewer)
            if compute_bound_s(p) > near_s:
                continue
            look = _look(part, degrees, num_replicas, counted, p, near_s)
            # the tight problem counts only if it promises a clearly shorter step
            if look is not None and look.relaxed_s < relaxed_s * _TIGHT_GAIN:
                relaxed_s = look.relaxed_s
                least_s_of[counted] = min(least_s_of[counted], relaxed_s)
                yield look


def _look(
    request: PlanRequest,
    degrees: tuple[int, ...],
    num_replicas: float,
    counted: tuple[Holders, bool],
    p: Problem,
    below_s: float,
) -> ScreenedProblem | None:
    """Take a first look at a problem; None if nothing was found below `below_s`."""
    seen = heuristic_bound(p, "closed", below_s)
    if seen is None:
        return None
    return ScreenedProblem(
        request=request,
        degrees=degrees,
        num_replicas=num_replicas,
        holders=counted[0],
        tight=counted[1],
        problem=p,
        heuristic_bound=seen,
    )


def _doubt(num_replicas: float, fewer: bool) -> float:
    """Return how far above the least time the truly best problem may be. The model
    knows least about sums of few replicas."""
    if fewer:
        return math.inf
    return {1: _DOUBT, 2: _DOUBT_FEW, math.inf: _DOUBT_MANY}[num_replicas]


def _problems(
    request: PlanRequest, whole: bool, quick: bool
) -> Iterator[tuple[PlanRequest, tuple[int, ...], float, Holders]]:
    """Yield parts, tensor degrees, numbers of replicas, and holders of layers.

    Only the whole is tried with one replica, and, unless `quick`, with like holders
    where that matters. In large clusters, only the whole with many replicas and like
    holders is tried: parts and few replicas are seldom faster.
    """
    parts: list[PlanRequest] = []
    if not whole and searches_parts(request):
        parts = [*parts_without(request), *parts_alone(request)]
    for n, part in enumerate([request, *parts]):
        for degrees in degree_sets(part):
            if request.is_large:
                yield part, degrees, math.inf, "alike"
                continue
            if n == 0:
                yield part, degrees, 1, "any"
            yield part, degrees, 2, "any"
            if n == 0 and not quick and holders_matter(part, degrees):
                yield part, degrees, 2, "alike"


def holders_matter(request: PlanRequest, degrees: tuple[int, ...]) -> bool:
    """Return whether gradient sums of some stages take much longer between unlike
    nodes."""
    options = options_of(request, degrees)
    alike_O, any_O = (
        sync_bytes_per_s(request, options, holders) for holders in HOLDERS
    )
    return bool((alike_O > _MUCH_FASTER * any_O).any())


def degree_sets(request: PlanRequest) -> list[tuple[int, ...]]:
    """Return the tensor degrees that one plan may mix."""
    if request.unequal_tensor:
        return [request.degrees]
    return [(degree,) for degree in request.degrees]


def most_promising(
    request: PlanRequest,
    num_replicas: float,
    best_s: float,
    narrowed: Callable[[Problem], Problem] = lambda p: p,
    holders: Holders = "any",
) -> ScreenedProblem | None:
    """Return the problem of the most promising tensor degrees, after `narrowed`; None
    if none promises a step below `best_s`."""
    best: ScreenedProblem | None = None
    for degrees in degree_sets(request):
        look = look_below(best_s, request, degrees, num_replicas, narrowed, holders)
        if look is not None:
            best, best_s = look, look.relaxed_s
    return best


def look_below(
    best_s: float,
    request: PlanRequest,
    degrees: tuple[int, ...],
    num_replicas: float,
    narrowed: Callable[[Problem], Problem] = lambda p: p,
    holders: Holders = "any",
) -> ScreenedProblem | None:
    """Take a first look at the problem of some tensor degrees, after `narrowed`; None
    if it promises no step below `best_s`."""
    check_deadline()
    p = search_problem(request, degrees, num_replicas=num_replicas, holders=holders)
    p = narrowed(p)
    if compute_bound_s(p) >= best_s:
        return None
    return _look(request, degrees, num_replicas, (holders, False), p, best_s)


def plans_of(proposal: Proposal, rank: int) -> Iterator[Plan]:
    """Yield plans of the proposal's layout of that rank, one per order that fits."""
    look = proposal.look
    for unplaced in proposal.unplaced[rank : rank + 1]:
        pipelines = pipelines_of(look.problem, unplaced.copies)
        orders = ORDERS
        if look.request.is_large and _fill_nodes(look.request, pipelines):
            orders = ORDERS[:1]  # the others would differ only in the names of nodes
        plans = (place(look.request, pipelines, order) for order in orders)
        yield from (plan for plan in plans if plan is not None)


def _fill_nodes(request: PlanRequest, pipelines: Sequence[UnplacedReplica]) -> bool:
    """Return whether every stage takes all devices of a node."""
    return all(
        option.num_devices == request.classes[option.device_class].devices_per_node
        for pipeline in pipelines
        for option, _ in pipeline.stages
    )


def plans_by_rank(proposed: Sequence[Proposal]) -> Iterator[Plan]:
    """Yield the best of every proposal, fastest first, then their second best, ..."""
    proposed = sorted(proposed, key=lambda p: p.step_s)
    most = max((len(p.unplaced) for p in proposed), default=0)
    for rank in range(most):
        for proposal in proposed:
            yield from plans_of(proposal, rank)


def pipelines_of(p: Problem, copies: Sequence[ColumnCount]) -> list[UnplacedReplica]:
    """Return copies of templates as unplaced replicas."""
    return [
        UnplacedReplica(
            num_microbatches=c.num_microbatches,
            microbatch_size=c.template.microbatch_size,
            stages=tuple((p.options[s.option], s.layers) for s in c.template.stages),
        )
        for c in copies
        for _ in range(c.num_copies)
    ]


def _is_whole(look: ScreenedProblem, request: PlanRequest) -> bool:
    return len(look.request.cluster.nodes) == len(request.cluster.nodes)


def _proposed(look: ScreenedProblem, quick: bool) -> Iterator[Proposal]:
    """Yield the proposal of integer copies; nothing if nothing fits."""
    quick = quick or look.request.is_large
    yield from solved(look, 1 if quick else _NUM_UNPLACED, quick=quick)


def solved(look: ScreenedProblem, num: int, *, quick: bool) -> Iterator[Proposal]:
    """Yield the proposal of up to `num` layouts (`candidates`); nothing if nothing
    fits."""
    with suppress(NoFeasiblePlan):
        seen = look.heuristic_bound
        unplaced = candidates(look.problem, "closed", num, seen=seen, quick=quick)
        yield Proposal(look=look, unplaced=unplaced, bound_s=unplaced[0].bound_s)


def _cheaper(look: ScreenedProblem) -> Iterator[Proposal]:
    """Yield layouts that take longer but cost less, or lose nodes more rarely."""
    usd_per_hour = partial(_usd_per_hour, usd_per_kwh=look.request.usd_per_kwh)
    for wish in (usd_per_hour, _losses_per_hour):
        prices_C = np.array([wish(nodes) for nodes in look.request.classes])
        for slack in _SLACKS if prices_C.any() else ():
            step_s = slack * look.relaxed_s
            unplaced = cheapest(look.problem, "closed", step_s, prices_C)
            if unplaced is not None:
                yield Proposal(look=look, unplaced=[unplaced])


def _usd_per_hour(nodes: NodeClass, usd_per_kwh: float | None) -> float:
    """Return the price of one device; 0 if unknown."""
    return device_price_per_hour(nodes.nodes[0], usd_per_kwh) or 0.0


def _losses_per_hour(nodes: NodeClass) -> float:
    """Return a device's share of its node's preemptions per hour."""
    return (nodes.nodes[0].preemptions_per_hour or 0.0) / nodes.devices_per_node
