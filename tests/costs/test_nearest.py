# SPDX-License-Identifier: Apache-2.0
"""The network's least times, against every possible place of the stages."""

from collections.abc import Iterator
from itertools import combinations, permutations, product

import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.network.nearest import (
    LinkEnd,
    least_shared_card_bytes_per_s,
    nearest,
)
from hetjax.costs.network.routes import ring_card_bytes_per_s, route, trunks
from hetjax.costs.network.wire_bytes import lane_share

# (devices, hosts) of two nodes
SHAPES = [
    ((4, 1), (3, 1)),
    ((4, 1), (2, 2)),
    ((4, 2), (4, 4)),
    ((6, 2), (3, 1)),
    ((6, 3), (6, 2)),
]
CUTS = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]  # (devices, tensor)
WAYS = {
    "fast cards": (80.0, ()),
    "slow cards": (0.8, ()),
    "a link": (0.8, (Link(between=("a", "b"), bandwidth_gbit_per_s=1, latency_ms=2),)),
    "a trunk": (8.0, (Link(between=("x", "y"), bandwidth_gbit_per_s=1),)),
}


def node(name: str, shape: tuple[int, int], card: float, zone: str) -> Node:
    return Node(
        name=name,
        device="made-up",
        count=shape[0],
        hosts=shape[1],
        zone=zone,
        peak_tflops=1.0,
        memory_gib=1.0,
        memory_gb_per_s=10.0,
        intra_node_gb_per_s=1.0,
        network_gbit_per_s=card,
    )


def places(source: LinkEnd, target: LinkEnd) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield devices of both stages, in every order that could matter."""
    for out in combinations(range(source.node.count), source.num_devices):
        left = range(target.node.count)
        if source.node.name == target.node.name:
            left = [device for device in left if device not in out]
        for into in permutations(left, target.num_devices):
            yield out, into


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_no_places_are_nearer_than_the_nearest_and_some_are_as_near(
    shapes: tuple[tuple[int, int], tuple[int, int]], way: str
) -> None:
    card, links = WAYS[way]
    zones = ("x", "y") if way == "a trunk" else ("", "")
    a, b = (node(n, s, card, z) for n, s, z in zip("ab", shapes, zones, strict=True))
    cluster = Cluster(name="two", nodes=(a, b), links=links)
    rates = trunks(cluster)
    for (one, other), cuts in product(((a, b), (a, a)), product(CUTS, repeat=2)):
        source, target = (
            LinkEnd(node=n, num_devices=num, tensor=tensor)
            for n, (num, tensor) in zip((one, other), cuts, strict=True)
        )
        found = nearest(cluster, rates, source, target)
        ways = [
            (
                route(cluster, (one.name, out), (other.name, into)),
                lane_share(cluster, (one.name, out), (other.name, into), target.tensor),
            )
            for out, into in places(source, target)
        ]
        if found is None or not ways:
            assert not ways
            continue
        least_s = min(
            share / min(rates[trunk] for trunk in found.trunks) for found, share in ways
        )
        latency_s = min(found.latency_s for found, _ in ways)
        assert found.latency_s <= latency_s
        assert found.s_per_byte <= least_s * (1 + 1e-12)
        alone = one is not other and min(num for num, _ in cuts) == 1
        if one.hosts == other.hosts == 1 or alone:
            assert found.latency_s == latency_s
            assert found.s_per_byte == pytest.approx(least_s)


@pytest.mark.parametrize("count, hosts", [(4, 2), (6, 2), (6, 3), (8, 4), (8, 2)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rings_get_no_more_of_a_card_than_the_most_and_some_as_much(
    count: int, hosts: int, size: int
) -> None:
    machine = node("a", (count, hosts), 8.0, "")
    for num in range(1, min(count, 6) // size + 1):
        ways = (
            [of[n : n + size] for n in range(0, num * size, size)]
            for of in permutations(range(count), num * size)
        )
        most = max(ring_card_bytes_per_s(machine, rings) for rings in ways)
        found = least_shared_card_bytes_per_s(
            machine, num_rings=num, devices_per_ring=size
        )
        assert found >= most
        if num == 1:
            assert found == most
