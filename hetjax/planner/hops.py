# SPDX-License-Identifier: Apache-2.0
"""Ways between stages that have no place yet: hops of a pipeline, gradient sums.

Owns which places two neighbouring stages might have, and what the nearest of them
costs. Does not own routes between places that are known (`costs/network.py`).

Letters of array names: see `problem.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

import numpy as np

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.costs.memory import hidden_size
from hetjax.costs.messages import lane_share
from hetjax.costs.network import Place, route, trunks
from hetjax.costs.profile import DTYPES
from hetjax.planner.problem import Floats, Option
from hetjax.planner.request import NodeClass, Request

_NEVER_S = 1e6  # from a stage to another that has no place


def hop_tables(
    request: Request, options: Sequence[Option], num_kinds: int
) -> tuple[Floats, Floats]:
    """Return hop_s_BKOO and link_s_BKOO: a message's time, and its hold on links."""
    network = _network(request)
    rates = trunks(network)
    of_one = request.seq_len * hidden_size(request.model) * DTYPES[request.dtype]
    alone = {
        (a, b): _hop(network, rates, request.classes, options[a], options[b])
        for a, b in product(_one_of_each(options), repeat=2)
    }
    same = _one_of_each(options)
    index = [next(n for n in same if _shape(options[n]) == _shape(o)) for o in options]
    sizes_B = np.array(request.microbatch_sizes, dtype=np.float64) * of_one
    hop_s_BOO, link_s_BOO = np.zeros((2, len(sizes_B), len(options), len(options)))
    for a, b in product(range(len(options)), repeat=2):
        latency_s, each_s, least_s = alone[index[a], index[b]]
        hop_s_BOO[:, a, b] = latency_s + sizes_B * each_s
        link_s_BOO[:, a, b] = sizes_B * least_s
    hop_s_BKOO = np.repeat(hop_s_BOO[:, None], num_kinds, axis=1)
    return hop_s_BKOO, np.repeat(link_s_BOO[:, None], num_kinds, axis=1)


def _network(request: Request) -> Cluster:
    """Nodes between which there are ways of every kind, and no more of them."""
    names = [node.name for node in _two_of_each(request.classes)]
    return part_of(request.network, names)


def _shape(option: Option) -> tuple[int, int, int]:
    return option.device_class, option.tensor, option.data


def _one_of_each(options: Sequence[Option]) -> list[int]:
    seen: dict[tuple[int, int, int], int] = {}
    for n, option in enumerate(options):
        seen.setdefault(_shape(option), n)
    return list(seen.values())


def _hop(
    network: Cluster,
    rates: Mapping[str, float],
    classes: Sequence[NodeClass],
    a: Option,
    b: Option,
) -> tuple[float, float, float]:
    """(latency, mean seconds per byte there and back, the lesser of both), by the
    nearest places that two such stages can have."""
    places = list(_places(classes, a, b))
    if not places:
        return _NEVER_S, 0.0, 0.0
    latency_s, mean_s, least_s = np.inf, np.inf, np.inf
    for source, target in places:
        there = _way(network, rates, source, target, b.tensor)
        back = _way(network, rates, target, source, a.tensor)
        latency_s = min(latency_s, (there[0] + back[0]) / 2)
        mean_s = min(mean_s, (there[1] + back[1]) / 2)
        least_s = min(least_s, there[1], back[1])
    return latency_s, mean_s, least_s


def _way(
    network: Cluster,
    rates: Mapping[str, float],
    source: Place,
    target: Place,
    tensor: int,
) -> tuple[float, float]:
    """(latency, seconds per byte of the activation)."""
    way = route(network, source, target)
    share = lane_share(network, source, target, tensor)
    slowest = min((rates[trunk] for trunk in way.trunks), default=np.inf)
    return way.latency_s, share / slowest


def _places(
    classes: Sequence[NodeClass], a: Option, b: Option
) -> Iterator[tuple[Place, Place]]:
    """Where two neighbouring stages might be: on one node, on two."""
    first, second = classes[a.device_class], classes[b.device_class]
    here = tuple(range(a.num_devices))
    if a.device_class != b.device_class:
        there = tuple(range(b.num_devices))
        yield (first.nodes[0].name, here), (second.nodes[0].name, there)
        return
    if a.num_devices + b.num_devices <= first.devices_per_node:
        beside = tuple(range(a.num_devices, a.num_devices + b.num_devices))
        yield (first.nodes[0].name, here), (first.nodes[0].name, beside)
    if len(first.nodes) > 1:
        there = tuple(range(b.num_devices))
        yield (first.nodes[0].name, here), (first.nodes[1].name, there)


def sync_bytes_per_s(request: Request, options: Sequence[Option]) -> Floats:
    """What a stage's gradient sums get of the slowest way between nodes.

    Its node is taken to be full of such stages, which share that way. In a cluster of
    one node sums stay inside.
    """
    network, classes = _network(request), request.classes
    trunk_rates = trunks(network)
    between = [
        1 / _way(network, trunk_rates, (a.name, (0,)), (b.name, (0,)), 1)[1]
        for a, b in combinations(_two_of_each(classes), 2)
    ]
    rates = []
    for option in options:
        nodes = classes[option.device_class]
        share = option.num_devices / nodes.devices_per_node
        inside = device_spec(nodes.nodes[0]).intra_node_gb_per_s * 1e9
        rates.append(share * min(between) if between else inside)
    return np.array(rates)


def _two_of_each(classes: Sequence[NodeClass]) -> list[Node]:
    return [node for nodes in classes for node in nodes.nodes[:2]]
