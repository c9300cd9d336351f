# SPDX-License-Identifier: Apache-2.0
"""A step time that no 1F1B-like program of a plan can beat.

Owns the prefix bound (notes of the planner, our derivation): from the last stage
forward R_s = max(M t_s, t_s + 2 c_s + R_(s+1)), because the last microbatch to leave
stage s has to come back before the stage is done. It holds for programs with fused
backwards and no interleaving under the modelled costs, not for zero-bubble. Owns also
what is known of a bound: none may be, and one that a step contradicts is an error of
ours, to be shown.
"""

from dataclasses import dataclass

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.schedule.launch_ahead import hop_s, microbatch_s

ROUNDING = 1e-9  # relative: a step that is shorter by more contradicts a bound


@dataclass(frozen=True, kw_only=True, slots=True)
class LowerBound:
    """A step time that nothing of some space beats; None where no bound is known.

    `why` then says why. It is an internal error if the bound `is_false`.
    """

    step_s: float | None = None
    why: str = ""
    is_false: bool = False

    def held_against(self, step_s: float, what: str) -> "LowerBound":
        """Return the bound, or the error that this step of the space is below it."""
        if self.step_s is None or step_s >= self.step_s * (1 - ROUNDING):
            return self
        why = (
            f"internal error: {what} takes {step_s:.6g} s, below the lower bound of "
            f"{self.step_s:.6g} s; plans are as good as they say, the bound is false: "
            "please report it with model, cluster and options"
        )
        return LowerBound(why=why, is_false=True)

    def gap(self, step_s: float) -> float | None:
        """Return how far above the bound a step of its space is, as a share of it."""
        if not self.step_s:
            return None
        gap = step_s / self.step_s - 1
        return 0.0 if abs(gap) <= ROUNDING else gap


def prefix_bound_s(plan: Plan, costs: Costs) -> float:
    """Return the largest of the replicas' bounds; reduction and update count nothing.

    Trunks are taken as if every message had them for itself.
    """
    return max(_replica_bound_s(plan, costs, r) for r in range(len(plan.replicas)))


def _replica_bound_s(plan: Plan, costs: Costs, r: int) -> float:
    replica, rest_s = plan.replicas[r], 0.0
    for s in reversed(range(len(replica.stages))):
        stage_s = microbatch_s(plan, costs, (r, s))
        hops_s = 0.0
        if s + 1 < len(replica.stages):
            hops_s = hop_s(costs, (r, s), (r, s + 1)) + hop_s(costs, (r, s + 1), (r, s))
        rest_s = max(replica.num_microbatches * stage_s, stage_s + hops_s + rest_s)
    return rest_s
