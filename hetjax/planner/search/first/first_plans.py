# SPDX-License-Identifier: Apache-2.0
"""The plans that are simulated before any are improved: of parts, and of the whole.

Owns their order, which plans are too much work to look at, and that there is a plan
when the time is up: a limit (`model/deadline.py`) ends nothing before the first one.
Does not own templates, copies and bounds (`price_and_branch.py`), nor what is better
(`incumbents.py`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, product

from hetjax.cluster.cluster import part_of
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.models.fingerprint import fingerprint
from hetjax.models.model import tensor_sizes
from hetjax.planner.baselines.equal_shares import equal_share_plans
from hetjax.planner.model.deadline import (
    TimeUp,
    check_stopped,
    deadline,
    left_s,
    overtime,
)
from hetjax.planner.model.objectives import promise, wants_fewer, within
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.first.equal_pipelines import equal_pipelines
from hetjax.planner.search.first.floor import floor
from hetjax.planner.search.first.parts import (
    parts_alone,
    parts_without,
    searches_parts,
)
from hetjax.planner.search.first.proposals import (
    Proposal,
    plans_by_rank,
    plans_of,
    proposals,
)
from hetjax.planner.search.first.tied_ends import tied_ends
from hetjax.planner.search.incumbents import Incumbents
from hetjax.planner.search.infeasible import why_infeasible
from hetjax.planner.search.limits import too_dear
from hetjax.plans.even import even_plan
from hetjax.plans.plan import Plan

_MOST_WORK = 30_000  # of all plans that are simulated before local search
_LITTLE_WORK = 4_000  # of a plan that is simulated as soon as it is proposed
_FEW = 4  # even splits of a part
_FLOOR_SHARE = 0.7  # of the time that is left for proposals
_MOST_PARTS, _NEAR = 2, 1.25  # parts searched like a cluster; times the best so far


class FirstPlans:
    """`proposed` is what the model proposes for the whole; `searched` are the sets of
    nodes that were searched, and not only looked at."""

    def __init__(self, request: PlanRequest, incumbents: Incumbents) -> None:
        self.request, self.incumbents = request, incumbents
        self.proposed: list[Proposal] = []
        self.searched: set[frozenset[str]] = set()

    def simulate(self) -> None:
        """Simulate them. NoFeasiblePlan if nothing fits, TimeUp if nothing is found in
        time."""
        try:
            self._simulate()
        except TimeUp:
            self._at_once()

    def _simulate(self) -> None:
        """Simulate first what is most promising, and at once."""
        cluster, objectives = self.request.cluster, self.incumbents.objectives
        fewer = any(wants_fewer(wished, cluster) for wished in objectives)
        parts = floor(self.request, self._best_s, by_cost=objectives[0].wish == "cost")
        large = self.request.is_large
        self._first_of(parts)
        if not large:  # else what is found for all leaves few parts to look at
            self._simulate_equal_pipelines()
            self._look_at_all(parts)
        for proposal in proposals(self.request, fewer=fewer):
            self.proposed.append(proposal)
            self.searched.add(proposal.nodes)
            self.incumbents.progress(proposal.progress_line())
            for plan in plans_of(proposal, 0):
                if len(self.proposed) == 1 or plan.num_forwards <= _LITTLE_WORK:
                    self.incumbents.offer(plan, "templates")
        if large:
            self._look_at_all(parts)
        for source, plan in _plans(self.request, self.proposed):
            self.incumbents.offer(plan, source)
        if not self.incumbents.best and not self.incumbents.loosen():
            raise self._too_dear() or why_infeasible(self.request, objectives[0])
        for proposal in () if large else tied_ends(self.request, self._best_s):
            for plan in plans_by_rank([proposal]):
                self.incumbents.offer(plan, "templates")
        for part in () if large else self._promising_parts():
            self._search_part(part)
        if searches_parts(self.request):  # whose templates the whole has looked at
            for part in parts_without(self.request):
                for plan in equal_share_plans(part):
                    self.incumbents.offer(plan, "parts")

    def _first_of(self, parts: Iterator[Proposal]) -> None:
        """Have something in hand: the first part of which a plan fits. A limited time
        ends nothing before that; of a very deep model, where it could be long over,
        even splits of all and of parts are in hand instead."""
        if self.request.is_deep:
            self._split_evenly()
            for part in parts_alone(self.request):
                for plan in islice(even_plans(part), _FEW):
                    self.incumbents.offer(plan, "parts")
            return
        with overtime():
            for proposal in parts:
                self._look_at(proposal)
                if self.incumbents.best:
                    return

    def _look_at_all(self, parts: Iterable[Proposal]) -> None:
        """Simulate plans for parts, in a share of a limited time."""
        with deadline(left_s() * _FLOOR_SHARE), suppress(TimeUp):
            for proposal in parts:
                self._look_at(proposal)

    def _look_at(self, part: Proposal) -> None:
        self.incumbents.progress(part.progress_line())
        for plan in plans_of(part, 0):
            self.incumbents.offer(plan, "parts")

    def _simulate_equal_pipelines(self) -> None:
        """In a share of a limited time, as much as plans of the whole may be."""
        work = 0
        # BadInput: of a profile that knows none of the devices
        with deadline(left_s() * _FLOOR_SHARE), suppress(TimeUp, BadInput):
            for plan in equal_pipelines(self.request, self._best_s):
                work += plan.num_forwards
                if work > _MOST_WORK:
                    return
                self.incumbents.offer(plan, "equal pipelines")

    def _promising_parts(self) -> list[PlanRequest]:
        """The parts whose quick plans promise about as much as the best so far; and
        where the first leaves out some of a kind, a zone or the like, all of it."""
        wished, cluster = self.incumbents.objectives[0], self.request.cluster
        least: dict[frozenset[str], float] = {}
        for found in self.incumbents.simulated():
            nodes = frozenset(found.plan.nodes)
            if len(nodes) < len(cluster.nodes) and within(found, wished):
                by_wish = promise(found, cluster, wished)
                least[nodes] = min(by_wish, least.get(nodes, math.inf))
        best = promise(self.incumbents.best[wished].predicted, cluster, wished)
        near = sorted(
            (n for n in least if least[n] <= best + abs(best) * (_NEAR - 1)),
            key=lambda n: (least[n], sorted(n)),
        )[:_MOST_PARTS]
        around = next(filter(None, map(self._around, near)), None)
        if around is not None and around not in near:
            near.append(around)
        return [
            replace(self.request, cluster=part_of(cluster, nodes)) for nodes in near
        ]

    def _around(self, used: frozenset[str]) -> frozenset[str] | None:
        """The nodes of the smallest kind, zone or class, or of all but one of them,
        that these are some of."""
        groups = (
            frozenset(node.name for node in part.cluster.nodes)
            for part in (*parts_alone(self.request), *parts_without(self.request))
        )
        return min((group for group in groups if used < group), key=len, default=None)

    def _search_part(self, part: PlanRequest) -> None:
        """Search a part as if it were all there is, but for parts of its own."""
        proposed: list[Proposal] = []
        for proposal in proposals(part, whole=True):
            proposed.append(proposal)
            self._look_at(proposal)
        for _, plan in _plans(part, proposed):
            self.incumbents.offer(plan, "parts")
        for proposal in tied_ends(part, self._best_s):
            for plan in plans_by_rank([proposal]):
                self.incumbents.offer(plan, "parts")
        self.searched.add(frozenset(node.name for node in part.cluster.nodes))

    def _best_s(self) -> float:
        """The shortest step so far; infinity where another wish may take longer."""
        best = self.incumbents.best
        if any(o.wish != "time" for o in self.incumbents.objectives) or not best:
            return math.inf
        return min(i.predicted.simulation.step_time_s for i in best.values())

    def _at_once(self) -> None:
        """Have something in hand where the time was up before: the first that fits of
        what is proposed, or the best of what takes no search. TimeUp if none fits, or
        there is none and somebody asked for the end."""
        for plan in plans_by_rank(self.proposed):
            if not self.incumbents.best:
                self.incumbents.consider(plan, "templates")
        if not self.incumbents.best:
            check_stopped()
            self._split_evenly()
        if not self.incumbents.best and not self.incumbents.loosen():
            raise self._too_dear() or TimeUp

    def _split_evenly(self) -> None:
        """The best of a few even splits of all; more are tried until one fits."""
        work = 0
        for plan in even_plans(self.request):
            work += plan.num_forwards
            if not self.incumbents.best or work <= _LITTLE_WORK:
                self.incumbents.consider(plan, "even split")

    def _too_dear(self) -> NoFeasiblePlan | None:
        """That all that was simulated costs too much, if it does."""
        wished = self.incumbents.objectives[0]
        return too_dear(self.request, wished, self.incumbents.simulated())


def _plans(
    request: PlanRequest, proposed: Sequence[Proposal]
) -> Iterator[tuple[str, Plan]]:
    """Plans to simulate and where they come from; of large ones not so many."""
    large = request.is_large
    shares = () if large else equal_share_plans(request)
    most, work = _MOST_WORK // (8 if large else 1), 0
    for source, plan in chain(
        (("templates", plan) for plan in plans_by_rank(proposed, end=1)),
        (("equal shares", plan) for plan in shares),
        (("templates", plan) for plan in plans_by_rank(proposed, first=1)),
    ):
        if work and work + plan.num_forwards > most:
            return
        work += plan.num_forwards
        yield source, plan


def even_plans(request: PlanRequest) -> Iterator[Plan]:
    """Yield even splits of the model, blind to devices: with what is fast first."""
    for remat, size, tensor in product(
        request.remats, request.microbatch_sizes, request.degrees
    ):
        with suppress(BadInput):  # of what does not divide
            yield even_plan(
                request.cluster,
                model=request.model.name,
                fingerprint=fingerprint(request.model),
                num_layers=len(request.model.layers),
                seq_len=request.seq_len,
                global_batch=request.global_batch,
                microbatch_size=size,
                tensor=tensor,
                tensor_sizes=tensor_sizes(request.model),
                remat=remat,
                offload=request.offloads[0],
            )
