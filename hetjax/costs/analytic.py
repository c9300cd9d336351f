# SPDX-License-Identifier: Apache-2.0
"""All costs of a plan on a cluster: measured where somebody measured, else estimated.

Owns how stages, memory and the network come together. Does not own the times of a stage
(`stage_times.py`), its memory (`stage_memory.py`) nor routes (`network/routes.py`).
"""

from collections.abc import Sequence
from math import prod

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster
from hetjax.costs.costs import (
    Costs,
    Group,
    Reduction,
    Route,
    StageKey,
    StageMemory,
    StageTimes,
)
from hetjax.costs.measured.profile import DTYPES, Profile
from hetjax.costs.network.messages import Transport, lane_share
from hetjax.costs.network.routes import Place, route, trunks
from hetjax.costs.network.sums import gradient_sum
from hetjax.costs.stage_memory import hidden_size, stage_memory
from hetjax.costs.stage_times import stage_times
from hetjax.costs.static import adam_state
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Stage, segments
from hetjax.plans.worker_map import WorkerMap
from hetjax.stage.arrays import OptimizerInit
from hetjax.stage.partition import gradient_sizes, tied_holders, tied_params


def analytic_costs(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    *,
    dtype: str = "bfloat16",
    optimizer: OptimizerInit = adam_state,
    profile: Profile | None = None,
    transport: Transport = "sockets",
    halves: bool = True,
) -> Costs:
    """Give all costs of the plan, whose workers talk by that transport.

    Those of a backward cut in two are left out, and its tracing, without `halves`.
    BadInput for a device that nobody describes, nodes that no link joins, or a layer
    that the profile lacks on a device that it knows.
    """
    nodes = {node.name: node for node in cluster.nodes}
    memory: dict[StageKey, StageMemory] = {}
    times: dict[StageKey, StageTimes] = {}
    for r, s, stage in plan.stages():
        node = nodes[stage.node]
        memory[r, s] = stage_memory(
            plan, model, (r, s), dtype=dtype, optimizer=optimizer, halves=halves
        )
        times[r, s] = stage_times(
            plan,
            model,
            (r, s),
            node,
            dtype=dtype,
            optimizer=optimizer,
            profile=profile,
            halves=halves,
        )
    routes = _routes(plan, cluster)
    return Costs(
        times=times,
        trunks=trunks(cluster),
        routes=routes,
        message_bytes=_message_bytes(plan, model, cluster, dtype, transport),
        reductions=_reductions(plan, model, cluster, transport),
        memory=memory,
        memory_bytes={
            (r, s): device_spec(nodes[stage.node]).memory_gib * 2**30
            for r, s, stage in plan.stages()
        },
        norm_s=2 * max((way.latency_s for way in routes.values()), default=0.0),
    )


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
    plan: Plan, model: Model, cluster: Cluster, dtype: str, transport: Transport
) -> dict[tuple[StageKey, StageKey], float]:
    """Bytes per lane."""
    width = hidden_size(model) * DTYPES[dtype]
    found = {}
    for a, b in _edges(plan):
        source, target = _stage(plan, a), _stage(plan, b)
        activation = plan.replicas[a[0]].microbatch_size * plan.seq_len * width
        ends = _place(source), _place(target)
        share = lane_share(cluster, *ends, target.mesh.tensor, transport)
        found[a, b] = activation * share
    return found


def _reductions(
    plan: Plan, model: Model, cluster: Cluster, transport: Transport
) -> dict[Group, Reduction]:
    holders: dict[Group, Sequence[StageKey]] = {}
    sizes: dict[Group, list[int]] = {}
    for lo, hi in segments(plan):
        holders[lo, hi] = [
            (r, s)
            for r, s, stage in plan.stages()
            if stage.layers[0] <= lo and hi <= stage.layers[1]
        ]
        sizes[lo, hi] = gradient_sizes(model, (lo, hi))
    for path, param in tied_params(model).items():
        sizes[path] = [prod(param.shape)]
    holders |= tied_holders(plan, model)
    members = WorkerMap(plan, cluster.nodes)
    return {
        group: gradient_sum(keys, sizes[group], members, cluster, transport)
        for group, keys in holders.items()
        if len(keys) > 1
    }
