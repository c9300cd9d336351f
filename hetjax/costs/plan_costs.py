# SPDX-License-Identifier: Apache-2.0
"""A plan's costs on a cluster, in seconds, bytes and dollars.

Owns how a profile's links and device kinds meet the cluster's, and what a plan's
nodes cost. Does not own the costs themselves (`analytic.py`), nor which plan, cluster
and profile it is about.
"""

import math
from dataclasses import replace

from hetjax.cluster.catalogue import canonical_name, device_price_per_hour
from hetjax.cluster.cluster import Cluster, Link
from hetjax.costs.analytic import analytic_costs
from hetjax.costs.costs import Costs
from hetjax.costs.measured.profile import Profile, check_profile
from hetjax.costs.network.messages import Transport
from hetjax.costs.static import adam_state
from hetjax.models.model import Model
from hetjax.plans.plan import Plan
from hetjax.stage.arrays import OptimizerInit


def costs_of(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    profile: Profile | None,
    *,
    dtype: str,
    optimizer: OptimizerInit = adam_state,
    transport: Transport = "sockets",
    halves: bool = True,
) -> Costs:
    """Return what the plan costs: measured where the profile knows the device.

    `dtype` is that of compute where there is no profile, `transport` how its workers
    talk. Without `halves` costs are known sooner, but a plan that cuts backwards in
    two cannot be simulated. BadInput for an unknown device, an unreachable link or a
    profile of another model.
    """
    if profile is None:
        return analytic_costs(
            plan,
            model,
            cluster,
            dtype=dtype,
            optimizer=optimizer,
            transport=transport,
            halves=halves,
        )
    check_profile(profile, model.name, plan.seq_len, len(model.layers))
    cluster = with_measured_links(cluster, profile)
    return analytic_costs(
        plan,
        model,
        cluster,
        dtype=profile.dtype,
        optimizer=optimizer,
        profile=profile,
        transport=transport,
        halves=halves,
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


def usd_per_hour(plan: Plan, cluster: Cluster) -> float | None:
    """The price of the nodes in use, None if that of any is unknown.

    A node is rented whole, however few of its devices the plan uses.
    """
    used = {stage.node for _, _, stage in plan.stages()}
    nodes = [node for node in cluster.nodes if node.name in used]
    prices = [(device_price_per_hour(node), node.count) for node in nodes]
    known = [price * count for price, count in prices if price is not None]
    return math.fsum(known) if len(known) == len(prices) else None


def device_kinds(plan: Plan, cluster: Cluster) -> set[str]:
    """Return the device kinds that the plan uses, by the catalogue's names."""
    used = {stage.node for _, _, stage in plan.stages()}
    return {canonical_name(n.device) for n in cluster.nodes if n.name in used}
