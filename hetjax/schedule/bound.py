# SPDX-License-Identifier: Apache-2.0
"""Computes step times that no program of a plan, or no 1F1B-like one, can beat.

Owns the prefix bound (our derivation; `planner/README.md` proves it) in its two forms,
for a pipeline whose cuts are known and for one that a search grows stage by stage. It
holds under the modelled costs for programs with whole backwards and no interleaving,
not for zero-bubble; the computing bound, which is lower, holds for all. Also owns the
state of a bound: it may be unknown, and if a step contradicts it, that is an internal
error to be shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.schedule.launch_ahead import hop_s, microbatch_s

ROUNDING = 1e-9  # relative: a step that is shorter by more contradicts a bound


@dataclass(frozen=True, kw_only=True, slots=True)
class LowerBound:
    """A step time that no plan of some space beats; None if no bound is known.

    `why` then gives the reason. `is_false` means that a step contradicts the bound: an
    internal error.
    """

    step_s: float | None = None
    why: str = ""
    is_false: bool = False

    def held_against(self, step_s: float, what: str) -> "LowerBound":
        """Return the bound, or the error if this step of the space is below it."""
        if self.step_s is None or step_s >= self.step_s * (1 - ROUNDING):
            return self
        why = (
            f"internal error: {what} takes {step_s:.6g} s, below the lower bound of "
            f"{self.step_s:.6g} s; the plans are right, the bound is wrong: "
            "please report it with model, cluster and options"
        )
        return LowerBound(why=why, is_false=True)

    def gap(self, step_s: float) -> float | None:
        """Return how far a step of the space is above the bound, as a share of it."""
        if not self.step_s:
            return None
        gap = step_s / self.step_s - 1
        return 0.0 if abs(gap) <= ROUNDING else gap


def prefix_bound_s(plan: Plan, costs: Costs) -> float:
    """Return the largest of the replicas' bounds, without reduction and update.

    The bound assumes that no two messages share a trunk.
    """
    return max(_replica_bound_s(plan, costs, r) for r in range(len(plan.replicas)))


def computing_bound_s(plan: Plan, costs: Costs) -> float:
    """Return a time that no program of the plan beats, even with split backward passes:
    the longest that a stage computes, plus the first microbatch's way to the stage.

    Split backward passes are assumed to take no less time than whole ones.
    """
    bound_s = 0.0
    for r, replica in enumerate(plan.replicas):
        before_s = 0.0
        for s in range(len(replica.stages)):
            computing_s = replica.num_microbatches * microbatch_s(plan, costs, (r, s))
            bound_s = max(bound_s, before_s + computing_s)
            before_s += costs.times[r, s].forward_s + hop_s(costs, (r, s), (r, s + 1))
    return bound_s


def _replica_bound_s(plan: Plan, costs: Costs, r: int) -> float:
    replica = plan.replicas[r]
    keys = [(r, s) for s in range(len(replica.stages))]
    pieces = prefix_pieces(
        [microbatch_s(plan, costs, key) for key in keys],
        [hop_s(costs, a, b) + hop_s(costs, b, a) for a, b in pairwise(keys)],
    )
    return max(o + replica.num_microbatches * slope for o, slope in pieces)


def prefix_pieces(
    stage_s: Sequence[float],
    round_trip_s: Sequence[float],
    link_s: Sequence[float] | None = None,
) -> tuple[tuple[float, float], ...]:
    """Return the prefix bound as (offset_s, slope_s): m microbatches take no less than
    the largest of offset_s + m * slope_s.

    Stage s takes `stage_s` for one microbatch, forward and backward. The messages after
    it take `round_trip_s` there and back, and hold their link for `link_s` each. A
    stage finishes after the last microbatch has left it and come back, hence

        R_s = max(m * stage_s, stage_s + max(round_trip_s + R_(s+1), (m + 1) * link_s)).
    """
    pieces, before_s = [], 0.0
    for s, seconds in enumerate(stage_s):
        pieces.append((before_s, seconds))
        if s < len(round_trip_s):
            before_s += seconds
            if link_s is not None and link_s[s] > 0:
                pieces.append((before_s + link_s[s], link_s[s]))
            before_s += round_trip_s[s]
    return tuple(pieces)


def prefix_behind_s(
    num_microbatches: NDArray[np.int64],
    stage_s: NDArray[np.float64],
    through_s: NDArray[np.float64],
    hop_s: NDArray[np.float64],
    link_s: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return how long the stage before a hop waits: the inner max of `prefix_pieces`.

    This is one step of the recurrence for many pipelines at once; the result and all
    arguments have shape (X,). `through_s` is the time of one microbatch in the stage
    plus the stage's own wait; a hop takes `hop_s` one way.
    """
    round_trip_s = np.maximum(num_microbatches * stage_s, through_s) + 2 * hop_s
    held_s = np.where(link_s > 0, (num_microbatches + 1) * link_s, 0.0)
    return np.maximum(round_trip_s, held_s)
