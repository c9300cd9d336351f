# SPDX-License-Identifier: Apache-2.0
"""How many bytes a gradient sum puts on every trunk.

Owns what the runtime does, in numbers; the one definition that simulations charge by,
and that tests hold against what was counted. Between workers rows are exchanged by the
host (`hetjax/comm/exchange.py`); holders inside a worker only give it their rows and
get the sums. Where all holders are in one process, each gets the rows of all others
from device to device (`hetjax/comm/reduction.py`). Does not own ways (`routes.py`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations

from hetjax.cluster.cluster import Cluster
from hetjax.costs.costs import Reduction, StageKey
from hetjax.costs.network.messages import Transport
from hetjax.costs.network.routes import Place, num_lanes, ports, route
from hetjax.plans.worker_map import WorkerMap, node_of

GRADIENT_BYTES = 4  # of an element: gradients are summed in fp32
DIRECT_BYTES = 256 << 10  # up to here all send all to all (`comm/exchange.py`)


def exchanged(num_workers: int, num_elements: int) -> Iterator[tuple[int, int, int]]:
    """(from, to, bytes) of a sum over workers, numbered in the order of holders."""
    all_bytes = GRADIENT_BYTES * num_elements
    direct = num_workers == 2 or all_bytes <= DIRECT_BYTES
    each, more = divmod(num_elements, num_workers)
    part_bytes = [GRADIENT_BYTES * (each + (w < more)) for w in range(num_workers)]
    for a, b in permutations(range(num_workers), 2):
        yield a, b, all_bytes if direct else part_bytes[b] + part_bytes[a]


def gradient_sum(
    holders: Sequence[StageKey],
    sizes: Sequence[int],
    members: WorkerMap,
    cluster: Cluster,
    transport: Transport,
) -> Reduction:
    """Give the sum over these stages of a group whose arrays have so many elements."""
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
        moves = exchanged(len(workers), len(rows) * row_size)
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
    """What a worker's holders give it and get from it."""
    trunk_bytes: dict[str, float] = {}
    for place in places:
        own_bytes = GRADIENT_BYTES * size / len(place[1])
        trunk_bytes |= dict.fromkeys(ports(cluster, place), own_bytes)
    return Reduction(trunk_bytes=trunk_bytes)


def _place_of(cluster: Cluster, worker: str) -> Place:
    """A device of the worker: its host's card is the same from all of them."""
    node = next(node for node in cluster.nodes if node.name == node_of(worker))
    return node.name, (node.workers.index(worker) * node.devices_per_host,)
