# SPDX-License-Identifier: Apache-2.0
"""Which devices are present, and which node takes which device."""

from typing import NamedTuple

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.discovery import assign_devices, device_name, discover
from hetjax.errors import BadInput


class Fake(NamedTuple):
    """The two attributes of a `jax.Device` that are read, and a number."""

    platform: str
    device_kind: str
    id: int = 0


CPU = Fake("cpu", "cpu")
A100 = Fake("gpu", "NVIDIA A100-SXM4-80GB")
H20 = Fake("gpu", "NVIDIA H20")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (CPU, "cpu"),
        (Fake("cpu", "Some Processor"), "cpu"),
        (A100, "A100-SXM4-80GB"),
        (H20, "H20"),
        (Fake("gpu", "NVIDIA H100 80GB HBM3"), "H100-80GB-HBM3"),
        (Fake("gpu", "AMD Instinct MI300X"), "Instinct-MI300X"),
        (Fake("tpu", "TPU v4"), "TPU-v4"),
    ],
)
def test_a_device_has_the_catalogue_spelling_of_its_kind(device, name):
    assert device_name(device) == name


def test_discovery_gives_one_node_per_kind_in_order_of_appearance():
    assert discover([A100, CPU, A100, H20, CPU, CPU]) == Cluster(
        name="local",
        nodes=(
            Node(name="nvidia-a100-sxm4-80gb-0", device="A100-SXM4-80GB", count=2),
            Node(name="cpu-0", device="cpu", count=3),
            Node(name="nvidia-h20-0", device="H20", count=1),
        ),
    )


@given(st.lists(st.text(max_size=200).map("?{}".format), min_size=1, max_size=4))
def test_whatever_devices_are_called_discovery_makes_a_cluster(kinds: list[str]):
    assert discover([Fake("gpu", kind) for kind in kinds]).num_devices == len(kinds)


def test_discovery_reads_real_jax_devices():
    devices = jax.devices("cpu")
    node = Node(name="cpu-0", device="cpu", count=len(devices))
    assert discover(devices).nodes == (node,)
    assert assign_devices(discover(devices), devices, simulate=False) == {
        "cpu-0": tuple(devices)
    }


def test_no_devices_are_bad_input():
    with pytest.raises(BadInput) as caught:
        discover([])
    assert caught.value.got == "0 local devices"
    assert caught.value.allowed == "1 device or more"
    assert "--simulate" in caught.value.fix


def cluster_of(*nodes: tuple[str, str, int]) -> Cluster:
    made = tuple(Node(name=name, device=dev, count=n) for name, dev, n in nodes)
    return Cluster(name="test", nodes=made)


def test_nodes_take_devices_of_their_kind_in_file_order():
    devices = [kind._replace(id=i) for i, kind in enumerate([A100, H20, CPU] * 3)]
    cluster = cluster_of(("x", "H20", 2), ("y", "A100-SXM4-80GB", 1), ("z", "H20", 1))
    assigned = assign_devices(cluster, devices, simulate=False)
    taken = {name: [d.id for d in chosen] for name, chosen in assigned.items()}
    assert taken == {"x": [1, 4], "y": [0], "z": [7]}


def test_simulated_nodes_take_cpu_devices_in_file_order():
    devices = [A100, *(CPU._replace(id=i) for i in range(4))]
    cluster = cluster_of(("x", "H20", 2), ("y", "A100-SXM4-80GB", 1))
    assigned = assign_devices(cluster, devices, simulate=True)
    assert {n: [d.id for d in chosen] for n, chosen in assigned.items()} == {
        "x": [0, 1],
        "y": [2],
    }


@given(
    kinds=st.lists(st.sampled_from([CPU, A100, H20]), min_size=1, max_size=12),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_simulation_works_exactly_if_there_are_enough_cpu_devices(kinds, counts):
    devices = [kind._replace(id=i) for i, kind in enumerate(kinds)]
    cluster = cluster_of(*((f"n{i}", "H20", count) for i, count in enumerate(counts)))
    if sum(counts) <= kinds.count(CPU):
        assigned = assign_devices(cluster, devices, simulate=True)
        flat = [device for chosen in assigned.values() for device in chosen]
        assert flat == [d for d in devices if d.platform == "cpu"][: sum(counts)]
        assert [len(chosen) for chosen in assigned.values()] == counts
    else:
        with pytest.raises(BadInput, match="JAX_NUM_CPU_DEVICES"):
            assign_devices(cluster, devices, simulate=True)


def test_too_few_devices_say_what_is_wanted_what_is_there_and_what_to_type():
    cluster = cluster_of(("x", "H20", 2), ("y", "H20", 3))
    with pytest.raises(BadInput) as caught:
        assign_devices(cluster, [H20, H20, CPU, A100], simulate=False)
    assert caught.value.got == (
        "node 'y' wants 3 x H20; the cluster wants 5 in all; "
        "here: 2 x H20, 1 x cpu, 1 x A100-SXM4-80GB"
    )
    assert caught.value.allowed == "at most 2 x H20 in the cluster's nodes together"
    assert caught.value.fix == (
        "add --simulate to let CPU devices stand in, or give another --cluster"
    )


def test_too_few_simulated_devices_say_how_to_get_more():
    with pytest.raises(BadInput) as caught:
        assign_devices(cluster_of(("x", "H20", 6)), [CPU] * 4, simulate=True)
    assert caught.value.got == (
        "node 'x' wants 6 x cpu; the cluster wants 6 in all; here: 4 x cpu"
    )
    assert caught.value.fix == (
        "set JAX_NUM_CPU_DEVICES=6 before the start, or give another --cluster"
    )
