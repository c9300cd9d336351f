# SPDX-License-Identifier: Apache-2.0
"""Determines the precision that the costs of each stage assume.

Owns the check of the stages' precisions against the profile's. Does not own the
precision in which a stage runs (`plans/precision.py`).
"""

from hetjax.cluster.catalogue import Precision
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.costs import StageKey
from hetjax.costs.measured.layer_profile import Profile, profile_with
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.plans.precision import Dtype, node_precision


def priced_precision(
    node: Node, profile: Profile | None, dtype: Dtype | None
) -> Precision:
    """Return the precision of stages on the node that set none.

    It is the profile's if the profile has the node's device, else the requested
    `dtype`, else what the device does best.
    """
    if known := profile_with(profile, node.device):
        return known.dtype
    return node_precision(node, dtype)


def stage_precisions(
    plan: Plan, cluster: Cluster, profile: Profile | None, dtype: Dtype | None
) -> dict[StageKey, Precision]:
    """Return the precision in which every stage of the plan is priced.

    Raises BadInput if a stage sets another precision than the profile's for its device.
    """
    found: dict[StageKey, Precision] = {}
    for r, s, stage in plan.stages():
        node = cluster.node(stage.node)
        priced = priced_precision(node, profile, dtype)
        found[r, s] = stage.precision or priced
        if profile_with(profile, node.device) and found[r, s] != priced:
            raise BadInput(
                got=f"replicas[{r}].stages[{s}].precision = {stage.precision!r}, but "
                f"the times of {node.device} were measured in {priced}",
                allowed=f"{priced}, or no profile",
                fix="leave --profile out, or measure: python -m hetjax.profile "
                f"{plan.model} --dtype {stage.precision} --output FILE",
            )
    return found
