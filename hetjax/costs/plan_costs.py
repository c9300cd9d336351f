# SPDX-License-Identifier: Apache-2.0
"""Computes a plan's costs on a cluster, from measurements where there are any.

Owns the combination of times, memory and network, the matching of a profile's links and
device kinds with the cluster's, and the price of a plan's nodes. Does not own the times
of a stage (`stage_times.py`), its memory (`stage_memory.py`) nor routes
(`network/routes.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from hetjax.cluster.catalogue import (
    Precision,
    canonical_name,
    compiler_of,
)
from hetjax.cluster.cluster import Cluster, Link
from hetjax.cluster.memory_budget import node_plan_bytes
from hetjax.cluster.prices import device_price_per_hour
from hetjax.costs.costs import (
    Costs,
    Group,
    Reduction,
    StageKey,
    StageMemory,
    StageTimes,
)
from hetjax.costs.measured.compiled import (
    NOTHING,
    CompiledBytes,
    PlanPrograms,
    compiled_stage,
)
from hetjax.costs.measured.layer_profile import DTYPES, Profile, check_profile
from hetjax.costs.network.routes import Place, route, trunks
from hetjax.costs.network.wire_bytes import (
    GradientWire,
    Transport,
    gradient_sum,
    lane_share,
)
from hetjax.costs.precisions import stage_precisions
from hetjax.costs.stage_memory import adam_state, hidden_size, stage_memory
from hetjax.costs.stage_times import stage_times
from hetjax.models.attention.attention import head_sizes
from hetjax.models.model import Model
from hetjax.plans.attention import Attention, with_attentions
from hetjax.plans.plan import Plan, reduce_groups
from hetjax.plans.precision import Dtype
from hetjax.plans.worker_map import WorkerMap
from hetjax.stage.arrays import OptimizerInit
from hetjax.stage.partition import gradient_sizes, tied_holders


def costs_of(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    profile: Profile | None = None,
    *,
    dtype: Dtype | None = None,
    attention: Attention | None = None,
    optimizer: OptimizerInit = adam_state,
    transport: Transport = "sockets",
    gradient_wire: GradientWire = "float32",
    halves: bool = True,
    counts_memory: bool = True,
    compiled: CompiledBytes = NOTHING,
) -> Costs:
    """Return the plan's costs: measured for devices in the profile, else estimated.

    `dtype` and `attention` are the requested defaults for stages that set none
    (`plans/precision.py`, `plans/attention.py`). `transport` is how the plan's workers
    communicate, `gradient_wire` the type in which they send gradients, `compiled` the
    compiler's figures for programs. Without `halves` the call is faster, but a plan
    that splits backward passes cannot be simulated. Without `counts_memory` it is many
    times as fast, and the costs know nothing about memory.
    Raises BadInput for an unknown device, an unreachable link, a profile of another
    model, or a profile that lacks a layer or the precision of a stage on one of its
    devices.
    """
    if profile is not None:
        check_profile(profile, model.name, plan.seq_len, len(model.layers))
        cluster = with_measured_links(cluster, profile)
    known: set[StageKey] = set()
    memory: dict[StageKey, StageMemory] = {}
    times: dict[StageKey, StageTimes] = {}
    precisions = stage_precisions(plan, cluster, profile, dtype)
    plan = with_attentions(plan, cluster, head_sizes(model), precisions, attention)
    programs = PlanPrograms(
        plan=plan,
        model=model,
        precisions=precisions,
        devices=stage_devices(plan, cluster),
        optimizer=optimizer,
    )
    for r, s, stage in plan.stages():
        node = cluster.node(stage.node)
        traced = {"optimizer": optimizer, "halves": halves, "dtype": precisions[r, s]}
        times[r, s] = stage_times(plan, model, (r, s), node, profile=profile, **traced)
        if not counts_memory:
            continue
        from_compiler = compiled_stage(compiled, programs, (r, s), split=halves)
        if from_compiler.workspace_bytes is not None:
            known.add((r, s))
        memory[r, s] = stage_memory(
            plan,
            model,
            (r, s),
            compiler=compiler_of(node.device),
            compiled=from_compiler,
            **traced,
        )
    edges = _edges(plan)
    routes = {edge: route(cluster, *places) for edge, places in edges.items()}
    return Costs(
        times=times,
        trunks=trunks(cluster),
        routes=routes,
        message_bytes=_message_bytes(plan, model, cluster, precisions, transport),
        reductions=_reductions(plan, model, cluster, transport, gradient_wire),
        memory=memory,
        memory_bytes={
            (r, s): node_plan_bytes(cluster.node(stage.node))
            for r, s, stage in plan.stages()
        },
        compiled=frozenset(known),
        devices=programs.devices,
        norm_s=2 * max((way.latency_s for way in routes.values()), default=0.0),
    )


def stage_devices(plan: Plan, cluster: Cluster) -> dict[StageKey, str]:
    """Return the kind of device of every stage, by its name in the cluster."""
    return {(r, s): cluster.node(stage.node).device for r, s, stage in plan.stages()}


def _edges(plan: Plan) -> dict[tuple[StageKey, StageKey], tuple[Place, Place]]:
    """Return pairs of neighbouring stages with their devices, in both directions."""
    places = {(r, s): (stage.node, stage.devices) for r, s, stage in plan.stages()}
    forth = [((r, s), (r, s + 1)) for r, s in places if (r, s + 1) in places]
    both = forth + [(after, before) for before, after in forth]
    return {(a, b): (places[a], places[b]) for a, b in both}


def _message_bytes(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    precisions: Mapping[StageKey, Precision],
    transport: Transport,
) -> dict[tuple[StageKey, StageKey], float]:
    """Return bytes per lane, in the sender's precision."""
    found = {}
    for (a, (r, s)), places in _edges(plan).items():
        replica = plan.replicas[r]
        elements = replica.microbatch_size * plan.seq_len * hidden_size(model)
        tensor = replica.stages[s].mesh.tensor
        share = lane_share(cluster, *places, tensor, transport)
        found[a, (r, s)] = elements * DTYPES[precisions[a]] * share
    return found


