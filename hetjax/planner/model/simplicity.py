# SPDX-License-Identifier: Apache-2.0
"""Of plans that are as good as each other, the simplest.

Owns what counts as simpler, from which difference on it does not count, and simpler
forms of a plan. Does not own what is better (`objectives.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

AS_GOOD = 0.005  # of the best: less is no difference


def complexity(plan: Plan) -> tuple[int, int, int]:
    """Return what less of is simpler: stages, cuts between them, and passes, each with
    launches and messages of its own."""
    stages = sum(len(replica.stages) for replica in plan.replicas)
    passes = sum(r.num_microbatches * len(r.stages) for r in plan.replicas)
    return stages, stages - len(plan.replicas), passes


def simplest(plans: Sequence[Plan], values: Sequence[float]) -> int:
    """Return which plan is the simplest of those whose value, the more the better, is
    within `AS_GOOD` of the best; the better one of two that are equally simple."""
    least = max(values) * (1 - AS_GOOD)
    good = [n for n, value in enumerate(values) if value >= least]
    return min(good, key=lambda n: (complexity(plans[n]), -values[n]))


def simplified(
    best: Predicted, sizes: Sequence[int], as_good: Callable[[Plan], Predicted | None]
) -> Predicted:
    """Return the plan with fewer, larger microbatches of these sizes, where that is as
    good: what a replica does while others take longer costs nothing in the model, but
    on a machine it may, and every pass has launches and messages.

    `as_good` predicts a plan, None if it is not.
    """
    for plan in _with_larger(best.plan, sizes):
        if (found := as_good(plan)) is not None:
            return simplified(found, sizes, as_good)
    return best


def _with_larger(plan: Plan, sizes: Sequence[int]) -> Iterator[Plan]:
    """The plan with half as many microbatches of a replica, twice as large."""
    for n, replica in enumerate(plan.replicas):
        count, size = replica.num_microbatches, replica.microbatch_size
        if count % 2 == 0 and 2 * size in sizes:
            larger = replace(
                replica, num_microbatches=count // 2, microbatch_size=2 * size
            )
            replicas = (*plan.replicas[:n], larger, *plan.replicas[n + 1 :])
            yield replace(plan, replicas=replicas, predicted=None)
