# SPDX-License-Identifier: Apache-2.0
"""Ray's nodes to a cluster, and a cluster's nodes to Ray's.

Owns how what Ray tells of its nodes is read: kinds and numbers of accelerators, where
nobody has looked there, and the custom resource `hetjax_node_NAME`, which says that a
machine is a cluster file's node NAME, or one of its hosts; their order is that of their
addresses. Imports no Ray: its nodes come in as it describes them. Does not own starting
anything there (`hetjax/launchers/on_ray.py`).
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any

from hetjax.cluster.catalogue import canonical_name, catalogue
from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node
from hetjax.cluster.discovery import device_name, node_stem
from hetjax.cluster.local_devices import LocalDevice, cluster_of_devices, is_one_kind
from hetjax.errors import BadInput
from hetjax.names import RULE, is_node

_FIGURES = (*DEVICE_FIGURES, "precision")
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
    file's nodes that it says it is. Ray's process there listens at `port`. Of a machine
    with unlike accelerators, which Ray takes for alike, it is the part of one kind:
    `own` are those. `memory_gib` is what each has, where the catalogue says otherwise.
    """

    id: str
    address: str
    port: int
    device: str
    count: int
    named: tuple[str, ...] = ()
    own: tuple[LocalDevice, ...] = ()
    memory_gib: float | None = None

    @property
    def part(self) -> str:
        """What tells it from all others, also of the same machine."""
        return f"{self.id}/{self.device}" if self.own else self.id


def has_gpus(told: Mapping[str, Any]) -> bool:
    """Whether a machine of `ray.nodes()` is alive, and Ray gives out GPUs of it."""
    return told["Alive"] and told["Resources"].get("GPU", 0) >= 1


def ray_nodes(
    told: Sequence[Mapping[str, Any]],
    seen: Mapping[str, Sequence[LocalDevice]] = MappingProxyType({}),
) -> list[RayNode]:
    """Read what `ray.nodes()` gives, of machines that are alive, by address.

    Ray tells of them in any order, so those of one address have one of their own.

    What is `seen` on a machine, by its id, is believed before what Ray says: Ray names
    the first card only, and 40 and 80 GB of memory alike.
    """
    found = []
    for raw in told:
        if raw["Alive"]:
            node = _node(raw)
            found += _of_kinds(node, seen.get(node.id, ())) or [node]
    return sorted(found, key=lambda node: (node.address, node.named, node.id))


def _of_kinds(node: RayNode, seen: Sequence[LocalDevice]) -> list[RayNode]:
    """A machine by what is seen there: a part for each kind, no more than Ray has."""
    if not seen:
        return []
    devices = seen[: node.count]
    alike = is_one_kind(devices)
    return [
        replace(
            node,
            device=kind.device,
            count=kind.count,
            memory_gib=kind.memory_gib,
            own=() if alike else tuple(_of_kind(kind.device, devices)),
        )
        for kind in cluster_of_devices(devices).nodes
    ]


def _of_kind(name: str, devices: Iterable[LocalDevice]) -> Iterable[LocalDevice]:
    return (device for device in devices if device_name(device) == name)


def cluster_of_ray(
    nodes: Sequence[RayNode], names: Mapping[str, str] = MappingProxyType({})
) -> Cluster:
    """Return the cluster that Ray's machines make; of those without accelerators only
    if there are no others.

    Machines that have a name stay what they are: `names`, by part. BadInput if there
    are none.
    """
    if not nodes:
        raise BadInput(
            got="a Ray cluster without nodes that are alive",
            allowed="1 node or more",
            fix="start one with: ray start --head",
        )
    accelerated = [node for node in nodes if node.device != "cpu"]
    chosen = accelerated or list(nodes)
    used = {names[node.part] for node in chosen if node.part in names}
    found = []
    for node in chosen:
        name = names.get(node.part) or _new_name(node, used)
        used.add(name)
        found.append(
            Node(
                name=name,
                device=node.device,
                count=node.count,
                memory_gib=node.memory_gib,
            )
        )
    return Cluster(name="ray", nodes=tuple(found))


def with_known_figures(found: Cluster, before: Cluster) -> Cluster:
    """Return the nodes that are found, of kinds that plans can be made for.

    A kind that the catalogue lacks has the figures that it had before; nodes of one
    that nobody has measured are left out, with a warning.
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
                "not there to be measured when the run started: it is left out until "
                "the next start",
                stacklevel=2,
            )
    return replace(found, nodes=tuple(nodes))


def _new_name(node: RayNode, used: AbstractSet[str]) -> str:
    free = [name for name in node.named if name not in used]
    if free:
        return free[0]
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
    taken = {machine.part for machines in found.values() for machine in machines}
    free = [machine for machine in nodes if machine.part not in taken]
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
    there = {machine.part: machine for machine in nodes}
    parts = [before[worker].part for worker in node.workers if worker in before]
    found = [there[part] for part in parts if part in there]
    return found if len(found) == node.hosts else []


def _namesakes(node: Node, nodes: Sequence[RayNode]) -> list[RayNode]:
    """As many as it has hosts; the last to say so count.

    Of a machine with unlike accelerators it can only be the part of its kind.
    """
    kind = canonical_name(node.device)
    return [
        machine
        for machine in nodes
        if node.name in machine.named and (not machine.own or machine.device == kind)
    ][-node.hosts :]


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
