# SPDX-License-Identifier: Apache-2.0
"""The plans that a baseline would choose, best by its own costs first.

Owns how many there are and what is said where there are none. Does not own those costs
nor whether the judge finds them in memory.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.deadline import check
from hetjax.planner.model.request import Request
from hetjax.plans.plan import Plan

MOST_PLANS = 16  # enough to try a few that turn out to be within memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that is made when it is wanted, None if it has no place after all."""

    step_s: float
    plan: Callable[[], Plan | None]


def best_first(
    name: str, request: Request, candidates: Iterable[Candidate]
) -> list[Plan]:
    """Return the best distinct plans. NoFeasiblePlan if there is none."""
    found: list[Plan] = []
    possible = filter(_is_possible, candidates)
    for candidate in sorted(possible, key=lambda c: c.step_s):
        check()
        plan = candidate.plan()
        if plan is not None and plan not in found:
            found.append(plan)
        if len(found) == MOST_PLANS:
            break
    if not found:
        raise no_plan(name, request)
    return found


def _is_possible(candidate: Candidate) -> bool:
    check()
    return math.isfinite(candidate.step_s)


def no_plan(name: str, request: Request) -> NoFeasiblePlan:
    """Return the error that says what binds."""
    batch, sizes = request.global_batch, request.microbatch_sizes
    if all(batch % size for size in sizes):
        return NoFeasiblePlan(
            got=f"{name}: no microbatch size of {', '.join(map(str, sizes))} divides "
            f"global_batch = {batch}",
            allowed="a microbatch size that divides the global batch",
            fix="give --microbatch-sizes 1, or another --global-batch",
        )
    return NoFeasiblePlan(
        got=f"{name}: no layout of {request.model.name!r} on the cluster's "
        f"{request.cluster.num_devices} devices keeps within memory",
        allowed="weights, optimizer state and microbatches in flight within the memory "
        "of every device",
        fix="allow remat full, microbatch size 1 and all tensor degrees, or add nodes",
    )
