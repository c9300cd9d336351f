# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi prints, as the cards that CUDA shows to a process."""

import pytest

from hetjax.cluster.local_devices import (
    LocalDevice,
    cluster_of_devices,
    devices_json,
    nvidia_devices,
    read_devices,
)

UNLIKE = """\
GPU-3090, NVIDIA GeForce RTX 3090, 24576, [N/A]
GPU-4090, NVIDIA GeForce RTX 4090, 24564, [N/A]
"""
ALIKE = """\
GPU-a, NVIDIA A100-SXM4-80GB, 81920, Disabled
GPU-b, NVIDIA A100-SXM4-80GB, 81920, Disabled
GPU-c, NVIDIA A100-SXM4-80GB, 81920, Disabled
"""
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("printed", "environment", "handles"),
    [
        (UNLIKE, {}, ["GPU-3090", "GPU-4090"]),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "GPU-4"}, ["GPU-4090"]),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": ""}, []),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "-1"}, []),
        # CUDA's first card is the faster one, the driver's the one on the first bus
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "1"}, None),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "1", **BY_BUS}, ["GPU-4090"]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        # CUDA reads up to the first that is not there
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1,7,2"}, ["1"]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-"}, []),
        (ALIKE.replace("Disabled", "Enabled", 1), {}, None),
    ],
)
def test_cards_are_those_that_cuda_would_show(
    printed: str, environment: dict[str, str], handles: list[str] | None
):
    found = nvidia_devices(printed, environment)
    assert (found and [device.handle for device in found]) == (handles or found)
    assert (found is None) == (handles is None)


def test_unlike_cards_are_two_nodes_and_a_card_of_other_memory_says_so():
    found = nvidia_devices(UNLIKE.replace("24564", "49140"), {})
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
