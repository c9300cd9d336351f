# SPDX-License-Identifier: Apache-2.0
"""A step time that no 1F1B-like program of a plan can beat.

Owns the prefix bound (notes of the planner, our derivation): from the last stage
forward R_s = max(M t_s, t_s + 2 c_s + R_(s+1)), because the last microbatch to leave
stage s has to come back before the stage is done. It holds for programs with fused
backwards and no interleaving under the modelled costs, not for zero-bubble.
"""

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.schedule.launch_ahead import hop_s, microbatch_s


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
