# SPDX-License-Identifier: Apache-2.0
"""All costs of a plan on a cluster: measured where somebody measured, else estimated.

Owns how layers, memory and the network come together, and that a measured profile
goes before the analytic times of a device that it knows. What the data axis of a stage
exchanges in a step counts as part of its update, measured or not: nothing hides it.
Does not own the estimates (`roofline.py`, `memory.py`, `network.py`) nor the profile
(`profile.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod

from hetjax.cluster.catalogue import DeviceSpec, canonical_name, device_spec
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.costs import (
    Costs,
    Group,
    Reduction,
    Route,
    StageKey,
    StageMemory,
    StageTimes,
)
from hetjax.costs.layers import layer_runs
from hetjax.costs.memory import hidden_size, stage_memory, stage_shares
from hetjax.costs.network import (
    Place,
    num_lanes,
    ring_card_bytes_per_s,
    route,
    trunks,
)
from hetjax.costs.passes import Shares, passes
from hetjax.costs.profile import DTYPES, Profile
from hetjax.costs.profiled import profiled_times
from hetjax.costs.roofline import (
    Hop,
    PassTimes,
    data_sync_s,
    pass_times,
    ring_hop,
    update_s,
)
from hetjax.costs.runs import StageRuns, stage_runs, tied_params
from hetjax.costs.static import (
    OptimizerInit,
    adam_state,
    static_bytes,
    weight_bytes,
)
from hetjax.models.counts import parameter_count
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Remat, Stage, segments

_GRADIENT_BYTES = 4  # gradients are summed in fp32


def analytic_costs(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    *,
    dtype: str = "bfloat16",
    optimizer: OptimizerInit = adam_state,
    profile: Profile | None = None,
) -> Costs:
    """Give all costs of the plan.

    BadInput for a device that nobody describes, nodes that no link joins, or a layer
    that the profile lacks on a device that it knows.
    """
    nodes = {node.name: node for node in cluster.nodes}
    memory: dict[StageKey, StageMemory] = {}
    times: dict[StageKey, StageTimes] = {}
    for r, s, stage in plan.stages():
        node = nodes[stage.node]
        memory[r, s] = stage_memory(
            plan, model, (r, s), dtype=dtype, optimizer=optimizer
        )
        times[r, s] = stage_times(
            plan, model, (r, s), node, dtype=dtype, optimizer=optimizer, profile=profile
        )
    routes = _routes(plan, cluster)
    return Costs(
        times=times,
        trunks=trunks(cluster),
        routes=routes,
        message_bytes=_message_bytes(plan, model, cluster, dtype),
        reductions=_reductions(plan, model, cluster),
        memory=memory,
        memory_bytes={
            (r, s): device_spec(nodes[stage.node]).memory_gib * 2**30
            for r, s, stage in plan.stages()
        },
        norm_s=2 * max((way.latency_s for way in routes.values()), default=0.0),
    )


def stage_times(
    plan: Plan,
    model: Model,
    key: StageKey,
    node: Node,
    *,
    dtype: str,
    optimizer: OptimizerInit,
    profile: Profile | None = None,
) -> StageTimes:
    """Give the stage's seconds by action: the sum over its layers.

    From the profile if it knows the node's device, else estimated. What was measured
    of a tensor group, inside a host, stands for groups over several hosts too.
    """
    replica = plan.replicas[key[0]]
    stage = replica.stages[key[1]]
    if profile is not None and canonical_name(node.device) in profile.devices:
        times = profiled_times(
            profile,
            stage,
            device=node.device,
            microbatch_size=replica.microbatch_size,
            shared=len(plan.replicas) > 1,
        )
        sync_s = _data_sync_s(plan, model, stage, node, dtype, optimizer)
        return replace(times, update_s=times.update_s + sync_s)
    device = device_spec(node)
    shares = stage_shares(plan, model, replica, stage, dtype)
    hop = ring_hop(device, ring_card_bytes_per_s(node, _tensor_rings(stage)))
    layers = [
        _layer_times(layer_runs(model, layer), shares, stage.remat, device, hop)
        for layer in range(*stage.layers)
    ]
    forward_s = sum(layer.forward_s for layer in layers)
    backward_s = sum(layer.backward_s for layer in layers)
    held = static_bytes(stage_runs(plan, model, stage), stage.mesh, dtype, optimizer)
    sync_s = _data_sync_s(plan, model, stage, node, dtype, optimizer)
    return StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        fused_s=forward_s + backward_s,
        input_gradient_s=sum(layer.input_gradient_s for layer in layers),
        weight_gradient_s=sum(layer.weight_gradient_s for layer in layers),
        update_s=update_s(held, device) + sync_s,
    )


@lru_cache(maxsize=4096)
def _layer_times(
    runs: StageRuns, shares: Shares, remat: Remat, device: DeviceSpec, hop: Hop
) -> PassTimes:
    return pass_times(passes(runs, shares, remat), device, hop)


def _data_sync_s(
    plan: Plan,
    model: Model,
    stage: Stage,
    node: Node,
    dtype: str,
    optimizer: OptimizerInit,
) -> float:
    data = stage.mesh.data
    if data == 1:
        return 0.0
    runs = stage_runs(plan, model, stage)
    held = static_bytes(runs, stage.mesh, dtype, optimizer)
    hop = ring_hop(device_spec(node), ring_card_bytes_per_s(node, _data_rings(stage)))
    return data_sync_s(held, weight_bytes(runs, stage.mesh), data, hop)


def _tensor_rings(stage: Stage) -> list[tuple[int, ...]]:
    tensor = stage.mesh.tensor
    starts = range(0, len(stage.devices), tensor)
    return [stage.devices[start : start + tensor] for start in starts]


def _data_rings(stage: Stage) -> list[tuple[int, ...]]:
    tensor = stage.mesh.tensor
    return [stage.devices[rank::tensor] for rank in range(tensor)]


def _place(stage: Stage) -> Place:
    return stage.node, stage.devices


def _edges(plan: Plan) -> list[tuple[StageKey, StageKey]]:
    """Pairs of neighbouring stages, in both directions."""
    forth = [
        ((r, s), (r, s + 1))
        for r, replica in enumerate(plan.replicas)
        for s in range(len(replica.stages) - 1)
    ]
    return forth + [(after, before) for before, after in forth]


def _stage(plan: Plan, key: StageKey) -> Stage:
    return plan.replicas[key[0]].stages[key[1]]


def _routes(plan: Plan, cluster: Cluster) -> dict[tuple[StageKey, StageKey], Route]:
    return {
        (a, b): route(cluster, _place(_stage(plan, a)), _place(_stage(plan, b)))
        for a, b in _edges(plan)
    }


def _message_bytes(
    plan: Plan, model: Model, cluster: Cluster, dtype: str
) -> dict[tuple[StageKey, StageKey], float]:
    """Bytes per lane: every tensor rank of the receiver gets a copy of its own."""
    width = hidden_size(model) * DTYPES[dtype]
    found = {}
    for a, b in _edges(plan):
        source, target = _stage(plan, a), _stage(plan, b)
        activation = plan.replicas[a[0]].microbatch_size * plan.seq_len * width
        lanes = num_lanes(cluster, _place(source), _place(target))
        found[a, b] = activation * target.mesh.tensor / lanes
    return found


def _reductions(plan: Plan, model: Model, cluster: Cluster) -> dict[Group, Reduction]:
    tied = _tied_bytes(model)
    holders: dict[Group, list[StageKey]] = {}
    num_bytes: dict[Group, int] = {}
    for lo, hi in segments(plan):
        holders[lo, hi] = [
            (r, s)
            for r, s, stage in plan.stages()
            if stage.layers[0] <= lo and hi <= stage.layers[1]
        ]
        layers = model.layers[lo:hi]
        own = {m.path for layer in layers for m in layer.modules}
        elsewhere = sum(
            size for path, size in tied.items() if path.rpartition(".")[0] in own
        )
        counted = _GRADIENT_BYTES * sum(map(parameter_count, layers))
        num_bytes[lo, hi] = counted - elsewhere
    for path, size in tied.items():
        holders[path] = _holders(plan, model, path)
        num_bytes[path] = size
    return {
        group: _ring([_stage(plan, key) for key in keys], num_bytes[group], cluster)
        for group, keys in holders.items()
        if len(keys) > 1
    }


def _tied_bytes(model: Model) -> Mapping[str, int]:
    """Gradient bytes of every tied parameter by its path."""
    return {
        path: _GRADIENT_BYTES * prod(param.shape)
        for path, param in tied_params(model).items()
    }


def _holders(plan: Plan, model: Model, path: str) -> list[StageKey]:
    """The stages whose modules own or use a tied parameter."""
    found = []
    for r, s, stage in plan.stages():
        layers = model.layers[slice(*stage.layers)]
        modules = [m for layer in layers for m in layer.modules]
        owns = any(m.path == path.rpartition(".")[0] for m in modules)
        if owns or any(owner == path for m in modules for _, owner in m.tied):
            found.append((r, s))
    return found


def _ring(stages: list[Stage], num_bytes: int, cluster: Cluster) -> Reduction:
    """A ring over the holders; the hop with the fewest lanes sets the bytes."""
    places = [_place(stage) for stage in stages]
    hops = list(zip(places, places[1:] + places[:1], strict=True))
    lanes = min(num_lanes(cluster, a, b) for a, b in hops)
    share = 2 * (len(places) - 1) / len(places)
    return Reduction(
        hops=tuple(route(cluster, a, b) for a, b in hops),
        hop_bytes=share * num_bytes / lanes,
    )
