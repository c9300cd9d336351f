# SPDX-License-Identifier: Apache-2.0
"""Of the driver's cards, those that CUDA shows to a process."""

from dataclasses import dataclass, replace

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.local_devices import (
    LocalDevice,
    as_reported,
    cluster_of_devices,
    devices_json,
    nvidia_devices,
    read_devices,
)


@dataclass(frozen=True)
class Told:
    """A card as the driver describes it."""

    uuid: str
    name: str
    memory_gib: float
    is_cut: bool = False


UNLIKE = (
    Told("GPU-3090", "NVIDIA GeForce RTX 3090", 24576 / 1024),
    Told("GPU-4090", "NVIDIA GeForce RTX 4090", 24564 / 1024),
)
ALIKE = tuple(Told(f"GPU-{name}", "NVIDIA A100-SXM4-80GB", 80.0) for name in "abc")
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("told", "environment", "handles"),
    [
        (UNLIKE, {}, ["GPU-3090", "GPU-4090"]),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "GPU-4"}, ["GPU-4090"]),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": ""}, []),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "-1"}, []),
        # CUDA's first card is the fastest, the driver's is the first on the bus
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "1"}, None),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "1", **BY_BUS}, ["GPU-4090"]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        # CUDA reads up to the first missing card
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1,7,2"}, ["1"]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-"}, []),
        ((replace(ALIKE[0], is_cut=True), *ALIKE[1:]), {}, None),
    ],
)
def test_cards_are_those_that_cuda_would_show(
    told: tuple[Told, ...], environment: dict[str, str], handles: list[str] | None
):
    found = nvidia_devices(told, environment)
    assert (found and [device.handle for device in found]) == (handles or found)
    assert (found is None) == (handles is None)


def test_unlike_cards_are_two_nodes_and_a_card_of_other_memory_says_so():
    found = nvidia_devices((UNLIKE[0], replace(UNLIKE[1], memory_gib=49140 / 1024)), {})
    assert found is not None
    assert [
        (n.device, n.count, n.memory_gib) for n in cluster_of_devices(found).nodes
    ] == [
        ("GeForce-RTX-3090", 1, None),
        ("GeForce-RTX-4090", 1, 47.99),
    ]


def test_devices_are_the_same_when_they_come_from_another_process():
    here = [
        LocalDevice(platform="tpu", device_kind="TPU v4", handle="0", memory_bytes=1)
    ]
    assert read_devices(devices_json(here)) == here


def test_of_the_drivers_cards_of_one_name_the_least_memory_counts():
    """For discovered nodes, and for nodes of a file without a memory size."""
    kind = "NVIDIA GeForce RTX 4060 Ti"
    here = [
        LocalDevice(
            platform="cuda", device_kind=kind, handle=str(gib), memory_bytes=gib << 30
        )
        for gib in (16, 6, 0)  # the last is unknown
    ]
    with pytest.warns(UserWarning, match="have 6 and 16 GiB: 6 is assumed for each"):
        found = cluster_of_devices(here)
    assert [(n.count, n.memory_gib) for n in found.nodes] == [(3, 6.0)]
    node = Node(name="box", device="GeForce-RTX-4060-Ti", count=3)
    cluster = Cluster(name="c", nodes=(node, replace(node, name="b", device="L4")))
    with pytest.warns(UserWarning, match="'box'"):
        told = as_reported(cluster, here)
    assert [node.memory_gib for node in told.nodes] == [6.0, None]
    more = replace(cluster, nodes=(replace(node, memory_gib=8.0),))
    with pytest.warns(UserWarning, match="'box'") as warned:
        assert as_reported(more, here) == more
    assert "memory_gib = 8, but" in str(warned[1].message)
