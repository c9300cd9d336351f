# SPDX-License-Identifier: Apache-2.0
"""Bounds network times from below, for any devices that stages use on their nodes.

Owns lower bounds of the times that `routes.py` and `wire_bytes.py` give for known
places: of a message between two stages, and of the rings inside a stage. A stage may
use any devices of its node, in any order, so each term takes its own best case. Does
not own the choice of candidate nodes (`planner/model/hops.py`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.network.routes import num_lanes, route
from hetjax.costs.network.wire_bytes import least_copies


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEnd:
    """A stage with known node, number of devices and tensor degree, but no places."""

    node: Node
    num_devices: int
    tensor: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """A message's least time: a latency, and seconds per byte of the activation."""

    latency_s: float
    s_per_byte: float


def nearest(
    network: Cluster, rates: Mapping[str, float], source: LinkEnd, target: LinkEnd
) -> Nearest | None:
    """Return a message's least time; None if a node has no room for both stages.

    `rates` are the network's `trunks`. Raises BadInput as `route` does.
    """
    ways = list(_ways(network, rates, source, target))
    if not ways:
        return None
    return Nearest(
        latency_s=min(way.latency_s for way in ways),
        s_per_byte=min(way.s_per_byte for way in ways),
    )


def least_shared_card_bytes_per_s(
    node: Node, *, num_rings: int, devices_per_ring: int
) -> float:
    """Return the most of a network card that each ring can get (`routes.py`).

    Infinity if all rings fit inside hosts. Every other ring leaves at least two hosts,
    and as many as it needs; the fullest card carries at least the mean.
    """
    spec = device_spec(node)
    inside = node.hosts * (node.devices_per_host // devices_per_ring)
    if spec.links_span_hosts or num_rings <= inside:
        return math.inf
    hosts_of_one = max(2, math.ceil(devices_per_ring / node.devices_per_host))
    leaving = math.ceil((num_rings - inside) * hosts_of_one / node.hosts)
    return spec.network_gbit_per_s * 1e9 / 8 / leaving


def _ways(
    network: Cluster, rates: Mapping[str, float], source: LinkEnd, target: LinkEnd
) -> Iterator[Nearest]:
    """Yield a bound for each possible kind of route, with the most possible lanes."""
    a, b = source.node, target.node
    least = min(source.num_devices, target.num_devices)
    if a.name != b.name:
        spread = min(a.hosts, b.hosts, least)
        out = tuple(host * a.devices_per_host for host in range(spread))
        into = tuple(host * b.devices_per_host for host in range(spread))
        lanes = num_lanes(network, (a.name, out), (b.name, into))
        yield _way(network, rates, (source, target), into[:1], lanes)
        return
    if source.num_devices + target.num_devices > a.count:
        return
    spans = device_spec(a).links_span_hosts
    if a.devices_per_host > 1 or spans:
        yield _way(network, rates, (source, target), (1,), least)
    if a.hosts > 1 and not spans:
        lanes = min(a.hosts, least)
        beyond = (a.devices_per_host,)
        yield _way(network, rates, (source, target), beyond, lanes)


def _way(
    network: Cluster,
    rates: Mapping[str, float],
    ends: tuple[LinkEnd, LinkEnd],
    into: tuple[int, ...],
    lanes: int,
) -> Nearest:
    """Return the bound of one route from the source's first device to the target's
    `into`: all lanes are alike."""
    source, target = ends
    way = route(network, (source.node.name, (0,)), (target.node.name, into))
    slowest = min(rates[trunk] for trunk in way.trunks)
    copies = least_copies(source.node, target.node, target.tensor)
    return Nearest(latency_s=way.latency_s, s_per_byte=copies / lanes / slowest)
