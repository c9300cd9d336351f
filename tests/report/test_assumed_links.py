# SPDX-License-Identifier: Apache-2.0
"""Messages about the network that a cluster file leaves open, against the routes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.cluster.catalogue import catalogue
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.network.routes import route
from hetjax.report.plans.assumed_links import guess_lines, link_lines

DESK = Node(name="desk", device="GeForce-RTX-4090", count=2)
SERVER = Node(name="server", device="A100-SXM4-80GB", count=4)
CABLE = Link(between=("desk", "server"), bandwidth_gbit_per_s=25.0)


def cluster(*nodes: Node, links: tuple[Link, ...] = ()) -> Cluster:
    return Cluster(name="c", nodes=nodes, links=links)


def test_cards_of_the_catalogue_are_told_with_their_source_and_guesses_warned_of():
    both = cluster(DESK, SERVER)
    assert [*link_lines(both)] == [
        "network assumed: 10 Gbit/s for each host of desk (GeForce-RTX-4090: 10 "
        "gigabit Ethernet, an assumption)",
        "network assumed: 400 Gbit/s for each host of server (A100-SXM4-80GB: "
        + catalogue()["A100-SXM4-80GB"].sources["network_gbit_per_s"]
        + ")",
    ]
    (warning,) = guess_lines(both)
    assert warning.startswith("warning: the network of desk is a guess")


@pytest.mark.parametrize(
    "all_said",
    [
        cluster(DESK),
        cluster(DESK, SERVER, links=(CABLE,)),
        cluster(*(replace(n, network_gbit_per_s=25.0) for n in (DESK, SERVER))),
    ],
)
def test_nothing_is_assumed_where_no_card_is_used_or_its_speed_is_given(
    all_said: Cluster,
):
    assert [*link_lines(all_said), *guess_lines(all_said)] == []


def test_an_old_card_of_a_data_centre_is_a_guess_as_well():
    old = replace(SERVER, name="old", device="V100-PCIE-16GB")
    (warning,) = guess_lines(cluster(SERVER, old))
    assert "the network of old is a guess" in warning


@pytest.mark.parametrize("latency_ms", [0.0, 1.0])
def test_zones_without_a_latency_are_warned_of(latency_ms: float):
    nodes = replace(DESK, zone="east"), replace(SERVER, zone="west")
    far = replace(CABLE, between=("east", "west"), latency_ms=latency_ms)
    given = [
        line
        for line in guess_lines(cluster(*nodes, links=(far,)))
        if "latency_ms" in line
    ]
    told = (
        "warning: the link between east and west has no latency_ms: plans assume that "
        "both are in one machine room. Give it half of the time that ping prints"
    )
    assert given == ([] if latency_ms else [told])


NODES = st.lists(
    st.tuples(
        st.sampled_from(["GeForce-RTX-3090", "H20", "TPU-v4", "P40"]),
        st.sampled_from([None, 10.0]),
        st.integers(1, 2),
    ),
    min_size=1,
    max_size=4,
)


@given(NODES, st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_a_card_is_assumed_where_a_route_passes_it_and_nobody_gave_its_speed(
    kinds: list[tuple[str, float | None, int]], pairs: set[tuple[int, int]]
):
    nodes = tuple(
        Node(name=f"n{i}", device=kind, count=2, hosts=hosts, network_gbit_per_s=speed)
        for i, (kind, speed, hosts) in enumerate(kinds)
    )
    ends = {tuple(sorted(pair)) for pair in pairs}
    links = tuple(
        Link(between=(f"n{a}", f"n{b}"), bandwidth_gbit_per_s=1.0)
        for a, b in ends
        if a < b < len(nodes)
    )
    there = cluster(*nodes, links=links)
    places = [(node.name, (d,)) for node in nodes for d in range(2)]
    passed = {t for a in places for b in places for t in route(there, a, b).trunks}
    lines = " ".join(link_lines(there)).replace(" and ", " ")
    for node in nodes:
        cards = {f"{node.name}/out", f"{node.name}:host0/out", f"{node.name}:host1/out"}
        is_assumed = node.network_gbit_per_s is None and bool(cards & passed)
        assert (node.name in lines.replace(",", " ").split()) == is_assumed
