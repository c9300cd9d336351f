# SPDX-License-Identifier: Apache-2.0
"""Models a cluster's network: its capacities (trunks) and the routes of messages.

Every device has a port out and a port in, every host a network card with both
directions, every link of the cluster file a trunk each way:

* a device to itself: no trunk;
* inside a host (or a node whose links span its hosts): port out, port in;
* other hosts and nodes of one zone: card out, card in;
* two nodes with their own link: that link, in place of the cards;
* two zones: card out, the one trunk that the zones share, card in.

A stage's devices send in parallel, in lanes (`num_lanes`): callers divide a message's
bytes by the lanes. The port of one device represents all of them, since a stage uses
its devices alike. Rings inside a stage share the cards of its hosts
(`ring_card_bytes_per_s`). Owns this model. Does not own the number of bytes
(`wire_bytes.py`), nor the sharing of trunks (`schedule/simulation/traffic.py`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.costs import Route
from hetjax.errors import BadInput

Place = tuple[str, tuple[int, ...]]  # a node and indices of some of its devices

# NCCL's tuning table (src/graph/tuning.cc, ring with the Simple protocol) has 3.4e-6
# for NVLink and 5.7e-6 for PCIe, and 14e-6 for InfiniBand, to which Ethernet adds some
INTRA_NODE_LATENCY_S = 5e-6
NETWORK_LATENCY_S = 20e-6


def trunks(cluster: Cluster) -> dict[str, float]:
    """Return bytes per second by trunk; a trunk is one direction of one resource.

    Names: "a100-0:1/out" (device 1's port), "a100-0/out" (the card of a node of one
    host), "v100-0:host1/out" (of several hosts), "east>west" (a link). Raises BadInput
    for an unknown device or for equal names.
    """
    found = [*_of_nodes(cluster), *_of_links(cluster)]
    for name, times in Counter(name for name, _ in found).items():
        if times > 1:
            raise BadInput(
                got=f"{times} trunks of cluster {cluster.name!r} named {name!r}",
                allowed="names of nodes and zones that give each trunk its own name",
                fix="rename nodes and zones without ':' and '>'",
            )
    return dict(found)


def route(cluster: Cluster, source: Place, target: Place) -> Route:
    """Return the route of a message from one place to another.

    Raises BadInput if the places are on nodes of two zones that no link joins.
    """
    return _way(cluster, source, target)[0]


def num_lanes(cluster: Cluster, source: Place, target: Place) -> int:
    """Return the number of equal parts of a message that pass the route in parallel.

    Between devices of a host it is the smaller number of devices, between hosts the
    smaller number of network cards. It is 1 over a link of the cluster file, which all
    lanes share.
    """
    return _way(cluster, source, target)[1]


def ports(cluster: Cluster, place: Place) -> tuple[str, str]:
    """Return the ports out and in that represent those of all devices of a place."""
    node, first = cluster.node(place[0]), place[1][0]
    return _port(node, first, "out"), _port(node, first, "in")


def ring_card_bytes_per_s(node: Node, rings: Sequence[Sequence[int]]) -> float:
    """Return the share of a network card that each of a node's rings of devices gets.

    The rings run in parallel, each in host order; the fullest card decides. Infinity
    if no hop leaves a host, or if the node's links span its hosts.
    """
    spec = device_spec(node)
    if spec.links_span_hosts:
        return math.inf
    leaving: Counter[int] = Counter()
    for ring in rings:
        hosts = [_host(node, device) for device in sorted(ring)]
        hops = pairwise([*hosts, hosts[0]])
        leaving.update(out for out, into in hops if out != into)
    card = spec.network_gbit_per_s * 1e9 / 8
    return card / max(leaving.values()) if leaving else math.inf


def _way(cluster: Cluster, source: Place, target: Place) -> tuple[Route, int]:
    """Return the route, and its number of lanes."""
    if source == target:
        return Route(trunks=()), 1
    a, b = cluster.node(source[0]), cluster.node(target[0])
    link = _link(cluster, a.name, b.name)
    if link:
        trunk = f"{a.name}>{b.name}"
        return Route(trunks=(trunk,), latency_s=link.latency_ms / 1e3), 1
    crossing = _hosts_crossed(a, b, _lanes(source[1], target[1]))
    if not crossing:
        ports = (_port(a, source[1][0], "out"), _port(b, target[1][0], "in"))
        num = min(len(source[1]), len(target[1]))
        return Route(trunks=ports, latency_s=INTRA_NODE_LATENCY_S), num
    cards_out = [card(a, host, "out") for host in sorted({h for h, _ in crossing})]
    cards_in = [card(b, host, "in") for host in sorted({h for _, h in crossing})]
    if a.zone == b.zone:
        cards = (*cards_out, *cards_in)
        num = min(len(cards_out), len(cards_in))
        return Route(trunks=cards, latency_s=NETWORK_LATENCY_S), num
    link = _link(cluster, a.zone, b.zone)
    if not link:
        raise _unreachable(a, b)
    # the cluster file gives the latency between zones from end to end
    latency_s = max(NETWORK_LATENCY_S, link.latency_ms / 1e3)
    trunks = (*cards_out, f"{a.zone}>{b.zone}", *cards_in)
    return Route(trunks=trunks, latency_s=latency_s), 1


def _lanes(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return pairs of communicating devices: all of the smaller side, and as many of
    the other side, spread evenly."""
    num = min(len(source), len(target))
    return [
        (source[lane * len(source) // num], target[lane * len(target) // num])
        for lane in range(num)
    ]


def _hosts_crossed(
    a: Node, b: Node, lanes: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return (host out, host in) of the lanes that use network cards."""
    hosts = [(_host(a, out), _host(b, into)) for out, into in lanes]
    if a.name != b.name:
        return hosts
    if device_spec(a).links_span_hosts:
        return []
    return [(out, into) for out, into in hosts if out != into]


def _of_nodes(cluster: Cluster) -> Iterator[tuple[str, float]]:
    for node in cluster.nodes:
        spec = device_spec(node)
        for way in ("out", "in"):
            for host in range(node.hosts):
                yield card(node, host, way), spec.network_gbit_per_s * 1e9 / 8
            for device in range(node.count):
                yield _port(node, device, way), spec.intra_node_gb_per_s * 1e9


def _of_links(cluster: Cluster) -> Iterator[tuple[str, float]]:
    for link in cluster.links:
        left, right = link.between
        for name in (f"{left}>{right}", f"{right}>{left}"):
            yield name, link.bandwidth_gbit_per_s * 1e9 / 8


def _port(node: Node, device: int, way: str) -> str:
    return f"{node.name}:{device}/{way}"


def card(node: Node, host: int, way: str) -> str:
    """Return the trunk of a host's network card; `way` is out or in."""
    return f"{node.name}/{way}" if node.hosts == 1 else f"{node.name}:host{host}/{way}"


def _host(node: Node, device: int) -> int:
    assert 0 <= device < node.count
    return device // (node.count // node.hosts)


def _link(cluster: Cluster, one: str, other: str) -> Link | None:
    ends = {one, other}
    return next((ln for ln in cluster.links if set(ln.between) == ends), None)


def _unreachable(a: Node, b: Node) -> BadInput:
    zones = a.zone and b.zone
    left, right = (a.zone, b.zone) if zones else (a.name, b.name)
    return BadInput(
        got=f"unreachable link: from node {a.name!r} (zone {a.zone!r}) to node "
        f"{b.name!r} (zone {b.zone!r})",
        allowed="nodes of one zone, or a [[link]] between the nodes or their zones",
        fix=f'add to the cluster file: [[link]] between = ["{left}", "{right}"], '
        "bandwidth_gbit_per_s = ..., latency_ms = ...",
    )
