# SPDX-License-Identifier: Apache-2.0
"""Cluster files round-trip and the presets are sound."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.cluster_files import (
    cluster_toml,
    load_cluster,
    parse_cluster,
    preset_names,
    preset_path,
)
from hetjax.errors import BadInput

LAB = Cluster(
    name="lab",
    nodes=(
        Node(name="a100-0", device="A100-SXM4-80GB", count=4, zone="east", spot=True),
        Node(name="cpu-0", device="cpu", count=2, peak_tflops=0.5, memory_gib=8.0),
        Node(name="h20-0", device="H20", count=8, hosts=2, zone="west"),
    ),
    links=(
        Link(between=("east", "west"), bandwidth_gbit_per_s=5.0, latency_ms=1.0),
        Link(between=("a100-0", "cpu-0"), bandwidth_gbit_per_s=10.0),
    ),
)

LAB_TOML = """\
name = "lab"

[[node]]
name = "a100-0"
device = "A100-SXM4-80GB"
count = 4
zone = "east"
spot = true

[[node]]
name = "cpu-0"
device = "cpu"
count = 2
peak_tflops = 0.5
memory_gib = 8.0

[[node]]
name = "h20-0"
device = "H20"
count = 8
hosts = 2
zone = "west"

[[link]]
between = ["east", "west"]
bandwidth_gbit_per_s = 5.0
latency_ms = 1.0

[[link]]
between = ["a100-0", "cpu-0"]
bandwidth_gbit_per_s = 10.0
latency_ms = 0.0
"""

texts = st.text(max_size=12)
names = st.from_regex("[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True).filter(
    lambda name: name != "COMMIT"
)
positive = st.floats(min_value=1e-6, max_value=1e4)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw any consistent cluster, with odd names too."""
    words = draw(st.lists(names, unique=True, min_size=1, max_size=6))
    num_nodes = len(words)
    odd = st.text(min_size=1, max_size=8).filter(lambda zone: zone not in words)
    zones = ["", *draw(st.lists(odd, max_size=3))]
    nodes = []
    for name in words[:num_nodes]:
        hosts = draw(st.integers(1, 4))
        nodes.append(
            Node(
                name=name,
                device=draw(st.text(min_size=1, max_size=12)),
                count=hosts * draw(st.integers(1, 4)),
                hosts=hosts,
                zone=draw(st.sampled_from(zones)),
                spot=draw(st.booleans()),
                price_per_hour=draw(st.none() | positive),
                preemptions_per_hour=draw(st.none() | positive),
                peak_tflops=draw(st.none() | positive),
                memory_gib=draw(st.none() | positive),
                memory_gb_per_s=draw(st.none() | positive),
                intra_node_gb_per_s=draw(st.none() | positive),
                network_gbit_per_s=draw(st.none() | positive),
            )
        )
    used_zones = sorted({n.zone for n in nodes} - {""})
    pairs = [
        (a, b)
        for ends in (words[:num_nodes], used_zones)
        for i, a in enumerate(ends)
        for b in ends[:i]
    ]
    linked = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    links = [
        Link(
            between=pair,
            bandwidth_gbit_per_s=draw(positive),
            latency_ms=draw(st.just(0.0) | positive),
        )
        for pair in linked
    ]
    return Cluster(name=draw(texts), nodes=tuple(nodes), links=tuple(links))


@given(cluster=clusters())
def test_a_cluster_reads_back_as_it_was_written(cluster: Cluster):
    assert parse_cluster(cluster_toml(cluster)) == cluster


def test_the_toml_text_is_the_golden_one():
    assert cluster_toml(LAB) == LAB_TOML
    assert parse_cluster(LAB_TOML) == LAB


def test_a_minimal_node_takes_the_defaults():
    node = parse_cluster(
        'name = ""\n[[node]]\nname = "n"\ndevice = "cpu"\ncount = 4'
    ).nodes[0]
    assert node == Node(name="n", device="cpu", count=4)
    assert (node.hosts, node.zone, node.spot) == (1, "", False)


def test_every_preset_is_a_consistent_cluster_of_its_name():
    for name in preset_names():
        path = preset_path(name)
        assert load_cluster(path).name == name
        assert tomllib.loads(path.read_text())["name"] == name


def test_the_tiny_preset_has_devices_of_unlike_kinds():
    tiny = load_cluster("tiny")
    counts = [(node.name, node.count) for node in tiny.nodes]
    assert counts == [("a100-0", 1), ("v100-0", 2), ("l4-0", 2)]
    assert len({node.device for node in tiny.nodes}) == 3


def test_a_preset_is_known_by_name_unless_a_file_is_called_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert load_cluster("tiny") == load_cluster(preset_path("tiny"))
    (tmp_path / "tiny").write_text(LAB_TOML)
    assert load_cluster(Path("tiny")) == LAB
    with pytest.raises(BadInput) as caught:
        load_cluster("lab.toml")
    assert "cluster file 'lab.toml'" in caught.value.got
