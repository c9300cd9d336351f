# SPDX-License-Identifier: Apache-2.0
"""Ray's nodes to a cluster, and a cluster's nodes to Ray's.

Owns how what Ray tells of its nodes is read: kinds and numbers of accelerators, and the
custom resource `hetjax_node_NAME`, which says that a machine is a cluster file's node
NAME, or one of its hosts; their order is that of their addresses. Imports no Ray: its
nodes come in as it describes them. Does not own starting anything there
(`hetjax/launch/on_ray.py`).
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.discovery import node_stem
from hetjax.errors import BadInput
from hetjax.names import RULE, is_node

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
    file's nodes that it says it is. Ray's process there listens at `port`.
    """

    id: str
    address: str
    port: int
    device: str
    count: int
    named: tuple[str, ...] = ()


def ray_nodes(told: Sequence[Mapping[str, Any]]) -> list[RayNode]:
    """Read what `ray.nodes()` gives, of machines that are alive, by address."""
    found = [_node(raw) for raw in told if raw["Alive"]]
    return sorted(found, key=lambda node: node.address)


def cluster_of_ray(
    nodes: Sequence[RayNode], names: Mapping[str, str] = MappingProxyType({})
) -> Cluster:
    """Return the cluster that Ray's machines make; of those without accelerators only
    if there are no others.

    Machines that have a name stay what they are: `names`, by id. BadInput if there are
    none.
    """
    if not nodes:
        raise BadInput(
            got="a Ray cluster without nodes that are alive",
            allowed="1 node or more",
            fix="start one with: ray start --head",
        )
    accelerated = [node for node in nodes if node.device != "cpu"]
    chosen = accelerated or list(nodes)
    used = {names[node.id] for node in chosen if node.id in names}
    found = []
    for node in chosen:
        name = names.get(node.id) or _new_name(node, used)
        used.add(name)
        found.append(Node(name=name, device=node.device, count=node.count))
    return Cluster(name="ray", nodes=tuple(found))


def _new_name(node: RayNode, used: AbstractSet[str]) -> str:
    if node.named:
        return node.named[0]
    kind = node_stem(node.device)
    return next(n for i in count() if (n := f"{kind}-{i}") not in used)


def on_ray_nodes(
    cluster: Cluster, nodes: Sequence[RayNode], simulate: bool
) -> dict[str, RayNode]:
    """Give every host a machine as `matched` does; BadInput if one gets none."""
    found = matched(cluster, nodes, simulate)
    for node in cluster.nodes:
        if node.workers[0] not in found:
            raise _no_machine(node, nodes)
    return found


def matched(
    cluster: Cluster,
    nodes: Sequence[RayNode],
    simulate: bool,
    before: Mapping[str, RayNode] = MappingProxyType({}),
) -> dict[str, RayNode]:
    """Give hosts a machine, by worker: its node's namesake, else one of its kind.

    Nodes whose machines of `before` are all there keep them; one that does not get as
    many as it has hosts is left out. With `simulate` any machine will do, several hosts
    on one where there are too few.
    """
    kept = {node.name: _kept(node, nodes, before) for node in cluster.nodes}
    found = {n.name: kept[n.name] or _namesakes(n, nodes) for n in cluster.nodes}
    taken = {machine.id for machines in found.values() for machine in machines}
    free = [machine for machine in nodes if machine.id not in taken]
    for node in cluster.nodes:
        while len(found[node.name]) < node.hosts:
            fitting = [m for m in free if simulate or _fits(node, m)]
            if not fitting and simulate:
                free = fitting = list(nodes)
            if not fitting:
                break
            machine = min(fitting, key=lambda m: m.count)
            found[node.name].append(machine)
            free = [other for other in free if other is not machine]
    return {
        worker: machine
        for node in cluster.nodes
        if len(found[node.name]) == node.hosts
        for worker, machine in zip(
            node.workers, kept[node.name] or _in_order(found[node.name]), strict=True
        )
    }


def _kept(
    node: Node, nodes: Sequence[RayNode], before: Mapping[str, RayNode]
) -> list[RayNode]:
    """Its machines of before, in order, if they are all there."""
    there = {machine.id: machine for machine in nodes}
    ids = [before[worker].id for worker in node.workers if worker in before]
    found = [there[id_] for id_ in ids if id_ in there]
    return found if len(found) == node.hosts else []


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
    number = int(resources.get("GPU", 0) or resources.get("TPU", 0))
    kind = types[0] if types else "cpu"
    device = canonical_name(_KINDS.get(kind, kind))
    return RayNode(
        id=raw["NodeID"],
        address=raw["NodeManagerAddress"],
        port=raw["NodeManagerPort"],
        device=device if number else "cpu",
        count=number or 1,
        named=_named(raw["NodeManagerAddress"], resources),
    )


def _named(address: str, resources: Iterable[str]) -> tuple[str, ...]:
    """The nodes that a machine says it is; it must not end a run that it joins."""
    said = sorted(k.removeprefix(NAMED) for k in resources if k.startswith(NAMED))
    for name in said:
        if not is_node(name):
            warnings.warn(
                f"Ray's machine {address} says that it is node {name[:80]!r}, which is "
                f"ignored: a node is called {RULE}",
                stacklevel=2,
            )
    return tuple(filter(is_node, said))
