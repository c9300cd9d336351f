# SPDX-License-Identifier: Apache-2.0
"""Random requests as wide as the cluster file, and random plans of their space.

Owns the drawing: classes of several nodes, nodes of several hosts, links of the file
and measured links that differ by direction, zones that share a trunk, profiles in which
each device is best at something else; plans of up to as many stages as layers, on any
devices in any order, with unequal replicas. Owns also small changes of a plan. Does not
own how plans come near a bound (`near_plans.py`) nor what must hold for them
(`bound_checks.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from random import Random
from typing import get_args

from hetjax.cluster.catalogue import Precision
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.measured.layer_profile import LinkMeasurement, Measurement, Profile
from hetjax.models.model import Model
from hetjax.planner.model.request import OFFLOADS, REMATS, PlanRequest
from hetjax.plans.plan import (
    LayerRange,
    Offload,
    Plan,
    Remat,
    Replica,
    Stage,
    StageMesh,
)
from hetjax.plans.schedules import default_launch_ahead
from tests.planner.whole_space import small_model

SEQ_LEN = 64
DTYPE: Precision = "float32"
AMPLE_GIB = 1000.0
BOTH = OFFLOADS["auto"]
MOST_LAYERS, MOST_DEVICES = 24, 28
_DEGREES = (1, 2, 4)
_TRIES = 30


@lru_cache
def model_of(num_layers: int) -> Model:
    return small_model(num_layers - 2)


def wide_request(seed: int) -> PlanRequest:
    """Return a random cluster, a model of 3 to 24 layers, a batch and options."""
    r = Random(f"wide {seed}")
    if r.random() < 0.05:
        return _deep_request(r, seed)
    tight = r.random() < 0.15
    nodes = _with_precisions(_nodes(r, tight), seed)
    kinds = list(dict.fromkeys(node.device for node in nodes))
    num_layers = r.randint(3, 6) if tight else r.randint(3, MOST_LAYERS)
    tensor = r.choice([(1,), (1, 2), (1, 2), (1, 2, 4)])
    data, sizes = r.choice(
        [((1,), (1,)), ((1,), (1, 2)), ((1, 2), (1, 2, 4)), ((1, 2, 4), (4,))]
        + [((1, 3), (3, 6)), ((1, 2, 3), (1, 2, 6))]
    )
    remats: tuple[Remat, ...] = r.choice([REMATS, ("none",), ("none", "full")])
    profile = _profile(r, nodes, kinds, num_layers) if r.random() < 0.6 else None
    return PlanRequest(
        model=model_of(num_layers),
        cluster=Cluster(name=f"wide-{seed}", nodes=nodes, links=_links(r, nodes)),
        seq_len=SEQ_LEN,
        global_batch=max(sizes) * r.choice([1, 2, 3, 8, 24]),
        dtype=DTYPE if nodes[0].precision is None else "best",
        profile=profile,
        microbatch_sizes=sizes,
        tensor_degrees=tensor,
        data_degrees=data,
        remats=remats,
        offloads=Random(f"offload {seed}").choice([*[OFFLOADS["none"]] * 2, BOTH]),
        unequal_tensor=True,
    )


def _deep_request(r: Random, seed: int) -> PlanRequest:
    """Return single devices, each with room for hardly more than one layer."""
    like = replace(
        _nodes(r, tight=True)[0],
        count=1,
        hosts=1,
        zone="",
        memory_gib=r.uniform(0.00095, 0.0014),
    )
    nodes = tuple(replace(like, name=f"n{n}") for n in range(MOST_DEVICES))
    return PlanRequest(
        model=model_of(r.randint(17, MOST_LAYERS)),
        cluster=Cluster(name=f"deep-{seed}", nodes=nodes),
        seq_len=SEQ_LEN // 8,  # so that weights take most of the memory
        global_batch=r.choice([1, 2, 8]),
        dtype=DTYPE,
        microbatch_sizes=(1,),
        tensor_degrees=(1,),
        data_degrees=(1,),
        remats=("none",),
    )


def _nodes(r: Random, tight: bool) -> tuple[Node, ...]:
    """Return one to three classes of one to four nodes; at times of single devices."""
    zones = r.choice([("",), ("",), ("east", "west")])
    nodes: list[Node] = []
    for c in range(r.randint(1, 3)):
        hosts = r.choice([1, 1, 2, 3, 4])
        count = hosts * r.randint(1, max(1, 8 // hosts))
        num = r.choice([1, 2, 3, 4])
        if r.random() < 0.2:
            hosts, count, num = 1, 1, r.randint(4, MOST_LAYERS)
        like = Node(
            name="",
            device=f"made-up-{c}",
            count=count,
            hosts=hosts,
            zone=r.choice(zones),
            peak_tflops=_wide(r, 0.01, 0.1),
            memory_gib=_wide(r, 0.002, 0.01) if tight else AMPLE_GIB,
            memory_gb_per_s=_wide(r, 10, 100),
            intra_node_gb_per_s=_wide(r, 0.01, 10),
            network_gbit_per_s=_wide(r, 0.001, 10),
        )
        left = MOST_DEVICES - sum(node.count for node in nodes)
        for n in range(min(num, left // count)):
            nodes.append(replace(like, name=f"n{c}-{n}"))
    return tuple(nodes)


def _with_precisions(nodes: tuple[Node, ...], seed: int) -> tuple[Node, ...]:
    """Give every kind its own best precision, in one request out of four."""
    r = Random(f"precision {seed}")
    if r.random() < 0.75:
        return nodes
    best = {node.device: r.choice(get_args(Precision)) for node in nodes}
    return tuple(replace(node, precision=best[node.device]) for node in nodes)


def _wide(r: Random, low: float, high: float) -> float:
    """Return a number between the two, log-uniformly."""
    return low * (high / low) ** r.random()


def _links(r: Random, nodes: Sequence[Node]) -> tuple[Link, ...]:
    """Return few links: each makes classes of its nodes, which slow the search."""
    pairs = list(combinations([node.name for node in nodes], 2))
    chosen = r.sample(pairs, min(r.choice([0, 0, 1, 3]), len(pairs)))
    if len({node.zone for node in nodes}) > 1:
        chosen.append(("east", "west"))
    return tuple(
        Link(
            between=pair,
            bandwidth_gbit_per_s=_wide(r, 0.001, 10),
            latency_ms=_wide(r, 0.01, 20),
        )
        for pair in chosen
    )


def _profile(
    r: Random, nodes: Sequence[Node], kinds: Sequence[str], num_layers: int
) -> Profile:
    """Return measurements of all or some of the device kinds, and of some links."""
    measured = [k for k in kinds if r.random() < 0.7] or [r.choice(kinds)]
    blocks = r.choice([("block",), ("block", "other")])
    layers = ("embedding", *(r.choice(blocks) for _ in range(num_layers - 2)), "head")
    pairs = list(combinations([node.name for node in nodes], 2))
    share = r.choice([0.0, 0.2, 0.5, 1.0])
    chosen = [pair for pair in pairs if r.random() < share]
    ways = [way for a, b in chosen for way in ((a, b), (b, a)) if r.random() < 0.8]
    return Profile(
        model=model_of(num_layers).name,
        seq_len=SEQ_LEN,
        dtype=DTYPE,
        layers=layers,
        measurements=tuple(_measurements(r, measured, tuple(dict.fromkeys(layers)))),
        links=tuple(
            LinkMeasurement(
                between=way,
                bandwidth_gbit_per_s=_wide(r, 0.001, 10),
                latency_ms=_wide(r, 0.01, 20),
            )
            for way in ways
        ),
        program_s=r.choice([0.0, 1e-4, 2e-3]),
    )


def _measurements(
    r: Random, devices: Sequence[str], kinds: Sequence[str]
) -> Iterator[Measurement]:
    """Yield measurements in which each device has its own speed per kind of layer."""
    for device in devices:
        for kind in kinds:
            fast_s = _wide(r, 1e-4, 1e-2)
            for tensor in _DEGREES:
                for remat, factor in zip(REMATS, (1.0, 1.1, 1.4), strict=True):
                    for size in (1, 3, 6):
                        seconds = fast_s * size * factor * r.uniform(0.7, 1.0) / tensor
                        yield Measurement(
                            device=device,
                            kind=kind,
                            tensor=tensor,
                            microbatch_size=size,
                            remat=remat,
                            forward_s=seconds,
                            backward_s=seconds * r.uniform(1, 3),
                            update_s=_wide(r, 1e-5, 1e-3),
                        )


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A stage without its layers."""

    node: str
    devices: tuple[int, ...]
    mesh: StageMesh
    remat: Remat
    offload: Offload = "none"


