# SPDX-License-Identifier: Apache-2.0
"""The picture of a layout has the whole plan; large ones are folded."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput
from hetjax.planner.model.seating import idle_devices
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.report.layout_rows import alike_replicas, spelled
from hetjax.report.pictures.layout import layout_picture

SVG = "{http://www.w3.org/2000/svg}"


def stage(node: str, devices: tuple[int, ...], layers: tuple[int, int], tensor: int):
    mesh = StageMesh(data=len(devices) // tensor, tensor=tensor)
    return Stage(node=node, devices=devices, mesh=mesh, layers=layers, launch_ahead=1)


def replica(number: int, *stages: Stage) -> Replica:
    return Replica(num_microbatches=number, microbatch_size=2, stages=stages)


def plan(*replicas: Replica) -> Plan:
    batch = sum(r.num_microbatches * r.microbatch_size for r in replicas)
    return Plan(model="m", seq_len=1, global_batch=batch, replicas=replicas)


CLUSTER = Cluster(
    name="c",
    nodes=(
        Node(name="a-0", device="A100-SXM4-80GB", count=4, zone="east"),
        Node(name="v-0", device="V100-SXM2-32GB", count=4, spot=True),
    ),
)
PLAN = plan(
    replica(6, stage("a-0", (0, 1), (0, 3), 2), stage("a-0", (2, 3), (3, 8), 1)),
    replica(5, stage("v-0", (0,), (0, 8), 1)),
)


def many_nodes() -> tuple[Plan, Cluster]:
    """Return 18 nodes of 4 devices: 12 hold two replicas, 5 half of one, 1 none."""
    nodes = tuple(Node(name=f"a-{i}", device="H20", count=4) for i in range(18))
    small = [
        replica(3, stage(f"a-{i}", devices, (0, 8), 2))
        for i in range(12)
        for devices in ((0, 1), (2, 3))
    ]
    large = [replica(4, stage(f"a-{i}", (0, 1), (0, 8), 1)) for i in range(12, 17)]
    return plan(*small, *large), Cluster(name="c", nodes=nodes)


def texts(path: Path, plan: Plan, cluster: Cluster) -> list[str]:
    layout_picture(plan, cluster, "a title").save(path)
    return [
        "".join(element.itertext()).strip()
        for element in ElementTree.parse(path).iter(f"{SVG}text")
    ]


@pytest.mark.parametrize(
    ("suffix", "start"),
    [(".png", b"\x89PNG\r\n\x1a\n"), (".pdf", b"%PDF-"), (".svg", b"<?xml")],
)
def test_the_suffix_decides_the_kind_of_file(tmp_path: Path, suffix: str, start: bytes):
    path = tmp_path / f"layout{suffix}"
    layout_picture(PLAN, CLUSTER, "a title").save(path)
    assert path.read_bytes().startswith(start)


def test_the_wrong_suffix_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match=r"ends in \.pdf, \.png, \.svg"):
        layout_picture(PLAN, CLUSTER, "a title").save(tmp_path / "layout.jpg")


def test_the_picture_names_nodes_stages_layers_and_what_is_idle(tmp_path: Path):
    found = texts(tmp_path / "layout.svg", PLAN, CLUSTER)
    assert {"a title", "a-0", "A100-SXM4-80GB, east", "v-0"} <= set(found)
    assert "V100-SXM2-32GB, spot" in found
    words = " ".join(found)
    for told in ("r0.s0: 6 x 2", "layers 0..2", "tensor 2", "layers 3..7", "data 2"):
        assert told in words, words
    assert {"r0: 6 x 2 sequences", "r1: 5 x 2 sequences"} <= set(found)
    assert found.count("idle") == 2  # three devices in a row, and the legend


def test_a_device_that_does_its_layers_in_parts_names_all_of_them(tmp_path: Path):
    parts = [("a-0", (0, 2)), ("v-0", (2, 3)), ("a-0", (3, 7)), ("v-0", (7, 8))]
    stages = [stage(node, (0,), layers, 2) for node, layers in parts]
    shared = replace(plan(replica(4, *stages)), schedule="interleaved")
    words = " ".join(texts(tmp_path / "layout.svg", shared, CLUSTER))
    for told in ("r0.s0, s2", "layers 0..1, 3..6", "r0.s1, s3", "layers 2, 7"):
        assert told in words, words


def test_a_plan_that_uses_everything_has_no_idle_devices(tmp_path: Path):
    full = plan(PLAN.replicas[0], replica(5, stage("v-0", (0, 1, 2, 3), (0, 8), 4)))
    assert "idle" not in texts(tmp_path / "layout.svg", full, CLUSTER)


def test_replicas_have_colours_of_their_own(tmp_path: Path):
    layout_picture(PLAN, CLUSTER, "a title").save(tmp_path / "layout.svg")
    fills = re.findall(r"fill: (#\w{6})", (tmp_path / "layout.svg").read_text())
    coloured = [f for f in fills if len({f[1:3], f[3:5], f[5:7]}) > 1]
    assert len(set(coloured)) == 2
    # two boxes and a legend entry for the first, one and one for the second
    assert sorted(coloured.count(f) for f in set(coloured)) == [2, 3]


def test_large_clusters_are_told_by_what_repeats(tmp_path: Path):
    found = texts(tmp_path / "layout.svg", *many_nodes())
    names = [text for text in found if text.startswith("a-")]
    assert names == ["a-0 and 11 more", "a-12 and 4 more", "a-17"]
    assert "r0 and 23 like it: 3 x 2 sequences each" in found
    assert "r24 and 4 like it: 4 x 2 sequences each" in found
    assert sum("r0.s0" in text for text in found) == 2
    assert sum("r24.s0" in text for text in found) == 1


def test_alike_replicas_differ_in_their_places_only():
    other = replace(PLAN.replicas[1], num_microbatches=4)
    moved = replica(5, stage("v-0", (3,), (0, 8), 1))
    elsewhere = replica(5, stage("a-0", (0,), (0, 8), 1))
    of_four = plan(PLAN.replicas[1], moved, other, elsewhere)
    assert alike_replicas(of_four, CLUSTER) == ((0, 1), (2,), (3,))


def test_idle_devices_are_those_of_no_stage():
    assert idle_devices(PLAN, CLUSTER) == {"v-0": (1, 2, 3)}


@given(st.sets(st.integers(0, 40)))
def test_spelled_numbers_read_back(numbers: set[int]):
    read = set()
    for part in filter(None, spelled(tuple(sorted(numbers))).split(",")):
        first, _, last = part.partition("..")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == numbers
