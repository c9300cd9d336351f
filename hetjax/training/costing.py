# SPDX-License-Identifier: Apache-2.0
"""A plan's costs on a cluster with what was measured, and where they are from.

Owns how a profile's links and device kinds meet the cluster's, what a plan's devices
cost, and which times cannot be simulated. Does not own the costs (`costs/`), nor which
plan, cluster and profile it is about (`simulating.py`).
"""

from dataclasses import replace

from hetjax.cluster.catalogue import canonical_name, device_price_per_hour
from hetjax.cluster.cluster import Cluster, Link
from hetjax.costs.analytic import analytic_costs
from hetjax.costs.costs import Costs
from hetjax.costs.profile import Profile, check_profile
from hetjax.costs.profiled import has_halves
from hetjax.costs.static import OptimizerInit, adam_state
from hetjax.errors import BadInput
from hetjax.models.model import Model
from hetjax.plans.plan import Plan
from hetjax.schedule.action import Op, Programs
from hetjax.schedule.launch_ahead import hop_s

LEAST_S, MOST_S = 1e-12, 1e12  # outside, sums would be 0 or infinite


def costs_of(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    profile: Profile | None,
    *,
    dtype: str,
    optimizer: OptimizerInit = adam_state,
) -> Costs:
    """Return what the plan costs: measured where the profile knows the device.

    `dtype` is that of compute where there is no profile. BadInput for an unknown
    device, an unreachable link, a profile of another model or of other devices only.
    """
    if profile is None:
        return analytic_costs(plan, model, cluster, dtype=dtype, optimizer=optimizer)
    check_profile(profile, model.name, plan.seq_len, len(model.layers))
    devices = _devices(plan, cluster)
    if not devices & profile.devices:
        raise BadInput(
            got=f"a profile of {', '.join(sorted(profile.devices)) or 'no devices'}",
            allowed=f"one of the plan's devices: {', '.join(sorted(devices))}",
            fix=f"measure there: python -m hetjax.profile {model.name}, or leave "
            "--profile out",
        )
    cluster = with_measured_links(cluster, profile)
    return analytic_costs(
        plan,
        model,
        cluster,
        dtype=profile.dtype,
        optimizer=optimizer,
        profile=profile,
    )


def with_measured_links(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with a link for each pair of its nodes that was measured.

    Of two directions the slower counts for both.
    """
    nodes = {node.name for node in cluster.nodes}
    links = {frozenset(link.between): link for link in cluster.links}
    # the slowest come last, and stay
    for found in sorted(profile.links, key=lambda f: -f.bandwidth_gbit_per_s):
        ends = frozenset(found.between)
        if len(ends) == 2 and ends <= nodes:
            links[ends] = Link(
                between=found.between,
                bandwidth_gbit_per_s=found.bandwidth_gbit_per_s,
                latency_ms=found.latency_ms,
            )
    return replace(cluster, links=tuple(links.values()))


def not_measured(
    profile: Profile, plan: Plan, cluster: Cluster, programs: Programs
) -> str:
    """Say for people which times are not of the profile."""
    missing = sorted(_devices(plan, cluster) - profile.devices)
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


def usd_per_hour(plan: Plan, cluster: Cluster) -> float | None:
    """The price of the devices in use, None if that of any is unknown."""
    nodes = {node.name: node for node in cluster.nodes}
    used = {(stage.node, d) for _, _, stage in plan.stages() for d in stage.devices}
    prices = [device_price_per_hour(nodes[name]) for name, _ in used]
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


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


def _devices(plan: Plan, cluster: Cluster) -> set[str]:
    used = {stage.node for _, _, stage in plan.stages()}
    return {canonical_name(n.device) for n in cluster.nodes if n.name in used}
