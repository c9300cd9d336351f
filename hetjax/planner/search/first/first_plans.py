# SPDX-License-Identifier: Apache-2.0
"""Simulates the first plans, before any is improved: of parts, and of the whole.

Owns their order, the limits on the work of simulating them, and the guarantee of a plan
when the time is up: a deadline (`model/deadline.py`) takes effect only after the first
plan. Does not own templates, copies and bounds (`price_and_branch.py`), nor what makes
a plan better (`incumbents.py`).
"""

import math
from collections.abc import Iterable, Iterator
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
from hetjax.planner.search.first.levelled import levelled
from hetjax.planner.search.first.parts import (
    parts_alone,
    parts_compared,
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
from hetjax.planner.search.infeasible import too_large, why_infeasible
from hetjax.planner.search.limits import too_dear
from hetjax.plans.even import even_plan
from hetjax.plans.plan import Plan

_MOST_WORK = 30_000  # forwards of all plans that are simulated before local search
_LITTLE_WORK = 4_000  # forwards of a plan that is simulated as soon as it is proposed
_FEW, _FEW_PIPELINES = 4, 16  # even splits of a part, and equal pipelines
_FLOOR_SHARE = 0.7  # of the time that remains for proposals
_MOST_PARTS, _NEAR = 2, 1.25  # parts searched like a cluster; times the best so far


class FirstPlans:
    """The first plans of a search. `proposed` are the model's proposals for the
    request. `searched` are the sets of nodes that were searched, not just looked at."""

    def __init__(self, request: PlanRequest, incumbents: Incumbents) -> None:
        self.request, self.incumbents = request, incumbents
        self.proposed: list[Proposal] = []
        self.searched: set[frozenset[str]] = set()

    def simulate(self) -> None:
        """Simulate the first plans. Raises NoFeasiblePlan if nothing fits, TimeUp if
        nothing is found in time."""
        try:
            self._simulate()
        except TimeUp:
            self._at_once()

    def _simulate(self) -> None:
        """Simulate plans in order, the most promising as soon as they are proposed."""
        cluster, objectives = self.request.cluster, self.incumbents.objectives
        fewer = any(wants_fewer(wished, cluster) for wished in objectives)
        parts = floor(self.request, self._best_s, by_cost=objectives[0].wish == "cost")
        large = self.request.is_large
        self._first_of(parts)
        if not large:  # if large, plans of the whole first rule out most parts
            self._simulate_within("equal shares", equal_share_plans(self.request))
            pipelines = equal_pipelines(self.request, self._best_s)
            self._simulate_within("equal pipelines", pipelines)
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
        most_work = _MOST_WORK // (8 if large else 1)
        for plan in _within_work(plans_by_rank(self.proposed), most_work):
            self.incumbents.offer(plan, "templates")
        if not self.incumbents.best_h1f1b and not self.incumbents.loosen():
            raise self._too_dear() or why_infeasible(self.request, objectives[0])
        for proposal in () if large else tied_ends(self.request, self._best_s):
            for plan in plans_by_rank([proposal]):
                self.incumbents.offer(plan, "templates")
        for part in () if large else self._promising_parts():
            self._search_part(part)
        if not large and (slower := levelled(self.request)):
            self._search_part(slower)
        for part in () if large else parts_compared(self.request):
            self._compare(part)
        if searches_parts(self.request):  # `proposals` has covered their templates
            for part in parts_without(self.request):
                for plan in equal_share_plans(part):
                    self.incumbents.offer(plan, "parts")

    def _first_of(self, parts: Iterator[Proposal]) -> None:
        """Find a first plan: of the first part that has a feasible one. The deadline
        does not apply before that. For a very deep model this could take far too long,
        so even splits of the whole and of parts are offered instead."""
        if self.request.is_deep:
            self._split_evenly()
            for part in parts_alone(self.request):
                for plan in islice(even_plans(part), _FEW):
                    self.incumbents.offer(plan, "parts")
            return
        with overtime():
            for proposal in parts:
                self._look_at(proposal)
                if self.incumbents.best_h1f1b:
                    return

    def _look_at_all(self, parts: Iterable[Proposal]) -> None:
        """Simulate plans for parts, within a share of the remaining time."""
        with deadline(left_s() * _FLOOR_SHARE), suppress(TimeUp):
            for proposal in parts:
                self._look_at(proposal)

    def _look_at(self, part: Proposal) -> None:
        self.incumbents.progress(part.progress_line())
        for plan in plans_of(part, 0):
            self.incumbents.offer(plan, "parts")

    def _simulate_within(self, source: str, plans: Iterator[Plan]) -> None:
        """Simulate plans that take little to find, within a share of the remaining time
        and the same work as for plans of the whole."""
        # BadInput: the profile has none of the devices
        with deadline(left_s() * _FLOOR_SHARE), suppress(TimeUp, BadInput):
            for plan in _within_work(plans, _MOST_WORK):
                self.incumbents.offer(plan, source)

    def _promising_parts(self) -> list[PlanRequest]:
        """Return the parts whose quick plans promise nearly as much as the best so far,
        and the nodes of the best plan. If such a part has only some nodes of a group
        (`_around`), add that group."""
        wished, cluster = self.incumbents.objectives[0], self.request.cluster
        least: dict[frozenset[str], float] = {}
        for found in self.incumbents.simulated():
            nodes = frozenset(found.plan.nodes)
            if len(nodes) < len(cluster.nodes) and within(found, wished):
                by_wish = promise(found, cluster, wished)
                least[nodes] = min(by_wish, least.get(nodes, math.inf))
        fastest = self.incumbents.best_h1f1b[wished].predicted
        best = promise(fastest, cluster, wished)
        near = sorted(
            (n for n in least if least[n] <= best + abs(best) * (_NEAR - 1)),
            key=lambda n: (least[n], sorted(n)),
        )[:_MOST_PARTS]
        own = frozenset(fastest.plan.nodes)
        if own in least and own not in near:
            near.append(own)
        around = next(filter(None, map(self._around, near)), None)
        if around is not None and around not in near:
            near.append(around)
        return [
            replace(self.request, cluster=part_of(cluster, nodes)) for nodes in near
        ]

    def _around(self, used: frozenset[str]) -> frozenset[str] | None:
        """Return the smallest group of nodes that strictly contains these: a kind, zone
        or class, or all but one of them. None if there is none."""
        groups = (
            part.cluster.names
            for part in (*parts_alone(self.request), *parts_without(self.request))
        )
        return min((group for group in groups if used < group), key=len, default=None)

    def _search_part(self, part: PlanRequest) -> None:
        """Search a part as if it were the whole cluster, but without its own parts."""
        proposed: list[Proposal] = []
        for proposal in proposals(part, whole=True):
            proposed.append(proposal)
            self._look_at(proposal)
        self._simulate_within("parts", equal_pipelines(part, self._best_s))
        plans = chain(equal_share_plans(part), plans_by_rank(proposed))
        for plan in _within_work(plans, _MOST_WORK):
            self.incumbents.offer(plan, "parts")
        for proposal in tied_ends(part, self._best_s):
            for plan in plans_by_rank([proposal]):
                self.incumbents.offer(plan, "parts")
        self.searched.add(part.cluster.names)

    def _compare(self, part: PlanRequest) -> None:
        """Simulate a few equal pipelines of a part that was not searched: templates
        alone may make it look much slower than it is."""
        if part.cluster.names not in self.searched:
            pipelines = equal_pipelines(part, lambda: math.inf)
            self._simulate_within("parts", islice(pipelines, _FEW_PIPELINES))

    def _best_s(self) -> float:
        """Return the shortest step so far; infinity if another wish may need longer
        steps."""
        best = self.incumbents.best_h1f1b
        if any(o.wish != "time" for o in self.incumbents.objectives) or not best:
            return math.inf
        return min(i.predicted.simulation.step_time_s for i in best.values())

    def _at_once(self) -> None:
        """Find a plan after the time is up: the first proposal that fits, or the best
        plan that needs no search. Raises TimeUp if none fits, or if there is none and a
        stop was requested."""
        for plan in plans_by_rank(self.proposed):
            if not self.incumbents.best_h1f1b:
                self.incumbents.consider(plan, "templates")
        if not self.incumbents.best_h1f1b:
            check_stopped()
            self._split_evenly()
        if not self.incumbents.best_h1f1b and not self.incumbents.loosen():
            raise self._too_dear() or too_large(self.request) or TimeUp

    def _split_evenly(self) -> None:
        """Consider a few even splits of the whole, and more until one fits."""
        work = 0
        for plan in even_plans(self.request):
            work += plan.num_forwards
            if not self.incumbents.best_h1f1b or work <= _LITTLE_WORK:
                self.incumbents.consider(plan, "even split")

    def _too_dear(self) -> NoFeasiblePlan | None:
        """Return the error that all simulated plans cost too much, if they do."""
        wished = self.incumbents.objectives[0]
        return too_dear(self.request, wished, self.incumbents.simulated())


def _within_work(plans: Iterable[Plan], most_work: float) -> Iterator[Plan]:
    """Yield plans while their forwards fit into `most_work`, but at least the first."""
    work = 0
    for plan in plans:
        if work and work + plan.num_forwards > most_work:
            return
        work += plan.num_forwards
        yield plan


def even_plans(request: PlanRequest) -> Iterator[Plan]:
    """Yield even splits of the model that ignore devices, fast choices first."""
    for remat, size, tensor in product(
        request.remats, request.microbatch_sizes, request.degrees
    ):
        with suppress(BadInput):  # sizes that do not divide
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
