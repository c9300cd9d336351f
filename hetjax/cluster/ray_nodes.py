# SPDX-License-Identifier: Apache-2.0
"""Ray's nodes to a cluster, and a cluster's nodes to Ray's.

Owns how what Ray tells of its nodes is read: kinds and numbers of accelerators, and the
custom resource `hetjax_node_NAME`, which says that a machine is a cluster file's node
NAME, or one of its hosts; their order is that of their addresses. Imports no Ray: its
nodes come in as it describes them. Does not own starting anything there
(`hetjax/training/on_ray.py`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput

NAMED = "hetjax_node_"  # of a custom resource
_TYPE = "accelerator_type:"
# Ray's names that leave no doubt; others are looked up as they are
_KINDS = {
    "A100-40G": "A100-SXM4-40GB",
    "A100-80G": "A100-SXM4-80GB",
    "A100": "A100-SXM4-40GB",  # Ray tells the larger ones apart
    "H100": "H100-80GB-HBM3",
    "V100": "V100-SXM2-16GB",  # the smaller of two that Ray does not tell apart
    "P100": "P100-SXM2-16GB",
    "TPU-V4": "TPU-v4",
    "TPU-V5P": "TPU-v5p",
    "TPU-V5LITEPOD": "TPU-v5e",
    "TPU-V6E": "TPU-v6e",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNode:
    """One machine of a Ray cluster; `count` accelerators of kind `device`.

    A machine without any counts as one device of kind cpu. `named` are the cluster
    file's nodes that it says it is.
    """

    id: str
    address: str
    device: str
    count: int
    named: tuple[str, ...] = ()


def ray_nodes(told: Sequence[Mapping[str, Any]]) -> list[RayNode]:
    """Read what `ray.nodes()` gives, of machines that are alive, by address."""
    found = [_node(raw) for raw in told if raw["Alive"]]
    return sorted(found, key=lambda node: node.address)


def cluster_of_ray(nodes: Sequence[RayNode]) -> Cluster:
    """Return the cluster that Ray's machines make; of those without accelerators only
    if there are no others.

    BadInput if there are none.
    """
    if not nodes:
        raise BadInput(
            got="a Ray cluster without nodes that are alive",
            allowed="1 node or more",
            fix="start one with: ray start --head",
        )
    accelerated = [node for node in nodes if node.device != "cpu"]
    chosen, names = accelerated or list(nodes), dict[str, int]()
    found = []
    for node in chosen:
        kind = re.sub(r"[^a-z0-9]+", "-", node.device.lower()).strip("-")
        number = names[kind] = names.get(kind, -1) + 1
        name = node.named[0] if node.named else f"{kind}-{number}"
        found.append(Node(name=name, device=node.device, count=node.count))
    return Cluster(name="ray", nodes=tuple(found))


def on_ray_nodes(
    cluster: Cluster, nodes: Sequence[RayNode], simulate: bool
) -> dict[str, RayNode]:
    """Give every host a machine, by worker: its node's namesake, else one of its kind.

    With `simulate` any machine will do, several hosts on one where there are too few.
    BadInput if there is none for a host.
    """
    found = {node.name: _namesakes(node, nodes) for node in cluster.nodes}
    taken = {id(machine) for machines in found.values() for machine in machines}
    free = [machine for machine in nodes if id(machine) not in taken]
    for node in cluster.nodes:
        while len(found[node.name]) < node.hosts:
            fitting = [m for m in free if simulate or _fits(node, m)]
            if not fitting and simulate:
                free = fitting = list(nodes)
            if not fitting:
                raise _no_machine(node, nodes)
            machine = min(fitting, key=lambda m: m.count)
            found[node.name].append(machine)
            free = [other for other in free if other is not machine]
    return {
        worker: machine
        for node in cluster.nodes
        for worker, machine in zip(
            node.workers, _in_order(found[node.name]), strict=True
        )
    }


def _namesakes(node: Node, nodes: Sequence[RayNode]) -> list[RayNode]:
    """As many as it has hosts; the last to say so count."""
    return [machine for machine in nodes if node.name in machine.named][-node.hosts :]


def _in_order(machines: Sequence[RayNode]) -> list[RayNode]:
    return sorted(machines, key=lambda machine: machine.address)


def _fits(node: Node, machine: RayNode) -> bool:
    same = canonical_name(node.device) == machine.device
    enough = node.devices_per_host <= machine.count
    return same and (machine.device == "cpu" or enough)


def _no_machine(node: Node, nodes: Sequence[RayNode]) -> BadInput:
    there = ", ".join(f"{m.count} x {m.device} ({m.address})" for m in nodes)
    each = f" on {node.hosts} machines" if node.hosts > 1 else ""
    return BadInput(
        got=f"node {node.name!r} wants {node.count} x {node.device}{each}; Ray has "
        f"{there or 'no machines'}",
        allowed="a machine of its own in Ray's cluster for every node, or for every "
        "host of it",
        fix=f"""start one there with: ray start --address=... --resources='{{"""
        f""""{NAMED}{node.name}": 1}}', or give another --cluster""",
    )


def _node(raw: Mapping[str, Any]) -> RayNode:
    resources = raw["Resources"]
    types = [key.removeprefix(_TYPE) for key in resources if key.startswith(_TYPE)]
    count = int(resources.get("GPU", 0) or resources.get("TPU", 0))
    kind = types[0] if types else "cpu"
    device = canonical_name(_KINDS.get(kind, kind))
    return RayNode(
        id=raw["NodeID"],
        address=raw["NodeManagerAddress"],
        device=device if count else "cpu",
        count=count or 1,
        named=tuple(
            sorted(k.removeprefix(NAMED) for k in resources if k.startswith(NAMED))
        ),
    )
