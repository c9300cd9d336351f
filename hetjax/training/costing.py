# SPDX-License-Identifier: Apache-2.0
"""Which of a plan's times were measured, and which cannot be simulated.

Owns what is said of both. Does not own the costs (`costs/`).
"""

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.costs.costs import Costs
from hetjax.costs.plan_costs import device_kinds
from hetjax.costs.profile import Profile
from hetjax.costs.profiled import has_halves
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.schedule.action import Op, Programs
from hetjax.schedule.launch_ahead import hop_s

LEAST_S, MOST_S = 1e-12, 1e12  # outside, sums would be 0 or infinite


def not_measured(
    profile: Profile, plan: Plan, cluster: Cluster, programs: Programs
) -> str:
    """Say for people which times are not of the profile."""
    missing = sorted(device_kinds(plan, cluster) - profile.devices)
    told = f"; {', '.join(missing)} not in it, estimated" if missing else ""
    kinds = {node.name: canonical_name(node.device) for node in cluster.nodes}
    halved = {a.key for p in programs.values() for a in p if a.op is Op.I}
    whole = any(
        (r, s) in halved
        and kinds[stage.node] in profile.devices
        and not has_halves(
            profile,
            stage,
            device=kinds[stage.node],
            microbatch_size=plan.replicas[r].microbatch_size,
        )
        for r, s, stage in plan.stages()
    )
    if not whole:
        return told
    return f"{told}; B cut in equal halves, profile --halves measures them"


def check_times(costs: Costs) -> None:
    """Raise BadInput for times that cannot be simulated: none at all, or for ever."""
    for (r, s), times in costs.times.items():
        _check_s(times.fused_s, f"F and B of replicas[{r}].stages[{s}]", LEAST_S)
        _check_s(times.update_s, f"the update of replicas[{r}].stages[{s}]")
    for a, b in costs.routes:
        _check_s(hop_s(costs, a, b), f"a message from stage {a} to stage {b}")
    for group, ring in costs.reductions.items():
        rates = [costs.trunks[trunk] for hop in ring.hops for trunk in hop.trunks]
        if rates:
            _check_s(ring.hop_bytes / min(rates), f"the gradient sum of {group}")


def _check_s(seconds: float, what: str, least_s: float = 0.0) -> None:
    if not least_s <= seconds <= MOST_S:
        raise BadInput(
            got=f"{seconds:g} s for {what}",
            allowed=f"{least_s:g} to {MOST_S:g} s",
            fix="correct the times in the profile, or the figures in the cluster file",
        )
