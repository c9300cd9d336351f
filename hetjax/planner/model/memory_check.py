# SPDX-License-Identifier: Apache-2.0
"""Whether a plan that somebody else made fits into memory, before it is trained with.

Owns whose memory is known. Does not own what a plan needs (`costs/stage_memory.py`,
`schedule/simulation/memory.py`).
"""

import math

from hetjax.cluster.catalogue import canonical_name, catalogue
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.costs import Costs
from hetjax.costs.stage_memory import stage_memory
from hetjax.models.model import Model
from hetjax.plans.plan import Plan
from hetjax.schedule.programs.action import Op
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.memory import check_memory, memory_uses
from hetjax.stage.arrays import OptimizerInit
from hetjax.stage.partition import tied_holders


def check_plan_fits(
    plan: Plan, model: Model, cluster: Cluster, *, dtype: str, optimizer: OptimizerInit
) -> None:
    """Raise NoFeasiblePlan if a device of known memory has less than the plan needs."""
    nodes = {node.name: node for node in cluster.nodes}
    has_bytes = {
        (r, s): known_memory_bytes(nodes[stage.node]) for r, s, stage in plan.stages()
    }
    if not any(map(math.isfinite, has_bytes.values())):
        return
    programs = lower(plan, tied_holders(plan, model))
    splits = any(a.op is Op.I for program in programs.values() for a in program)
    needs = {
        (r, s): stage_memory(
            plan, model, (r, s), dtype=dtype, optimizer=optimizer, halves=splits
        )
        for r, s, _ in plan.stages()
    }
    costs = Costs(times={}, memory=needs, memory_bytes=has_bytes)
    check_memory(memory_uses(programs, plan, costs), plan, costs)


def known_memory_bytes(node: Node) -> float:
    """Return what each device of the node has, infinity if nobody tells.

    The catalogue's figure for "cpu" is for comparing plans, not a limit.
    """
    if node.memory_gib is not None:
        return node.memory_gib * 2**30
    spec = catalogue().get(canonical_name(node.device))
    return spec.memory_gib * 2**30 if spec and spec.name != "cpu" else math.inf
