# SPDX-License-Identifier: Apache-2.0
"""Output of a real `scontrol` about a job, as machines."""

from pathlib import Path

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.local_devices import LocalDevice
from hetjax.cluster.machines import cluster_of_machines, matched
from hetjax.cluster.slurm_nodes import (
    SlurmNode,
    addresses_of_nodes,
    gpus_of,
    job_parts,
    kind_of_gres,
    machines_of,
)

RECORDED = Path(__file__).parents[1] / "launchers" / "recorded"
JOB = (RECORDED / "scontrol-show-job").read_text()
NODE = (RECORDED / "scontrol-show-node").read_text()


def card(kind: str, handle: str) -> LocalDevice:
    return LocalDevice(platform="cuda", device_kind=kind, handle=handle, memory_bytes=0)


def test_each_component_of_a_job_has_its_nodes_and_what_it_holds_of_them():
    told = [(p.job, p.component, p.nodes, p.gres) for p in job_parts(JOB)]
    assert told == [
        ("1", 0, "small", (("small", ""),)),
        ("2", 1, "fast", (("fast", "gpu:a100:2(IDX:0-1)"),)),
        ("3", 2, "old", (("old", "gpu:t4:1(IDX:0)"),)),
    ]


def test_a_job_without_components_is_one_part_and_one_that_waits_is_none():
    (part,) = job_parts("JobId=7 JobState=RUNNING ReqNodeList=(null) NodeList=a[1-2] ")
    assert (part.component, part.nodes, part.gres) == (None, "a[1-2]", ())
    assert not job_parts("JobId=7 JobState=PENDING ReqNodeList=a NodeList=(null) ")
    assert not job_parts("JobId=7 JobState=PENDING ReqNodeList=a NodeList= ")


@pytest.mark.parametrize(
    ("state", "is_up"),
    [
        ("IDLE", True),
        ("MIXED+DRAIN", True),  # running jobs stay
        ("ALLOCATED", True),
        ("DOWN", False),
        ("DOWN*", False),
        ("MIXED*", False),  # it does not answer
        ("IDLE+NOT_RESPONDING", False),
        ("DOWN+DRAIN", False),
    ],
)
def test_a_node_counts_unless_it_is_down_or_silent(state: str, is_up: bool):
    told = NODE.replace("State=MIXED", f"State={state}", 1)
    expected = {"fast", "old"} | ({"small"} if is_up else set())
    assert addresses_of_nodes(told).keys() == expected
    assert {*addresses_of_nodes(told).values()} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("", ()),
        ("gpu:2(IDX:0-1)", (("", 2),)),
        ("gpu:4090:2(IDX:0,3)", (("4090", 2),)),  # a type of digits
        ("gpu:a100:2(IDX:0-1),gpu:t4:1(IDX:2)", (("a100", 2), ("t4", 1))),
        ("shard:a100:8(0/8),gpu:a100:1(IDX:0)", (("a100", 1),)),
    ],
)
def test_types_and_numbers_of_gpus(gres: str, gpus: tuple[tuple[str, int], ...]):
    assert gpus_of(gres) == gpus


def test_of_cards_that_a_word_may_mean_the_one_with_least_memory_is_taken():
    assert kind_of_gres("a100") == "A100-SXM4-40GB"
    assert kind_of_gres("a100_80gb_pcie") == "A100-80GB-PCIe"


def test_what_is_seen_on_a_node_is_believed_before_what_slurm_calls_it():
    nodes = [
        SlurmNode(name="a", component=0, address="10.0.0.1", gpus=(("a100", 2),)),
        SlurmNode(name="b", component=1, address="10.0.0.2", gpus=(("", 2),)),
    ]
    named = machines_of(nodes)
    assert [(m.id, m.device, m.count) for m in named] == [
        ("a", "A100-SXM4-40GB", 2),
        ("b", "GPU", 2),
    ]
    seen = {
        "a": [card("NVIDIA A100-SXM4-80GB", "x"), card("NVIDIA A100-SXM4-80GB", "y")],
        "b": [card("NVIDIA L4", "l"), card("Tesla T4", "t")],
    }
    found = machines_of(nodes, seen)
    assert [(m.id, m.device, m.count) for m in found] == [
        ("a", "A100-SXM4-80GB", 2),
        ("b", "L4", 1),
        ("b", "T4", 1),
    ]
    assert [device.handle for m in found for device in m.own] == ["l", "t"]
    cluster = cluster_of_machines("slurm", found)
    assert [node.name for node in cluster.nodes] == ["a", "b", "t4-0"]
    assert {w: m.part for w, m in matched(cluster, found, False).items()} == {
        "a": "a",
        "b": "b/L4",
        "t4-0": "b/T4",
    }


def test_unlike_cards_that_nobody_has_looked_at_are_machines_of_their_own():
    node = SlurmNode(name="a", component=None, address="a", gpus=(("l4", 1), ("t4", 2)))
    cluster = Cluster(
        name="file",
        nodes=(
            Node(name="old", device="T4", count=2),
            Node(name="new", device="L4", count=1),
        ),
    )
    found = matched(cluster, machines_of([node]), simulate=False)
    assert {worker: m.id for worker, m in found.items()} == {
        "old": "a/t4",
        "new": "a/l4",
    }
