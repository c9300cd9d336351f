# SPDX-License-Identifier: Apache-2.0
"""Costs of hops and gradient sums between stages whose nodes are not yet chosen.

Owns which pairs of nodes two neighbouring stages might be on. Nodes of a class are
alike, but the links between them may differ, so every kind of way between two nodes
counts. Does not own the cost of a message between two given nodes
(`costs/network/nearest.py`).

Letters of array names: see `problem.py`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster, Link, Node, part_of
from hetjax.costs.measured.layer_profile import DTYPES
from hetjax.costs.network.nearest import LinkEnd, nearest
from hetjax.costs.network.routes import trunks
from hetjax.costs.network.wire_bytes import GRADIENT_BYTES, WIRE_BYTES
from hetjax.costs.stage_memory import hidden_size
from hetjax.planner.model.problem import Floats, Option
from hetjax.planner.model.request import NodeClass, PlanRequest

_NEVER_S = 1e6  # a hop between two stages that no nodes have room for
_NodePair = tuple[Node, Node]
_ClassPair = tuple[int, int]
Holders = Literal["alike", "any"]
HOLDERS: tuple[Holders, ...] = ("alike", "any")


def hop_tables(
    request: PlanRequest, options: Sequence[Option], num_kinds: int
) -> tuple[Floats, Floats]:
    """Return hop_s_BKOO and link_s_BKOO: a message's time, and how long it holds
    links."""
    ways = _Ways.from_request(request)
    elements = request.seq_len * hidden_size(request.model)
    of_one = {
        name: elements * DTYPES[precision]
        for name, precision in request.precisions.items()
    }
    shapes = [(o.device_class, o.tensor, o.data) for o in options]
    index = list(map(shapes.index, shapes))
    alone = {
        (a, b): _hop(ways, of_one, options[a], options[b])
        for a, b in product(dict.fromkeys(index), repeat=2)
    }
    sizes_B = np.array(request.microbatch_sizes, dtype=np.float64)
    hop_s_BOO, link_s_BOO = np.zeros((2, len(sizes_B), len(options), len(options)))
    for a, b in product(range(len(options)), repeat=2):
        latency_s, each_s, least_s = alone[index[a], index[b]]
        hop_s_BOO[:, a, b] = latency_s + sizes_B * each_s
        link_s_BOO[:, a, b] = sizes_B * least_s
    hop_s_BKOO = np.repeat(hop_s_BOO[:, None], num_kinds, axis=1)
    return hop_s_BKOO, np.repeat(link_s_BOO[:, None], num_kinds, axis=1)


def sync_bytes_per_s(
    request: PlanRequest, options: Sequence[Option], holders: Holders = "any"
) -> Floats:
    """Return each option's bytes per second of gradient sums over the slowest way.

    `holders` "any": the slowest way between any nodes. "alike", as in many of the best
    plans: the slowest between nodes of its class; if the class has one node, the
    fastest to another class. The stage's node is assumed to be full of such stages,
    which share the way. In a cluster of one node sums stay inside it. Rates count bytes
    as float32, whatever is sent.
    """
    ways, classes = _Ways.from_request(request), request.classes
    rate_of = {
        pair: [
            1 / way.s_per_byte
            for a, b in nodes
            if (way := ways.nearest(_lone(a), _lone(b))) is not None
        ]
        for pair, nodes in ways.pairs.items()
    }
    every = [rate for found in rate_of.values() for rate in found]
    rates, sent_as = [], _float32_bytes_per_sent(request)
    for option in options:
        c = option.device_class
        share = option.num_devices / classes[c].devices_per_node
        away = [rate for (a, _), found in rate_of.items() if a == c for rate in found]
        if not away:
            rates.append(device_spec(classes[c].nodes[0]).intra_node_gb_per_s * 1e9)
            continue
        alike = min(rate_of[c, c], default=max(away))
        rates.append(share * sent_as * (alike if holders == "alike" else min(every)))
    return np.array(rates)


def most_sum_bytes_per_s(request: PlanRequest, options: Sequence[Option]) -> Floats:
    """Return each option's most float32 bytes per second of gradient sums.

    A layer whose holders are all in one worker passes the stage's ports. Any other
    layer leaves the node at least once (`costs/network/wire_bytes.py`). A stage's
    layers may do both at once: over its ports, and over all cards and links of its
    node.
    """
    network, sent_as = request.network, _float32_bytes_per_sent(request)
    rates = []
    for option in options:
        nodes = request.classes[option.device_class].nodes
        spec = device_spec(nodes[0])
        gbit_per_s = max(
            sum(ln.bandwidth_gbit_per_s for ln in network.links if n.name in ln.between)
            for n in nodes
        )
        gbit_per_s += nodes[0].hosts * spec.network_gbit_per_s
        outside = gbit_per_s * 1e9 / 8 * sent_as
        rates.append(option.num_devices * spec.intra_node_gb_per_s * 1e9 + outside)
    return np.array(rates)


def _float32_bytes_per_sent(request: PlanRequest) -> float:
    """Return the bytes of float32 gradients per byte that is sent of them."""
    return GRADIENT_BYTES / WIRE_BYTES[request.gradient_wire]


def _lone(node: Node) -> LinkEnd:
    return LinkEnd(node=node, num_devices=1, tensor=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ways:
    """Example nodes for every kind of way between two classes.

    `network` has only these nodes and the first node of each class.
    """

    classes: Sequence[NodeClass]
    network: Cluster
    rates: Mapping[str, float]
    pairs: Mapping[_ClassPair, Sequence[_NodePair]]

    @staticmethod
    def from_request(request: PlanRequest) -> "_Ways":
        classes, network = request.classes, request.network
        linked = _linked(classes, network.links)
        pairs = {
            (c, d): list(_pairs(classes[c], classes[d], linked[c, d]))
            for c, d in product(range(len(classes)), repeat=2)
        }
        names = {node.name for found in pairs.values() for two in found for node in two}
        names |= {nodes.nodes[0].name for nodes in classes}
        network = part_of(network, names)
        return _Ways(
            classes=classes, network=network, rates=trunks(network), pairs=pairs
        )

    def nearest(self, source: LinkEnd, target: LinkEnd):
        """Return the least cost of a message; None if the two ends have no room."""
        return nearest(self.network, self.rates, source, target)


def _hop(
    ways: _Ways, of_one: Mapping[str, float], a: Option, b: Option
) -> tuple[float, float, float]:
    """Return lower bounds: (latency, mean seconds per sequence over both directions,
    seconds of the faster direction). `of_one` gives the bytes that each node sends per
    sequence, by node name."""
    latency_s, mean_s, least_s = np.inf, np.inf, np.inf
    for one, other in _nodes(ways, a.device_class, b.device_class):
        first = LinkEnd(node=one, num_devices=a.num_devices, tensor=a.tensor)
        second = LinkEnd(node=other, num_devices=b.num_devices, tensor=b.tensor)
        there, back = ways.nearest(first, second), ways.nearest(second, first)
        if there is None or back is None:
            continue
        latency_s = min(latency_s, (there.latency_s + back.latency_s) / 2)
        there_s, back_s = (
            way.s_per_byte * of_one[node.name]
            for way, node in ((there, one), (back, other))
        )
        mean_s = min(mean_s, (there_s + back_s) / 2)
        least_s = min(least_s, there_s, back_s)
    if latency_s == np.inf:
        return _NEVER_S, 0.0, 0.0
    return latency_s, mean_s, least_s


def _nodes(ways: _Ways, c: int, d: int) -> Iterator[_NodePair]:
    """Yield where two neighbouring stages might be: on one node, or on two."""
    if c == d:
        node = ways.classes[c].nodes[0]
        yield node, node
    yield from ways.pairs[c, d]


def _linked(
    classes: Sequence[NodeClass], links: Sequence[Link]
) -> Mapping[_ClassPair, list[tuple[Link, _NodePair]]]:
    """Return the links between two nodes, by their classes, in both directions."""
    home = {node.name: (c, node) for c, own in enumerate(classes) for node in own.nodes}
    found: dict[_ClassPair, list[tuple[Link, _NodePair]]] = defaultdict(list)
    for link in links:
        if set(link.between) <= set(home):
            (c, a), (d, b) = (home[end] for end in link.between)
            found[c, d].append((link, (a, b)))
            found[d, c].append((link, (b, a)))
    return found


def _pairs(
    first: NodeClass, second: NodeClass, linked: Sequence[tuple[Link, _NodePair]]
) -> Iterator[_NodePair]:
    """Yield two nodes for every kind of way: a pair without its own link, and the pairs
    whose own links are the fastest, the slowest and of least latency."""
    joined = {(a.name, b.name) for _, (a, b) in linked}
    apart = (
        (a, b)
        for a, b in product(first.nodes, second.nodes)
        if a.name != b.name and (a.name, b.name) not in joined
    )
    one = next(apart, None)
    if one is not None:
        yield one
    if linked:
        yield max(linked, key=lambda found: found[0].bandwidth_gbit_per_s)[1]
        yield min(linked, key=lambda found: found[0].bandwidth_gbit_per_s)[1]
        yield min(linked, key=lambda found: found[0].latency_ms)[1]
