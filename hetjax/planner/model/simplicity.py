# SPDX-License-Identifier: Apache-2.0
"""Chooses the simplest of equally good plans.

Owns the measure of complexity, the tolerance within which plans are equally good, and
simpler forms of a plan. Does not own what makes a plan better (`objectives.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

AS_GOOD = 0.005  # share of the best value; smaller differences do not count


def complexity(plan: Plan) -> tuple[int, int, int]:
    """Return the numbers of stages, cuts between them, and passes: fewer is simpler,
    because each has its own launches and messages."""
    stages = sum(len(replica.stages) for replica in plan.replicas)
    passes = sum(r.num_microbatches * len(r.stages) for r in plan.replicas)
    return stages, stages - len(plan.replicas), passes


def simplest(plans: Sequence[Plan], values: Sequence[float]) -> int:
    """Return the index of the simplest plan whose value is within `AS_GOOD` of the
    best. Larger values are better, and decide between equally simple plans."""
    least = max(values) * (1 - AS_GOOD)
    good = [n for n, value in enumerate(values) if value >= least]
    return min(good, key=lambda n: (complexity(plans[n]), -values[n]))


def simplified(
    best: Predicted, sizes: Sequence[int], as_good: Callable[[Plan], Predicted | None]
) -> Predicted:
    """Return the plan with fewer, larger microbatches of these sizes, where that is as
    good. The model charges nothing for extra passes of a replica that others outlast. A
    machine may, because every pass has launches and messages.

    `as_good` predicts a plan, or returns None if the plan is not as good.
    """
    for plan in _with_larger(best.plan, sizes):
        if (found := as_good(plan)) is not None:
            return simplified(found, sizes, as_good)
    return best


def _with_larger(plan: Plan, sizes: Sequence[int]) -> Iterator[Plan]:
    """Yield the plan with half as many, twice as large microbatches of one replica."""
    for n, replica in enumerate(plan.replicas):
        count, size = replica.num_microbatches, replica.microbatch_size
        if count % 2 == 0 and 2 * size in sizes:
            larger = replace(
                replica, num_microbatches=count // 2, microbatch_size=2 * size
            )
            replicas = (*plan.replicas[:n], larger, *plan.replicas[n + 1 :])
            yield replace(plan, replicas=replicas, predicted=None)
