# SPDX-License-Identifier: Apache-2.0
"""What Ray reports of its nodes, as a cluster, and which Ray node is which node."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node
from hetjax.cluster.cluster_files import load_cluster
from hetjax.cluster.local_devices import LocalDevice
from hetjax.cluster.machines import Machine, matched
from hetjax.cluster.ray_nodes import (
    cluster_of_ray,
    on_ray_nodes,
    ray_nodes,
    with_known_figures,
)
from hetjax.errors import BadInput


def told(number: int, /, alive: bool = True, **resources: Any) -> dict[str, Any]:
    """Return a node as Ray 2.60 describes it."""
    address = f"10.0.0.{number}"
    return {
        "NodeID": f"id-{number}",
        "Alive": alive,
        "NodeManagerAddress": address,
        "NodeManagerPort": 40_000,
        "NodeManagerHostname": f"host-{number}",
        "Resources": {"CPU": 8.0, "memory": 1e10, f"node:{address}": 1.0} | resources,
    }


def addresses(found: Mapping[str, Machine]) -> dict[str, str]:
    return {worker: machine.address for worker, machine in found.items()}


A100: dict[str, Any] = {"GPU": 4.0, "accelerator_type:A100-80G": 1.0}
V100: dict[str, Any] = {"GPU": 2.0, "accelerator_type:V100": 1.0}


def test_unlike_machines_make_a_cluster_and_those_without_accelerators_are_left_out():
    raw = [told(3, **V100), told(1, **A100), told(2, **A100), told(4), told(5, False)]
    found = cluster_of_ray(ray_nodes(raw))
    assert [(n.name, n.device, n.count) for n in found.nodes] == [
        ("a100-sxm4-80gb-0", "A100-SXM4-80GB", 4),
        ("a100-sxm4-80gb-1", "A100-SXM4-80GB", 4),
        ("v100-sxm2-16gb-0", "V100-SXM2-16GB", 2),
    ]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_machines_of_one_address_are_one_cluster_in_whatever_order_ray_tells_of_them(
    order: tuple[int, ...],
):
    names: list[dict[str, Any]] = [{}, {"hetjax_node_a": 1.0}, {"hetjax_node_b": 1.0}]
    alike = {"NodeManagerAddress": "10.0.0.1"}
    raw = [told(number, **resources) | alike for number, resources in enumerate(names)]
    found = cluster_of_ray(ray_nodes([raw[number] for number in order]))
    assert [node.name for node in found.nodes] == ["cpu-0", "a", "b"]


def test_machines_without_accelerators_count_where_there_are_no_others():
    raw = [told(1, hetjax_node_left=1.0), told(2)]
    found = cluster_of_ray(ray_nodes(raw))
    assert [(n.name, n.device, n.count) for n in found.nodes] == [
        ("left", "cpu", 1),
        ("cpu-0", "cpu", 1),
    ]


def test_a_machine_with_a_name_that_leads_elsewhere_goes_by_its_kind():
    raw = [told(1, True, **{"hetjax_node_..": 1.0}), told(2, hetjax_node_right=1.0)]
    with pytest.warns(UserWarning, match="10.0.0.1 claims to be node '..'"):
        found = ray_nodes(raw)
    assert [n.name for n in cluster_of_ray(found).nodes] == ["cpu-0", "right"]


def test_a_node_goes_to_its_namesake_else_to_the_smallest_of_its_kind():
    cluster = Cluster(
        name="lab",
        nodes=(
            Node(name="old", device="V100-SXM2-16GB", count=1),
            Node(name="big", device="A100-SXM4-80GB", count=2),
            Node(name="small", device="A100-SXM4-80GB", count=2),
        ),
    )
    raw = [told(1, **A100), told(2, **A100, hetjax_node_small=1.0), told(3, **V100)]
    found = on_ray_nodes(cluster, ray_nodes(raw), simulate=False)
    assert addresses(found) == {
        "old": "10.0.0.3",
        "big": "10.0.0.1",
        "small": "10.0.0.2",
    }


def test_simulated_nodes_share_machines_where_there_are_too_few():
    nodes = tuple(Node(name=f"n{i}", device="H20", count=8) for i in range(3))
    cluster = Cluster(name="lab", nodes=nodes)
    found = on_ray_nodes(cluster, ray_nodes([told(1), told(2)]), simulate=True)
    assert sorted(node.address for node in found.values()) == [
        "10.0.0.1",
        "10.0.0.1",
        "10.0.0.2",
    ]


def test_a_node_with_several_hosts_gets_as_many_machines_in_order_of_address():
    cluster = Cluster(
        name="lab",
        nodes=(
            Node(name="pair", device="A100-SXM4-80GB", count=8, hosts=2),
            Node(name="named", device="V100-SXM2-16GB", count=4, hosts=2),
        ),
    )
    named: dict[str, Any] = V100 | {"hetjax_node_named": 1.0}
    raw = [told(5, **named), told(3, **A100), told(1, **A100), told(2, **V100)]
    found = on_ray_nodes(cluster, ray_nodes([*raw, told(4, **named)]), simulate=False)
    assert addresses(found) == {
        "pair/0": "10.0.0.1",
        "pair/1": "10.0.0.3",
        "named/0": "10.0.0.4",
        "named/1": "10.0.0.5",
    }


def test_a_host_without_a_machine_is_told_of_with_its_node():
    wanted = Node(name="pair", device="A100-SXM4-80GB", count=8, hosts=2)
    cluster = Cluster(name="lab", nodes=(wanted,))
    with pytest.raises(BadInput, match=r"'pair' wants 8 x A100\S+ on 2 machines"):
        on_ray_nodes(cluster, ray_nodes([told(1, **A100)]), simulate=False)


@pytest.mark.parametrize("count", [5, 4])
def test_a_node_without_a_machine_is_named_with_what_is_there(count: int):
    wanted = Node(name="big", device="A100-SXM4-80GB", count=count)
    taken = Node(name="first", device="A100-SXM4-80GB", count=4)
    cluster = Cluster(name="lab", nodes=(taken, wanted))
    with pytest.raises(BadInput, match=rf"'big' wants {count} x A100.*4 x A100") as bad:
        on_ray_nodes(cluster, ray_nodes([told(1, **A100)]), simulate=False)
    assert "hetjax_node_big" in bad.value.fix


def test_an_empty_ray_cluster_is_refused():
    with pytest.raises(BadInput, match="without live nodes"):
        cluster_of_ray(ray_nodes([told(1, False)]))


def test_machines_keep_their_names_and_new_ones_get_the_next_that_is_free():
    first = ray_nodes([told(2, **A100), told(4, **A100)])
    names = {"id-2": "a100-sxm4-80gb-0", "id-4": "a100-sxm4-80gb-1"}
    assert {n.name for n in cluster_of_ray(first).nodes} == {*names.values()}
    grown = ray_nodes([told(1, **A100), told(2, **A100), told(4, **A100)])
    assert [n.name for n in cluster_of_ray(grown, names).nodes] == [
        "a100-sxm4-80gb-2",
        "a100-sxm4-80gb-0",
        "a100-sxm4-80gb-1",
    ]
    replaced = ray_nodes([told(1, **A100), told(4, **A100)])
    assert [n.name for n in cluster_of_ray(replaced, names).nodes] == [
        "a100-sxm4-80gb-0",
        "a100-sxm4-80gb-1",
    ]


def test_nodes_keep_their_machines_and_one_whose_machine_is_gone_gets_another():
    names = ("x", "y", "z")
    nodes = tuple(Node(name=n, device="V100-SXM2-16GB", count=2) for n in names)
    cluster = Cluster(name="lab", nodes=nodes)
    before = matched(cluster, ray_nodes([told(i, **V100) for i in (1, 2, 3)]), False)
    assert [before[n].address for n in names] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    left = ray_nodes([told(1, False, **V100), told(2, **V100), told(3, **V100)])
    now = matched(cluster, left, False, before)
    assert addresses(now) == {"y": "10.0.0.2", "z": "10.0.0.3"}
    back = matched(cluster, [*left, *ray_nodes([told(9, **V100)])], False, now)
    assert addresses(back) == {
        "x": "10.0.0.9",
        "y": "10.0.0.2",
        "z": "10.0.0.3",
    }


def test_a_node_of_several_hosts_is_there_with_all_of_them_or_not_at_all():
    pair = Node(name="pair", device="V100-SXM2-16GB", count=4, hosts=2)
    cluster = Cluster(name="lab", nodes=(pair,))
    both = ray_nodes([told(1, **V100), told(2, **V100)])
    before = matched(cluster, both, False)
    assert before.keys() == {"pair/0", "pair/1"}
    assert matched(cluster, both[:1], False, before) == {}


def cards(kind: str, gib: int, handles: str) -> list[LocalDevice]:
    return [
        LocalDevice(platform="cuda", device_kind=kind, handle=h, memory_bytes=gib << 30)
        for h in handles.split(",")
    ]


# Ray's type of a machine is that of its first card
MIXED: dict[str, Any] = {"GPU": 3.0, "accelerator_type:GeForce-RTX-3090": 1.0}
IN_MIXED = [
    *cards("NVIDIA GeForce RTX 3090", 24, "GPU-a"),
    *cards("NVIDIA GeForce RTX 4090", 24, "GPU-b,GPU-c"),
]


def test_unlike_cards_of_one_machine_are_two_nodes_which_keep_their_names():
    found = ray_nodes([told(1, **MIXED)], {"id-1": IN_MIXED})
    cluster = cluster_of_ray(found)
    assert [(n.device, n.count) for n in cluster.nodes] == [
        ("GeForce-RTX-3090", 1),
        ("GeForce-RTX-4090", 2),
    ]
    placed = on_ray_nodes(cluster, found, simulate=False)
    held = {worker: [d.handle for d in m.own] for worker, m in placed.items()}
    assert [*held.values()] == [["GPU-a"], ["GPU-b", "GPU-c"]]
    names = {machine.part: name for name, machine in placed.items()}
    assert cluster_of_ray(found, names) == cluster
    assert matched(cluster, found, False, placed) == placed


def test_a_name_given_to_a_machine_with_unlike_cards_means_those_of_its_kind():
    raw = told(1, **MIXED, hetjax_node_new=1.0, hetjax_node_old=1.0)
    found = ray_nodes([raw], {"id-1": IN_MIXED})
    nodes = (
        Node(name="new", device="RTX-4090", count=2),
        Node(name="old", device="RTX-3090", count=1),
    )
    placed = on_ray_nodes(Cluster(name="lab", nodes=nodes), found, simulate=False)
    assert {w: len(m.own) for w, m in placed.items()} == {"new": 2, "old": 1}
    assert {n.name for n in cluster_of_ray(found).nodes} == {"new", "old"}


# Ray's types, which do not state memory
RAYS_LAB: dict[int, dict[str, Any]] = {
    1: {"GPU": 4.0, "accelerator_type:A100": 1.0},
    2: {"GPU": 4.0, "accelerator_type:V100": 1.0},
    3: {"GPU": 4.0, "accelerator_type:V100": 1.0},
    4: {"GPU": 4.0, "accelerator_type:A100": 1.0},
    5: {"GPU": 4.0, "accelerator_type:V100": 1.0},
    6: {"GPU": 8.0, "accelerator_type:H20": 1.0},
    7: {"GPU": 2.0},
}
IN_LAB = {
    "id-1": cards("NVIDIA A100-SXM4-40GB", 40, "a,b,c,d"),
    "id-2": cards("Tesla V100-SXM2-16GB", 16, "a,b,c,d"),
    "id-3": cards("Tesla V100-SXM2-32GB", 32, "a,b,c,d"),
    "id-4": cards("NVIDIA A100-SXM4-80GB", 80, "a,b,c,d"),
    "id-5": cards("Tesla V100-SXM2-32GB", 32, "a,b,c,d"),
    "id-6": cards("NVIDIA H20", 96, "a,b,c,d,e,f,g,h"),
    "id-7": cards("prototype", 24, "a,b"),
}


def test_the_lab_that_is_shipped_is_found_by_what_workers_see_of_their_cards():
    lab, raw = load_cluster("lab"), [told(i, **has) for i, has in RAYS_LAB.items()]
    found = ray_nodes(raw, IN_LAB)
    assert addresses(on_ray_nodes(lab, found, simulate=False)) == {
        "a100-0": "10.0.0.4",
        "v100-0/0": "10.0.0.3",
        "v100-0/1": "10.0.0.5",
        "h20-0": "10.0.0.6",
        "prototype-0": "10.0.0.7",
    }
    own = {node.device: node.memory_gib for node in cluster_of_ray(found).nodes}
    assert {*own} >= {"A100-SXM4-40GB", "A100-SXM4-80GB"}
    assert own["A100-SXM4-40GB"] is own["A100-SXM4-80GB"] is None  # the catalogue's
    with pytest.raises(BadInput, match="'a100-0' wants 4 x A100-SXM4-80GB"):
        on_ray_nodes(lab, ray_nodes(raw), simulate=False)


def test_ray_gives_out_no_more_cards_than_it_was_started_with():
    few: dict[str, Any] = MIXED | {"GPU": 2.0}
    found = cluster_of_ray(ray_nodes([told(1, **few)], {"id-1": IN_MIXED}))
    assert [node.count for node in found.nodes] == [1, 1]


def test_a_kind_that_was_measured_keeps_its_figures_and_an_unmeasured_one_is_left_out():
    own: dict[str, Any] = {key: 10.0 + i for i, key in enumerate(DEVICE_FIGURES)}
    nodes = (Node(name="a", device="RTX-9999", count=2, precision="float16", **own),)
    before = Cluster(name="ray", nodes=nodes)
    now = (
        Node(name="b", device="RTX-9999", count=1),
        Node(name="c", device="T4", count=1),
        Node(name="d", device="RTX-9998", count=1),
    )
    with pytest.warns(UserWarning, match="d: RTX-9998 is not in the device catalogue"):
        found = with_known_figures(Cluster(name="ray", nodes=now), before)
    assert found.nodes == (replace(nodes[0], name="b", count=1), now[1])
