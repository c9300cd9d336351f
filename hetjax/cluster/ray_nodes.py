# SPDX-License-Identifier: Apache-2.0
"""Turns Ray's nodes into a cluster, and assigns them to a cluster's nodes.

Owns the reading of Ray's descriptions of its nodes: kinds and numbers of accelerators
on machines that were not probed, and the custom resource `hetjax_node_NAME`. This says
that a machine is the cluster file's node NAME, or one of its hosts, in the order of
their addresses. Imports no Ray: its descriptions are arguments. Does not own which
machine is which node (`machines.py`), nor starting anything there
(`hetjax/launchers/on_ray.py`).
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hetjax.cluster.catalogue import canonical_name, catalogue
from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node
from hetjax.cluster.local_devices import LocalDevice
from hetjax.cluster.machines import (
    Machine,
    cluster_of_machines,
    matched,
    parts_by_kind,
)
from hetjax.errors import BadInput
from hetjax.names import RULE, is_node

_FIGURES = (*DEVICE_FIGURES, "precision")
NAMED = "hetjax_node_"  # of a custom resource
_TYPE = "accelerator_type:"
# Ray's names with a clear meaning; others are looked up as they are
_KINDS = {
    "A100-40G": "A100-SXM4-40GB",
    "A100-80G": "A100-SXM4-80GB",
    "A100": "A100-SXM4-40GB",  # Ray has another name for the larger ones
    "H100": "H100-80GB-HBM3",
    "V100": "V100-SXM2-16GB",  # the smaller of two with the same name in Ray
    "P100": "P100-SXM2-16GB",
    "TPU-V4": "TPU-v4",
    "TPU-V5P": "TPU-v5p",
    "TPU-V5LITEPOD": "TPU-v5e",
    "TPU-V6E": "TPU-v6e",
}


def has_gpus(node: Mapping[str, Any]) -> bool:
    """Return whether a machine of `ray.nodes()` is alive and offers GPUs to Ray."""
    return node["Alive"] and node["Resources"].get("GPU", 0) >= 1


def ray_nodes(
    nodes: Sequence[Mapping[str, Any]],
    seen: Mapping[str, Sequence[LocalDevice]] = MappingProxyType({}),
) -> list[Machine]:
    """Read the result of `ray.nodes()`: the machines that are alive, by address.

    Ray lists them in any order, so those of one address are sorted, too.

    Devices `seen` on a machine, by its id, take precedence over Ray's description,
    which names only the first card, and has one name for 40 and 80 GB of memory.
    """
    found = []
    for raw in nodes:
        if raw["Alive"]:
            node = _node(raw)
            found += parts_by_kind(node, seen.get(node.id, ()))
    return sorted(found, key=lambda node: (node.address, node.named, node.id))


def cluster_of_ray(
    nodes: Sequence[Machine], names: Mapping[str, str] = MappingProxyType({})
) -> Cluster:
    """Return the cluster of Ray's machines; those without accelerators count only if
    there are no others.

    `names` maps a machine's `part` to the node name that it keeps. Raises BadInput if
    there are no machines.
    """
    if not nodes:
        raise BadInput(
            got="a Ray cluster without live nodes",
            allowed="1 node or more",
            fix="start one with: ray start --head",
        )
    return cluster_of_machines("ray", nodes, names)


def with_known_figures(found: Cluster, before: Cluster) -> Cluster:
    """Return `found` with only the nodes whose device figures are known.

    A kind that the catalogue lacks keeps its figures from `before`. Nodes of a kind
    without a measurement are left out, with a warning.
    """
    measured = {canonical_name(node.device): node for node in before.nodes}
    nodes = []
    for node in found.nodes:
        kind = canonical_name(node.device)
        if kind in catalogue():
            nodes.append(node)
        elif kind in measured:
            figures = {key: getattr(measured[kind], key) for key in _FIGURES}
            nodes.append(replace(node, **figures))
        else:
            warnings.warn(
                f"{node.name}: {node.device} is not in the device catalogue, and was "
                "not measured, since it was absent when the run started: it is left "
                "out until the next start",
                stacklevel=2,
            )
    return replace(found, nodes=tuple(nodes))


def on_ray_nodes(
    cluster: Cluster, nodes: Sequence[Machine], simulate: bool
) -> dict[str, Machine]:
    """Assign each host a machine with `matched`. Raises BadInput if one gets none."""
    found = matched(cluster, nodes, simulate)
    for node in cluster.nodes:
        if node.workers[0] not in found:
            raise _no_machine(node, nodes)
    return found


def _no_machine(node: Node, nodes: Sequence[Machine]) -> BadInput:
    there = ", ".join(f"{m.count} x {m.device} ({m.address})" for m in nodes)
    each = f" on {node.hosts} machines" if node.hosts > 1 else ""
    return BadInput(
        got=f"node {node.name!r} wants {node.count} x {node.device}{each}; Ray has "
        f"{there or 'no machines'}",
        allowed="one machine in Ray's cluster for every node, or for every host of a "
        "node with several",
        fix=f"""start one there with: ray start --address=... --resources='{{"""
        f""""{NAMED}{node.name}": 1}}', or give another --cluster""",
    )


def _node(raw: Mapping[str, Any]) -> Machine:
    resources = raw["Resources"]
    types = [key.removeprefix(_TYPE) for key in resources if key.startswith(_TYPE)]
    number = int(resources.get("GPU", 0) or resources.get("TPU", 0))
    kind = types[0] if types else "cpu"
    device = canonical_name(_KINDS.get(kind, kind))
    return Machine(
        id=raw["NodeID"],
        address=raw["NodeManagerAddress"],
        port=raw["NodeManagerPort"],
        device=device if number else "cpu",
        count=number or 1,
        named=_named(raw["NodeManagerAddress"], resources),
    )


def _named(address: str, resources: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes that a machine says it is. Bad names cause only a warning: the
    machine must not end a run that it joins."""
    said = sorted(k.removeprefix(NAMED) for k in resources if k.startswith(NAMED))
    for name in said:
        if not is_node(name):
            warnings.warn(
                f"Ray's machine {address} claims to be node {name[:80]!r}, which is "
                f"ignored: a node name is {RULE}",
                stacklevel=2,
            )
    return tuple(filter(is_node, said))
