# SPDX-License-Identifier: Apache-2.0
"""Routes and trunks against hand-made tables and physical limits."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.network.routes import (
    INTRA_NODE_LATENCY_S,
    NETWORK_LATENCY_S,
    Place,
    num_lanes,
    ring_card_bytes_per_s,
    route,
    trunks,
)
from hetjax.errors import BadInput


def machine(name: str, count: int = 4, hosts: int = 1, zone: str = "east") -> Node:
    """A node with 100 GB/s per device and 80 Gbit/s (10 GB/s) per host."""
    return Node(
        name=name,
        device="prototype",
        count=count,
        hosts=hosts,
        zone=zone,
        peak_tflops=1.0,
        memory_gib=1.0,
        memory_gb_per_s=1.0,
        intra_node_gb_per_s=100.0,
        network_gbit_per_s=80.0,
    )


LAB = Cluster(
    name="lab",
    nodes=(
        machine("a"),
        machine("b"),
        machine("two", hosts=2),
        machine("far", count=1, zone="west"),
        machine("lost", count=1, zone=""),
        Node(name="slice", device="TPU-v4", count=8, hosts=2, zone="east"),
    ),
    links=(
        Link(between=("east", "west"), bandwidth_gbit_per_s=5.0, latency_ms=1.0),
        Link(between=("a", "two"), bandwidth_gbit_per_s=40.0, latency_ms=0.005),
    ),
)


def seconds(source: Place, target: Place, size: float) -> float:
    """Return the time of one message that is alone in the lab."""
    way, rates = route(LAB, source, target), trunks(LAB)
    size /= num_lanes(LAB, source, target)
    return max((size / rates[t] for t in way.trunks), default=0.0) + way.latency_s


def test_trunks_are_ports_cards_and_links_in_bytes_per_second():
    found = trunks(LAB)
    assert {t: found[t] for t in found if t.startswith("b")} == {
        "b/out": 10e9,
        "b/in": 10e9,
        **{f"b:{d}/{way}": 100e9 for d in range(4) for way in ("out", "in")},
    }
    assert {t: found[t] for t in found if "host" in t and "two" in t} == {
        f"two:host{h}/{way}": 10e9 for h in (0, 1) for way in ("out", "in")
    }
    assert {t: found[t] for t in found if ">" in t} == {
        "east>west": 0.625e9,
        "west>east": 0.625e9,
        "a>two": 5e9,
        "two>a": 5e9,
    }


@pytest.mark.parametrize(
    ("source", "target", "through", "latency_s", "lanes"),
    [
        (("a", (1,)), ("a", (1,)), (), 0.0, 1),
        (("a", (0,)), ("a", (3,)), ("a:0/out", "a:3/in"), INTRA_NODE_LATENCY_S, 1),
        (
            ("a", (0, 1)),
            ("a", (2, 3)),
            ("a:0/out", "a:2/in"),
            INTRA_NODE_LATENCY_S,
            2,
        ),
        (("a", (0,)), ("a", (2, 3)), ("a:0/out", "a:2/in"), INTRA_NODE_LATENCY_S, 1),
        (("a", (0, 1)), ("b", (2, 3)), ("a/out", "b/in"), NETWORK_LATENCY_S, 1),
        (
            ("two", (0,)),
            ("two", (1,)),
            ("two:0/out", "two:1/in"),
            INTRA_NODE_LATENCY_S,
            1,
        ),
        (
            ("two", (0,)),
            ("two", (3,)),
            ("two:host0/out", "two:host1/in"),
            NETWORK_LATENCY_S,
            1,
        ),
        (
            # each half of the stage communicates inside its own host
            ("two", (0, 2)),
            ("two", (1, 3)),
            ("two:0/out", "two:1/in"),
            INTRA_NODE_LATENCY_S,
            2,
        ),
        (
            ("two", (0, 2)),
            ("slice", (0, 4)),
            ("two:host0/out", "two:host1/out", "slice:host0/in", "slice:host1/in"),
            NETWORK_LATENCY_S,
            2,
        ),
        (
            ("two", (0, 2)),
            ("b", (0, 1)),
            ("two:host0/out", "two:host1/out", "b/in"),
            NETWORK_LATENCY_S,
            1,
        ),
        (
            # the links of a TPU slice span its hosts
            ("slice", (0,)),
            ("slice", (7,)),
            ("slice:0/out", "slice:7/in"),
            INTRA_NODE_LATENCY_S,
            1,
        ),
        (("a", (0,)), ("two", (3,)), ("a>two",), 5e-6, 1),
        (("two", (3,)), ("a", (0,)), ("two>a",), 5e-6, 1),
        (("b", (0,)), ("far", (0,)), ("b/out", "east>west", "far/in"), 1e-3, 1),
        (("far", (0,)), ("b", (0,)), ("far/out", "west>east", "b/in"), 1e-3, 1),
    ],
)
def test_a_route_passes_the_trunks_on_its_way(
    source, target, through, latency_s, lanes
):
    way = route(LAB, source, target)
    assert (way.trunks, way.latency_s) == (through, pytest.approx(latency_s))
    assert num_lanes(LAB, source, target) == lanes


def test_times_of_lone_messages_follow_from_the_slowest_trunk():
    assert seconds(("a", (0,)), ("a", (1,)), 1e9) == pytest.approx(0.01 + 5e-6)
    assert seconds(("a", (0, 1)), ("a", (2, 3)), 1e9) == pytest.approx(0.005 + 5e-6)
    assert seconds(("a", (0, 1)), ("b", (0, 1)), 1e9) == pytest.approx(0.1 + 2e-5)
    assert seconds(("two", (0, 2)), ("slice", (0, 4)), 1e9) == pytest.approx(0.05002)
    assert seconds(("a", (0,)), ("two", (0,)), 1e9) == pytest.approx(0.2 + 5e-6)
    assert seconds(("b", (0,)), ("far", (0,)), 1e9) == pytest.approx(1.6 + 1e-3)


def test_a_link_of_the_nodes_stands_above_their_zones():
    cable = Link(between=("b", "far"), bandwidth_gbit_per_s=8.0)
    cluster = Cluster(name="x", nodes=LAB.nodes, links=(*LAB.links, cable))
    way = route(cluster, ("b", (0,)), ("far", (0,)))
    assert (way.trunks, way.latency_s) == (("b>far",), 0.0)
    assert trunks(cluster)["b>far"] == 1e9


def test_zones_without_a_link_are_unreachable_and_the_error_has_the_link():
    cluster = Cluster(name="x", nodes=LAB.nodes, links=LAB.links[1:])
    with pytest.raises(BadInput) as caught:
        route(cluster, ("b", (0,)), ("far", (0,)))
    assert caught.value.got == (
        "unreachable link: from node 'b' (zone 'east') to node 'far' (zone 'west')"
    )
    assert "[[link]] between the nodes or their zones" in caught.value.allowed
    assert caught.value.fix == (
        'add to the cluster file: [[link]] between = ["east", "west"], '
        "bandwidth_gbit_per_s = ..., latency_ms = ..."
    )


def test_a_node_without_a_zone_is_to_be_linked_by_its_own_name():
    with pytest.raises(BadInput) as caught:
        route(LAB, ("b", (0,)), ("lost", (0,)))
    assert 'between = ["b", "lost"]' in caught.value.fix


def test_an_unknown_device_has_no_trunks():
    cluster = Cluster(name="x", nodes=(Node(name="n", device="zork", count=1),))
    with pytest.raises(BadInput, match="'zork' is not in the device catalogue"):
        trunks(cluster)


def test_names_that_would_make_two_trunks_one_are_bad_input():
    zones = ("a", "b>c", "a>b", "c")
    nodes = tuple(replace(machine(f"n{i}"), zone=z) for i, z in enumerate(zones))
    pairs = (("a", "b>c"), ("a>b", "c"))
    links = tuple(Link(between=pair, bandwidth_gbit_per_s=1.0) for pair in pairs)
    with pytest.raises(BadInput, match="2 trunks of cluster 'x' named 'a>b>c'"):
        trunks(Cluster(name="x", nodes=nodes, links=links))


def test_rings_share_the_cards_of_the_hosts_that_they_leave():
    two, tpu = machine("two", hosts=2), LAB.nodes[-1]  # devices 0, 1 and 2, 3
    whole = 10e9
    assert ring_card_bytes_per_s(machine("a"), [(0, 1, 2, 3)]) == float("inf")
    assert ring_card_bytes_per_s(two, [(0, 1), (2, 3)]) == float("inf")
    assert ring_card_bytes_per_s(two, [(0, 1, 2, 3)]) == whole
    assert ring_card_bytes_per_s(two, [(0, 2, 1, 3)]) == whole  # in host order
    assert ring_card_bytes_per_s(two, [(0, 2), (1, 3)]) == whole / 2
    assert ring_card_bytes_per_s(tpu, [tuple(range(8))]) == float("inf")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw nodes in two linked zones, some with their own cables."""
    nodes = []
    for i in range(draw(st.integers(1, 4))):
        hosts = draw(st.integers(1, 3))
        nodes.append(
            Node(
                name=f"n{i}",
                device=draw(st.sampled_from(["H20", "V100-SXM2-16GB", "TPU-v5e"])),
                count=hosts * draw(st.integers(1, 3)),
                hosts=hosts,
                zone=draw(st.sampled_from(["east", "west"])),
            )
        )
    pairs = list(itertools.combinations([node.name for node in nodes], 2))
    cables = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    if len({node.zone for node in nodes}) == 2:
        cables.append(("east", "west"))
    links = [
        Link(between=pair, bandwidth_gbit_per_s=draw(st.floats(1, 100)), latency_ms=0.1)
        for pair in cables
    ]
    return Cluster(name="any", nodes=tuple(nodes), links=tuple(links))


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Cluster, Place, Place]:
    cluster = draw(clusters())
    places = []
    for _ in range(2):
        node = draw(st.sampled_from(cluster.nodes))
        few = st.lists(st.integers(0, node.count - 1), min_size=1, unique=True)
        places.append((node.name, tuple(draw(few))))
    return cluster, places[0], places[1]


