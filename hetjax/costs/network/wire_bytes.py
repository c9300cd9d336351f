# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes that messages and gradient sums send.

Owns the runtime's traffic in numbers: the one definition by which simulations and the
planner charge, and which tests compare with counted bytes.

* A message between workers (`hetjax/comm/wire.py`, `comm/pull.py`) takes every row once
  to each worker that needs it, which copies it to its tensor ranks. Inside one worker
  (`hetjax/mesh/reshard.py`) every tensor rank gets its own copy.
* For a sum (`hetjax/comm/reduction.py`), workers exchange rows through their hosts;
  holders inside a worker only give it their rows and get the sums. If all holders are
  in one process, each gets the rows of all others from device to device.

Does not own routes (`routes.py`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Literal

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.costs import Reduction, StageKey
from hetjax.costs.network.routes import Place, num_lanes, ports, route
from hetjax.plans.worker_map import WorkerMap, node_of

# how workers communicate; "in-process" means that all nodes are in one worker
Transport = Literal["sockets", "transfer", "in-process"]
GradientWire = Literal["float32", "bfloat16"]  # type in which workers send gradients
GRADIENT_BYTES = 4  # of an element: gradients are summed in fp32
WIRE_BYTES: dict[GradientWire, int] = {"float32": GRADIENT_BYTES, "bfloat16": 2}
DIRECT_BYTES = 256 << 10  # up to here all send everything to all (`comm/reduction.py`)


def lane_share(
    cluster: Cluster,
    source: Place,
    target: Place,
    tensor: int,
    transport: Transport = "sockets",
) -> float:
    """Return the bytes on each lane of a message's route, per byte of the activation.

    `tensor` is the tensor degree of the receiver.
    """
    copies = _copies(cluster, source, target, tensor, transport)
    return copies / num_lanes(cluster, source, target)


def least_copies(source: Node, target: Node, tensor: int) -> int:
    """Return how often the activation is sent at least, for any places on the nodes.

    Every tensor group has at least one worker, and as many as it needs hosts.
    """
    if source.name == target.name and target.hosts == 1:
        return tensor
    return math.ceil(tensor / target.devices_per_host)


def _copies(
    cluster: Cluster, source: Place, target: Place, tensor: int, transport: Transport
) -> float:
    """Return how often the activation is sent; each data rank needs a part of it."""
    workers = _workers(cluster, target)
    if transport == "in-process" or {*_workers(cluster, source), *workers} == {
        workers[0]
    }:
        return tensor
    ranks = [workers[at : at + tensor] for at in range(0, len(workers), tensor)]
    return sum(len(set(rank)) for rank in ranks) / len(ranks)


def _workers(cluster: Cluster, place: Place) -> list[str]:
    """Return the worker of each device of the place: one worker for each host."""
    name, devices = place
    node = cluster.node(name)
    return [node.workers[device // node.devices_per_host] for device in devices]


def exchanged(
    num_workers: int, num_elements: int, wire: GradientWire = "float32"
) -> Iterator[tuple[int, int, int]]:
    """Yield (from, to, bytes) of a sum over workers, numbered in order of holders."""
    all_bytes = WIRE_BYTES[wire] * num_elements
    direct = num_workers == 2 or all_bytes <= DIRECT_BYTES
    each, more = divmod(num_elements, num_workers)
    part_bytes = [WIRE_BYTES[wire] * (each + (w < more)) for w in range(num_workers)]
    for a, b in permutations(range(num_workers), 2):
        yield a, b, all_bytes if direct else part_bytes[b] + part_bytes[a]


def gradient_sum(
    holders: Sequence[StageKey],
    sizes: Sequence[int],
    members: WorkerMap,
    cluster: Cluster,
    transport: Transport,
    wire: GradientWire = "float32",
) -> Reduction:
    """Return the gradient sum over these stages of a group; `sizes` counts the elements
    of its arrays.

    Only data between workers is in the precision of the `wire`.
    """
    stages = [members.plan.replicas[r].stages[s] for r, s in holders]
    places: list[Place] = [(stage.node, stage.devices) for stage in stages]
    num_rows = math.lcm(*(len(stage.devices) for stage in stages))
    row_size = sum(-(-size // num_rows) for size in sizes)
    if transport == "in-process":
        all_bytes = GRADIENT_BYTES * num_rows * row_size
        return _sum_of(cluster, [(a, b, all_bytes) for a, b in permutations(places, 2)])
    sent: list[tuple[Place, Place, int]] = []
    for having, rows in members.shares(holders, num_rows):
        workers = list(dict.fromkeys(having))
        at = [_place_of(cluster, worker) for worker in workers]
        moves = exchanged(len(workers), len(rows) * row_size, wire)
        sent += [(at[a], at[b], size) for a, b, size in moves]
    found = _sum_of(cluster, sent)
    return found if sent else _on_ports(cluster, places, num_rows * row_size)


def _sum_of(cluster: Cluster, sent: Sequence[tuple[Place, Place, int]]) -> Reduction:
    trunk_bytes: Counter[str] = Counter()
    latency_s = 0.0
    for source, target, size in sent:
        way, lanes = route(cluster, source, target), num_lanes(cluster, source, target)
        latency_s = max(latency_s, way.latency_s)
        for trunk in way.trunks:
            trunk_bytes[trunk] += size / lanes  # pyright: ignore
    return Reduction(trunk_bytes=dict(trunk_bytes), latency_s=latency_s)


def _on_ports(cluster: Cluster, places: Sequence[Place], size: int) -> Reduction:
    """Return the sum of holders in one worker: what they give it and get from it."""
    trunk_bytes: dict[str, float] = {}
    for place in places:
        own_bytes = GRADIENT_BYTES * size / len(place[1])
        trunk_bytes |= dict.fromkeys(ports(cluster, place), own_bytes)
    return Reduction(trunk_bytes=trunk_bytes)


def _place_of(cluster: Cluster, worker: str) -> Place:
    """Return one device of the worker: all of them use the same host's card."""
    node = cluster.node(node_of(worker))
    return node.name, (node.workers.index(worker) * node.devices_per_host,)
