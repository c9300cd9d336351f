# SPDX-License-Identifier: Apache-2.0
"""Explains why there is no plan, and finds the smallest change that allows one.

Owns the changes that are tried, smallest first, and the texts. Does not own the search.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hetjax.cluster.cluster import with_copies
from hetjax.cluster.memory_budget import node_plan_bytes
from hetjax.cluster.prices import device_price
from hetjax.costs.stage_memory import static_bytes
from hetjax.errors import NoFeasiblePlan, counted_noun
from hetjax.planner.bound.column_generation import lower_bound
from hetjax.planner.bound.feasibility import one_fits_all
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import OFFLOADS, REMATS, PlanRequest
from hetjax.planner.model.terms.terms import search_problem
from hetjax.planner.search.limits import limits_of
from hetjax.plans.plan import StageMesh
from hetjax.stage.partition import stage_stacks

_GIB = 2**30
_ON_HOSTS: dict[str, dict[str, Any]] = {
    "allow optimizer state on the hosts: --offload auto": {"offloads": OFFLOADS["auto"]}
}
_ALL = ", gradients and optimizer state"


def why_infeasible(request: PlanRequest, objective: Objective) -> NoFeasiblePlan:
    """Return the error for a request for which no plan was found."""
    limits = limits_of(objective)
    if objective.wish == "cost" and (unpriced := _unpriced(request)):
        if feasible(request):
            within = f" within {' and '.join(limits)}" if limits else ""
            return NoFeasiblePlan(
                got=f"no plan{within} on devices whose price is known",
                allowed=f"a plan without {', '.join(unpriced)}, or prices for these",
                fix="add price_per_hour = ... (USD, of the whole node) to their nodes",
            )
    if limits and feasible(request):
        return NoFeasiblePlan(
            got=f"no plan within {' and '.join(limits)}",
            allowed="a limit that some plan on these devices meets",
            fix="raise the limit, or leave it out to see the best plan",
        )
    there = ", ".join(f"{c.num_devices} {c.name}" for c in request.classes)
    if not adds_up(request):
        allowed = "sizes of microbatches whose multiples add up to the global batch"
    else:
        allowed = "a plan whose devices all have enough memory for their parts"
    fixes = (fix for fix, changed in _changes(request) if feasible(changed))
    return NoFeasiblePlan(
        got=f"no plan for {request.model.name!r}, {request.global_batch} sequences of "
        f"{request.seq_len} tokens, on {there}: {_binding(request)}",
        allowed=allowed,
        fix=next(fixes, "give a cluster with more memory, or another model"),
    )


def too_large(request: PlanRequest) -> NoFeasiblePlan | None:
    """Return the error if the model's state alone exceeds all memory; else None. Takes
    no search, and so tries no smaller change."""
    held_bytes, there_bytes = _state_bytes(request)
    if held_bytes <= there_bytes:
        return None
    return NoFeasiblePlan(
        got=f"no plan for {request.model.name!r}: {_binding(request)}",
        allowed="a model whose state fits into the memory of all devices",
        fix="give a cluster with more memory, or another model",
    )


def adds_up(request: PlanRequest) -> bool:
    """Return whether microbatches of the request's sizes can make up its batch."""
    return request.global_batch % math.gcd(*request.microbatch_sizes) == 0


def feasible(request: PlanRequest) -> bool:
    """Return whether pipelines that fit into memory can compute the global batch."""
    if not adds_up(request):
        return False
    return any(_feasible(request, degree) for degree in request.degrees)


def _feasible(request: PlanRequest, degree: int) -> bool:
    """Return `feasible` for one tensor degree; search unless one replica suffices."""
    one = search_problem(request, (degree,), num_replicas=1)
    if one_fits_all(one):
        return True
    for p in (search_problem(request, (degree,)), one):
        try:
            lower_bound(p, "prefix")
        except NoFeasiblePlan:
            continue
        check_deadline()  # an unfinished bound shows nothing
        return True
    return False


def _unpriced(request: PlanRequest) -> list[str]:
    """Return the kinds of devices whose price is unknown."""
    kinds = {
        node.device
        for node in request.cluster.nodes
        if device_price(node, request.usd_per_kwh) is None
    }
    return sorted(kinds)


def _changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Yield what to type, and the resulting request; small changes first."""
    freed, everything = dict(_freedoms(request)), request
    for fix, changed in freed.items():
        yield fix, replace(request, **changed)
    away = {} if "optimizer" in request.offloads else _ON_HOSTS
    for fix, changed in away.items():
        yield fix, replace(request, **changed)
    for changed in freed.values():
        everything = replace(everything, **changed)
    if len(freed) > 1:
        yield " and ".join(freed), everything
    for fix, changed in away.items() if freed else ():
        freed[fix], everything = changed, replace(everything, **changed)
        yield " and ".join(freed), everything
    yield from _more_nodes(request)
    for fix, changed in _more_nodes(everything) if freed else ():
        yield " and ".join((*freed, fix)), changed


def _freedoms(request: PlanRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what the request could also allow, with the fields that allow it."""
    if set(request.remats) != set(REMATS):
        yield f"allow remat: --remat {','.join(REMATS)}", {"remats": REMATS}
    if 1 not in request.microbatch_sizes:
        sizes = (1, *request.microbatch_sizes)
        typed = ",".join(map(str, sizes))
        fix = f"allow smaller microbatches: --microbatch-sizes {typed}"
        yield fix, {"microbatch_sizes": sizes}
    most = max(node.count for node in request.cluster.nodes)
    degrees = {2**n for n in range(most.bit_length())}
    if not degrees <= set(request.tensor_degrees):
        degrees = tuple(sorted(degrees.union(request.tensor_degrees)))
        typed = ",".join(map(str, degrees))
        fix = f"allow more tensor parallelism: --tensor {typed}"
        yield fix, {"tensor_degrees": degrees}


def _more_nodes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for num in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16):
        for nodes in request.classes:
            node = nodes.nodes[-1]
            cluster = with_copies(request.cluster, node, num)
            yield (
                f"add {counted_noun(num, f'more {nodes.name} node')} of "
                f"{counted_noun(node.count, 'device')} to the cluster",
                replace(request, cluster=cluster),
            )


def _binding(request: PlanRequest) -> str:
    """Return text on what prevents a plan: the batch's divisors, or memory."""
    if not adds_up(request):
        return (
            f"microbatches of {', '.join(map(str, request.microbatch_sizes))} "
            "sequences do not add up to the batch"
        )
    held_bytes, there_bytes = _state_bytes(request)
    on_host = request.offloads[-1] == "optimizer"
    what = "weights" + (" and gradients" if on_host else _ALL)
    return (
        f"memory is the limit: {what} alone take {held_bytes / _GIB:.1f} GiB of "
        f"{there_bytes / _GIB:.1f} GiB, before activations"
    )


def _state_bytes(request: PlanRequest) -> tuple[float, float]:
    """Return the least memory that the state takes on devices, and what they have."""
    whole = stage_stacks(request.model, [(0, len(request.model.layers))])
    held_bytes = min(
        static_bytes(
            whole.stacks,
            StageMesh(),
            precision,
            request.optimizer,
            request.offloads[-1],
        ).total
        for precision in set(request.precisions.values())
    )
    there = (node.count * node_plan_bytes(node) for node in request.cluster.nodes)
    return held_bytes, sum(there)
