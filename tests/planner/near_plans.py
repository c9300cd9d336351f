# SPDX-License-Identifier: Apache-2.0
"""Plans near a request's bound, found without the planner's search.

Owns two starting points (a random plan, and a plan of templates from the proof, placed
at random) and the random changes that are kept if they help. Does not own the drawing
of requests and changes (`wide_space.py`).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from unittest.mock import patch

from hetjax.costs.costs import Costs, StageMemory
from hetjax.costs.plan_costs import costs_of
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.column_generation import Bound, lower_bound
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.templates import Column
from hetjax.planner.model.terms.terms import bound_problem
from hetjax.plans.plan import Plan, Replica, StageMesh
from hetjax.schedule.bound import prefix_bound_s
from tests.planner.wide_space import (
    AMPLE_GIB,
    Seat,
    changed,
    plan_of,
    random_plan,
    replica_of,
)

NUM_CHANGES = 12
_MOST_REPLICAS, _FEW_COLUMNS = 8, 12


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A request with its bound; None if the planner says that there is no plan."""

    request: PlanRequest
    problem: Problem
    bound: Bound | None

    @property
    def tight(self) -> bool:
        """Whether memory can bind; otherwise plans' memory need not be computed."""
        return any(n.memory_gib != AMPLE_GIB for n in self.request.cluster.nodes)


def proof_of(request: PlanRequest) -> Proof:
    p = bound_problem(request, request.degrees)
    try:
        return Proof(request=request, problem=p, bound=lower_bound(p, "prefix"))
    except NoFeasiblePlan:
        return Proof(request=request, problem=p, bound=None)


def without_memory() -> AbstractContextManager[object]:
    """Skip the memory of plans, which is slow to compute."""
    return patch(
        "hetjax.costs.plan_costs.stage_memory", lambda *args, **kwargs: StageMemory()
    )


def near_plan(r: Random, proof: Proof) -> Plan:
    """Draw a plan, and change it to improve its lower bound over all schedules."""
    plan = (_of_columns(r, proof) if r.random() < 0.5 else None) or random_plan(
        r, proof.request
    )
    with without_memory():
        best_s = prefix_bound_s(plan, _costs(proof.request, plan))
        for _ in range(0 if proof.tight and r.random() < 0.5 else NUM_CHANGES):
            other = changed(r, proof.request, plan)
            if other is None:
                continue
            other_s = prefix_bound_s(other, _costs(proof.request, other))
            if other_s < best_s:
                plan, best_s = other, other_s
    return plan


def _costs(request: PlanRequest, plan: Plan) -> Costs:
    return costs_of(
        plan,
        request.model,
        request.cluster,
        request.profile,
        dtype=request.dtype,
        optimizer=request.optimizer,
    )


def _of_columns(r: Random, proof: Proof) -> Plan | None:
    """Return a plan of the best templates that have room; None if that fails."""
    request, bound = proof.request, proof.bound
    if bound is None:
        return None
    free = {node.name: list(range(node.count)) for node in request.cluster.nodes}
    for devices in free.values():
        r.shuffle(devices)
    worth = {
        n: c.template.microbatch_size / c.time_s(1) / sum(c.taken)
        for n, c in enumerate(bound.columns)
    }
    best = sorted(worth, key=worth.__getitem__, reverse=True)[:_FEW_COLUMNS]
    best += range(len(bound.columns))[-_FEW_COLUMNS:]  # the last are the tightest
    found: list[tuple[Column, list[Seat]]] = []
    for _ in range(r.randint(1, _MOST_REPLICAS)):
        c = bound.columns[r.choice(best)]
        seats = _seats(r, proof, c, free)
        if seats:
            found.append((c, seats))
    counts = _counts(request, [c for c, _ in found])
    if not counts:
        return None
    replicas = [
        _replica(c, seats, count)
        for (c, seats), count in zip(found, counts, strict=True)
    ]
    return plan_of(request, replicas)


def _replica(c: Column, seats: list[Seat], count: int) -> Replica:
    layers = [stage.layers for stage in c.template.stages]
    return replica_of(count, c.template.microbatch_size, seats, layers)


def _seats(
    r: Random, proof: Proof, c: Column, free: Mapping[str, list[int]]
) -> list[Seat]:
    """Take devices for all stages, mostly adjacent ones; empty if one lacks room."""
    options = [proof.problem.options[stage.option] for stage in c.template.stages]
    left = {name: list(devices) for name, devices in free.items()}
    seats: list[Seat] = []
    for option in options:
        own = [node.name for node in proof.request.classes[option.device_class].nodes]
        fits = [name for name in own if len(left[name]) >= option.num_devices]
        if not fits:
            return []
        beside = seats[-1].node if seats else ""
        node = beside if beside in fits and r.random() < 0.7 else r.choice(fits)
        taken = left[node][: option.num_devices]
        left[node] = left[node][option.num_devices :]
        seats.append(
            Seat(
                node=node,
                devices=tuple(taken),
                mesh=StageMesh(data=option.data, tensor=option.tensor),
                remat=option.remat,
                offload=option.offload,
            )
        )
    for name, devices in left.items():
        free[name][:] = devices
    return seats


def _counts(request: PlanRequest, columns: list[Column]) -> list[int]:
    """Give each microbatch to who ends it first; empty if sizes do not add up."""
    sizes = [c.template.microbatch_size for c in columns]
    counts, left = [1] * len(sizes), request.global_batch - sum(sizes)
    while any(0 < size <= left for size in sizes):
        fits = [n for n, size in enumerate(sizes) if size <= left]
        n = min(fits, key=lambda n: columns[n].time_s(counts[n] + 1))
        counts[n], left = counts[n] + 1, left - sizes[n]
    return counts if left == 0 else []