def _reductions(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    transport: Transport,
    wire: GradientWire,
) -> dict[Group, Reduction]:
    members = WorkerMap(plan, cluster.nodes)
    return {
        group: gradient_sum(
            holders, gradient_sizes(model, group), members, cluster, transport, wire
        )
        for group, holders in reduce_groups(plan, tied_holders(plan, model)).items()
    }


def with_measured_links(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with a link for each measured pair of its nodes.

    If both directions were measured, the slower one counts for both.
    """
    nodes = cluster.names
    links = {frozenset(link.between): link for link in cluster.links}
    # the slowest come last and overwrite the others
    for found in sorted(profile.links, key=lambda f: -f.bandwidth_gbit_per_s):
        ends = frozenset(found.between)
        if len(ends) == 2 and ends <= nodes:
            links[ends] = Link(
                between=found.between,
                bandwidth_gbit_per_s=found.bandwidth_gbit_per_s,
                latency_ms=found.latency_ms,
            )
    return replace(cluster, links=tuple(links.values()))


def usd_per_hour(
    plan: Plan, cluster: Cluster, usd_per_kwh: float | None = None
) -> float | None:
    """Return the price of the used nodes; None if the price of any is unknown.

    A node is rented whole, however few of its devices the plan uses. For a node that is
    not rented (`cluster/prices.py`), the electricity of all its devices counts.
    """
    used = plan.nodes
    nodes = [node for node in cluster.nodes if node.name in used]
    prices = [(device_price_per_hour(node, usd_per_kwh), node.count) for node in nodes]
    known = [price * count for price, count in prices if price is not None]
    return math.fsum(known) if len(known) == len(prices) else None


def device_kinds(plan: Plan, cluster: Cluster) -> set[str]:
    """Return the device kinds that the plan uses, by the catalogue's names."""
    used = plan.nodes
    return {canonical_name(n.device) for n in cluster.nodes if n.name in used}