@given(journey=journeys())
def test_the_way_back_is_the_mirror_of_the_way_there(journey):
    cluster, source, target = journey
    there, back = route(cluster, source, target), route(cluster, target, source)
    assert {mirror(trunk) for trunk in there.trunks} == set(back.trunks)
    assert there.latency_s == back.latency_s
    lanes = num_lanes(cluster, source, target)
    assert lanes == num_lanes(cluster, target, source)
    assert 1 <= lanes <= min(len(source[1]), len(target[1]))


def mirror(trunk: str) -> str:
    if ">" in trunk:
        return ">".join(reversed(trunk.split(">")))
    place, way = trunk.rsplit("/", 1)
    return f"{place}/{'in' if way == 'out' else 'out'}"


@given(journey=journeys())
def test_every_route_uses_trunks_of_the_cluster_each_once(journey):
    cluster, source, target = journey
    way, known = route(cluster, source, target), trunks(cluster)
    assert set(way.trunks) <= set(known)
    assert len(set(way.trunks)) == len(way.trunks)
    assert (source == target) == (not way.trunks)
    assert all(known[trunk] > 0 for trunk in way.trunks)
    by_name = {node.name: node for node in cluster.nodes}
    if by_name[source[0]].zone != by_name[target[0]].zone:
        assert any(">" in trunk for trunk in way.trunks)
