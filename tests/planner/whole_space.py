# SPDX-License-Identifier: Apache-2.0
"""Small requests, including random ones, and the fastest plan of each by enumeration.

Owns an oracle that shares no search with the planner. It enumerates all sets of
pipelines over real devices, all cuts, microbatches and remats. It simulates each plan,
except those that the prefix bound of `schedule/bound.py` (tested against the simulator
there) rules out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from random import Random

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.plan_costs import costs_of
from hetjax.errors import NoFeasiblePlan
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.models.model import Model
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import OFFLOADS, PlanRequest
from hetjax.plans.plan import Offload, Plan, Remat, Replica, Stage, StageMesh
from hetjax.plans.schedules import default_launch_ahead
from hetjax.schedule.bound import prefix_bound_s


def small_model(blocks: int) -> Model:
    return llama_model(
        LlamaConfig(
            name=f"small-{blocks}",
            vocab_size=512,
            hidden_size=64,
            inner_size=128,
            num_blocks=blocks,
            num_heads=4,
            num_kv_heads=4,
            max_seq_len=64,
        )
    )


def random_request(seed: int) -> PlanRequest:
    """Return two to four unlike devices, unlike links, tight or ample memory."""
    r = Random(seed)
    counts = r.choice([(1, 1), (2,), (2, 1), (1, 1, 1), (2, 1), (1, 2), (2, 2)])
    many = sum(counts) > 3
    nodes = tuple(_node(r, f"n{n}", count) for n, count in enumerate(counts))
    remats: tuple[Remat, ...] = r.choice([("none",), ("full",), ("none", "full")])
    return PlanRequest(
        model=small_model(r.choice([1, 2]) if many else r.choice([1, 2, 3])),
        cluster=Cluster(name="drawn", nodes=nodes, links=_links(r, nodes)),
        seq_len=64,
        global_batch=r.choice([2, 3, 4]),
        dtype="float32",
        microbatch_sizes=r.choice([(1,), (1, 2)]),
        tensor_degrees=(1, 2),
        data_degrees=(1, 2),
        remats=remats[:1] if many else remats,
        offloads=_offloads(seed, many),
        unequal_tensor=r.random() < 0.3,
    )


def _offloads(seed: int, many: bool) -> tuple[Offload, ...]:
    is_open = not many and Random(f"offload {seed}").random() < 0.3
    return OFFLOADS["auto" if is_open else "none"]


def _node(r: Random, name: str, count: int) -> Node:
    return Node(
        name=name,
        device=f"made-up-{name}",
        count=count,
        peak_tflops=r.uniform(0.01, 0.1),
        memory_gib=r.choice([1.0, r.uniform(0.002, 0.01)]),
        memory_gb_per_s=r.uniform(10, 100),
        intra_node_gb_per_s=r.uniform(0.5, 10),
        network_gbit_per_s=r.uniform(0.2, 10),
    )


def _links(r: Random, nodes: tuple[Node, ...]) -> tuple[Link, ...]:
    return tuple(
        Link(
            between=(a.name, b.name),
            bandwidth_gbit_per_s=r.uniform(0.05, 2),
            latency_ms=r.uniform(0, 0.5),
        )
        for a, b in combinations(nodes, 2)
        if r.random() < 0.3
    )


def two_kinds(memory_gib: float = 1.0, **changes: object) -> PlanRequest:
    """Return a model of two blocks for a fast expensive node and a slow cheap node,
    each with two devices of this much memory."""
    fast = Node(
        name="fast",
        device="made-up-fast",
        count=2,
        price_per_hour=20.0,
        peak_tflops=0.1,
        memory_gib=memory_gib,
        memory_gb_per_s=100.0,
        intra_node_gb_per_s=10.0,
        network_gbit_per_s=10.0,
    )
    slow = replace(
        fast,
        name="slow",
        device="made-up-slow",
        price_per_hour=0.2,
        peak_tflops=0.03,
        memory_gb_per_s=40.0,
    )
    request = PlanRequest(
        model=small_model(2),
        cluster=Cluster(name="two", nodes=(fast, slow)),
        seq_len=64,
        global_batch=8,
        dtype="float32",
        microbatch_sizes=(1, 2),
        tensor_degrees=(1,),
        remats=("none",),
    )
    return replace(request, **changes)


def fastest_s(request: PlanRequest) -> float:
    """Return the least simulated step time over all plans; inf if none fits."""
    best_s = inf
    for plan in all_plans(request):
        costs = costs_of(
            plan,
            request.model,
            request.cluster,
            None,
            dtype=request.dtype,
            optimizer=request.optimizer,
        )
        if prefix_bound_s(plan, costs) >= best_s:
            continue
        try:
            best_s = min(best_s, evaluate_plan(request, plan).simulation.step_time_s)
        except NoFeasiblePlan:
            continue
    return best_s


@dataclass(frozen=True)
class _Seat:
    """Devices of one node, and how a stage uses them."""

    node: str
    num: int
    tensor: int
    data: int


def all_plans(request: PlanRequest) -> Iterator[Plan]:
    """Yield every plan of the request's space; a node's devices are alike."""
    free = {node.name: node.count for node in request.cluster.nodes}
    seats = [
        _Seat(name, tensor * data, tensor, data)
        for name, count in free.items()
        for tensor, data in product(request.degrees, request.data_degrees)
        if tensor * data <= count
    ]
    for pipelines in _sets(free, seats, len(request.model.layers), 0):
        for plan in _filled(request, pipelines):
            if request.unequal_tensor or _is_cut_alike(plan):
                yield plan


def _is_cut_alike(plan: Plan) -> bool:
    """Return whether every layer has the same tensor degree in all replicas."""
    degrees = {
        (layer, stage.mesh.tensor)
        for _, _, stage in plan.stages()
        for layer in range(*stage.layers)
    }
    return len(degrees) == plan.num_layers


def _sets(
    free: Mapping[str, int], seats: list[_Seat], depth: int, least: int
) -> Iterator[list[tuple[_Seat, ...]]]:
    """Yield sets of one or more pipelines whose first seats do not decrease in rank."""
    for pipeline, left in _pipelines(dict(free), seats, depth):
        rank = seats.index(pipeline[0])
        if rank < least:
            continue
        yield [pipeline]
        for others in _sets(left, seats, depth, rank):
            yield [pipeline, *others]


def _pipelines(
    free: dict[str, int], seats: list[_Seat], depth: int
) -> Iterator[tuple[tuple[_Seat, ...], dict[str, int]]]:
    if depth == 0:
        return
    for seat in seats:
        if free[seat.node] < seat.num:
            continue
        left = free | {seat.node: free[seat.node] - seat.num}
        yield (seat,), left
        for rest, after in _pipelines(left, seats, depth - 1):
            yield (seat, *rest), after


def _filled(request: PlanRequest, pipelines: list[tuple[_Seat, ...]]) -> Iterator[Plan]:
    num_layers = len(request.model.layers)
    ways = [
        [
            (cuts, choices, size)
            for cuts in combinations(range(1, num_layers), len(pipeline) - 1)
            for choices in product(
                product(request.remats, request.offloads), repeat=len(pipeline)
            )
            for size in request.microbatch_sizes
            if all(size % seat.data == 0 for seat in pipeline)
        ]
        for pipeline in pipelines
    ]
    for chosen in product(*ways):
        sizes = [size for _, _, size in chosen]
        for counts in _counts(request.global_batch, sizes):
            yield _plan(request, pipelines, chosen, counts)


def _counts(batch: int, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        if batch == 0:
            yield ()
        return
    for m in range(1, batch // sizes[0] + 1):
        for rest in _counts(batch - m * sizes[0], sizes[1:]):
            yield (m, *rest)


def _plan(request: PlanRequest, pipelines, chosen, counts) -> Plan:
    taken = {node.name: 0 for node in request.cluster.nodes}
    replicas = []
    for pipeline, (cuts, choices, size), m in zip(
        pipelines, chosen, counts, strict=True
    ):
        bounds = (0, *cuts, len(request.model.layers))
        stages = []
        for s, (seat, (remat, offload)) in enumerate(
            zip(pipeline, choices, strict=True)
        ):
            first = taken[seat.node]
            taken[seat.node] += seat.num
            stages.append(
                Stage(
                    node=seat.node,
                    devices=tuple(range(first, first + seat.num)),
                    mesh=StageMesh(data=seat.data, tensor=seat.tensor),
                    layers=(bounds[s], bounds[s + 1]),
                    remat=remat,
                    offload=offload,
                    launch_ahead=default_launch_ahead(
                        "1f1b", num_stages=len(pipeline), stage=s, num_microbatches=m
                    ),
                )
            )
        replicas.append(
            Replica(num_microbatches=m, microbatch_size=size, stages=tuple(stages))
        )
    return Plan(
        model=request.model.name,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        replicas=tuple(replicas),
    )