def random_plan(r: Random, request: PlanRequest) -> Plan:
    """Return a valid plan of the request's space; its memory is not checked."""
    while True:
        free = {node.name: list(range(node.count)) for node in request.cluster.nodes}
        for devices in free.values():
            r.shuffle(devices)
        most = r.choice([1, 1, 2, 3, 6])
        sizes = [r.choice(request.microbatch_sizes) for _ in range(most)]
        pipelines = [
            (size, seats)
            for size in sizes
            if (seats := _pipeline(r, request, free, size))
        ]
        counts = _counts(r, request.global_batch, [size for size, _ in pipelines])
        if not pipelines or not counts:
            continue
        return plan_of(
            request,
            [
                replica_of(m, size, seats, _cuts(r, request, len(seats)))
                for m, (size, seats) in zip(counts, pipelines, strict=True)
            ],
        )


def _pipeline(
    r: Random, request: PlanRequest, free: dict[str, list[int]], size: int
) -> list[Seat]:
    """Return seats of a replica, at most one per layer; empty if there is no room."""
    num_layers = len(request.model.layers)
    depth = r.choice([1, 2, 3, r.randint(1, num_layers), num_layers])
    narrow = r.random() < 0.4
    home = r.choice(list(free)) if r.random() < 0.5 else None
    seats: list[Seat] = []
    for _ in range(depth):
        mesh = StageMesh()
        if not narrow or 1 not in request.degrees:
            ranks = [d for d in request.data_degrees if size % d == 0]
            mesh = StageMesh(data=r.choice(ranks), tensor=r.choice(request.degrees))
        fits = [n for n, left in free.items() if len(left) >= mesh.data * mesh.tensor]
        if fits:
            node = home if home in fits else r.choice(fits)
            seats.append(_seat(r, request, free, node, mesh))
    return seats


def _seat(
    r: Random,
    request: PlanRequest,
    free: dict[str, list[int]],
    node: str,
    mesh: StageMesh,
) -> Seat:
    """Take devices of the node, either as they come or in order."""
    num = mesh.data * mesh.tensor
    if r.random() < 0.5:
        free[node].sort()
    taken, free[node] = free[node][:num], free[node][num:]
    return Seat(
        node=node,
        devices=tuple(taken),
        mesh=mesh,
        remat=r.choice(request.remats),
        offload=_offload(r, request, node),
    )


def _offload(r: Random, request: PlanRequest, node: str) -> Offload:
    if len(request.offloads) == 1 or request.cluster.node(node).hosts > 1:
        return "none"
    return r.choice(request.offloads)


def _cuts(r: Random, request: PlanRequest, depth: int) -> list[LayerRange]:
    num_layers = len(request.model.layers)
    cuts = sorted(r.sample(range(1, num_layers), depth - 1))
    return list(zip([0, *cuts], [*cuts, num_layers], strict=True))


def _counts(r: Random, batch: int, sizes: Sequence[int]) -> list[int]:
    """Return microbatches of every replica that add up; empty if none are found."""
    for _ in range(_TRIES):
        counts, left = [1] * len(sizes), batch - sum(sizes)
        while left > 0 and any(size <= left for size in sizes):
            n = r.choice([n for n, size in enumerate(sizes) if size <= left])
            more = r.randint(1, left // sizes[n])
            counts[n], left = counts[n] + more, left - more * sizes[n]
        if left == 0:
            return counts
    return []


def replica_of(
    count: int, size: int, seats: Sequence[Seat], layers: Sequence[LayerRange]
) -> Replica:
    return Replica(
        num_microbatches=count,
        microbatch_size=size,
        stages=tuple(
            Stage(
                node=seat.node,
                devices=seat.devices,
                mesh=seat.mesh,
                layers=held,
                remat=seat.remat,
                offload=seat.offload,
                launch_ahead=default_launch_ahead(
                    "1f1b", num_stages=len(seats), stage=s, num_microbatches=count
                ),
            )
            for s, (seat, held) in enumerate(zip(seats, layers, strict=True))
        ),
    )


def plan_of(request: PlanRequest, replicas: Sequence[Replica]) -> Plan:
    return Plan(
        model=request.model.name,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        replicas=tuple(replicas),
    )


def changed(r: Random, request: PlanRequest, plan: Plan) -> Plan | None:
    """Return a plan one small change away; None if the change leads nowhere."""
    change = r.choice([_recut, _recut, _reseated, _swapped, _merged, _kept, _evened])
    return change(r, request, plan)


def _with(request: PlanRequest, plan: Plan, at: int, stages: Sequence[Stage]) -> Plan:
    """Return the plan with other stages in one replica and default launch-aheads."""
    old = plan.replicas[at]
    seats = [
        Seat(
            node=s.node,
            devices=s.devices,
            mesh=s.mesh,
            remat=s.remat,
            offload=s.offload,
        )
        for s in stages
    ]
    layers = [stage.layers for stage in stages]
    new = replica_of(old.num_microbatches, old.microbatch_size, seats, layers)
    replicas = [*plan.replicas[:at], new, *plan.replicas[at + 1 :]]
    return plan_of(request, replicas)


def _recut(r: Random, request: PlanRequest, plan: Plan) -> Plan | None:
    """Move one or more layers over a stage boundary."""
    at = r.randrange(len(plan.replicas))
    stages = list(plan.replicas[at].stages)
    if len(stages) == 1:
        return None
    s = r.randrange(len(stages) - 1)
    lo, hi = stages[s].layers[0], stages[s + 1].layers[1]
    cut = r.randint(lo + 1, hi - 1)
    if r.random() < 0.7:
        step = r.choice([-1, 1])
        cut = min(max(stages[s].layers[1] + step, lo + 1), hi - 1)
    stages[s] = replace(stages[s], layers=(lo, cut))
    stages[s + 1] = replace(stages[s + 1], layers=(cut, hi))
    return _with(request, plan, at, stages)


def _reseated(r: Random, request: PlanRequest, plan: Plan) -> Plan | None:
    """Move a stage to other free devices, or reorder its own."""
    at = r.randrange(len(plan.replicas))
    stages = list(plan.replicas[at].stages)
    s = r.randrange(len(stages))
    old = stages[s]
    used = {(stage.node, d) for _, _, stage in plan.stages() for d in stage.devices}
    used -= {(old.node, d) for d in old.devices}
    free = {
        node.name: [d for d in range(node.count) if (node.name, d) not in used]
        for node in request.cluster.nodes
    }
    ranks = [
        d for d in request.data_degrees if plan.replicas[at].microbatch_size % d == 0
    ]
    mesh = StageMesh(data=r.choice(ranks), tensor=r.choice(request.degrees))
    mesh = r.choice([mesh, old.mesh])
    fits = [n for n, left in free.items() if len(left) >= mesh.data * mesh.tensor]
    if not fits:
        return None
    node = r.choice(fits)
    r.shuffle(free[node])
    seat = _seat(r, request, free, node, mesh)
    stages[s] = replace(
        old,
        node=seat.node,
        devices=seat.devices,
        mesh=seat.mesh,
        remat=seat.remat,
        offload=seat.offload,
    )
    return _with(request, plan, at, stages)


def _swapped(r: Random, request: PlanRequest, plan: Plan) -> Plan | None:
    """Swap the places of two stages of a replica."""
    at = r.randrange(len(plan.replicas))
    stages = list(plan.replicas[at].stages)
    if len(stages) == 1:
        return None
    a, b = r.sample(range(len(stages)), 2)
    one, other = stages[a], stages[b]
    stages[a] = replace(other, layers=one.layers)
    stages[b] = replace(one, layers=other.layers)
    return _with(request, plan, at, stages)


def _merged(r: Random, request: PlanRequest, plan: Plan) -> Plan | None:
    """Merge two neighbouring stages."""
    at = r.randrange(len(plan.replicas))
    stages = list(plan.replicas[at].stages)
    if len(stages) == 1:
        return None
    s = r.randrange(len(stages) - 1)
    layers = stages[s].layers[0], stages[s + 1].layers[1]
    stages[s : s + 2] = [replace(r.choice(stages[s : s + 2]), layers=layers)]
    return _with(request, plan, at, stages)


def _kept(r: Random, request: PlanRequest, plan: Plan) -> Plan | None:
    """Change the remat and what is offloaded to the host."""
    at = r.randrange(len(plan.replicas))
    stages = list(plan.replicas[at].stages)
    s = r.randrange(len(stages))
    offload = _offload(r, request, stages[s].node)
    stages[s] = replace(stages[s], remat=r.choice(request.remats), offload=offload)
    return _with(request, plan, at, stages)


def _evened(r: Random, request: PlanRequest, plan: Plan) -> Plan | None:
    """Share out the microbatches anew, at times with another size."""
    sizes = [replica.microbatch_size for replica in plan.replicas]
    if r.random() < 0.5:
        at = r.randrange(len(sizes))
        most = {s.mesh.data for s in plan.replicas[at].stages}
        fits = [s for s in request.microbatch_sizes if not any(s % d for d in most)]
        sizes[at] = r.choice(fits)
    counts = _counts(r, request.global_batch, sizes)
    if not counts:
        return None
    shared = plan_of(
        request,
        [
            replace(replica, num_microbatches=m, microbatch_size=size)
            for replica, m, size in zip(plan.replicas, counts, sizes, strict=True)
        ],
    )
    for at in range(len(shared.replicas)):
        shared = _with(request, shared, at, shared.replicas[at].stages)
    return shared
