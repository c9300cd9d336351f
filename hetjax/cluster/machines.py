# SPDX-License-Identifier: Apache-2.0
"""Describes the machines of another system, and matches them to a cluster's nodes.

Owns what a launcher knows of a machine, the cluster of machines, and which machine is
which node. Does not own how Ray (`ray_nodes.py`), Slurm (`slurm_nodes.py`) or a file of
hosts (`hosts.py`) describes them, nor how a worker gets there (`launchers/`).
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.discovery import device_name, node_stem
from hetjax.cluster.local_devices import LocalDevice, cluster_of_devices, is_one_kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine with `count` accelerators of kind `device`.

    A machine without accelerators counts as one device of kind cpu. `named` are the
    nodes of the cluster file that it says it is. `port` is that of a process of its
    system; 0: no process listens. A machine with unlike accelerators is in parts, one
    for each kind; `own` are then the accelerators of the part. `memory_gib` is the
    memory of each, if it differs from the catalogue's.
    """

    id: str
    address: str
    port: int = 0
    device: str
    count: int
    named: tuple[str, ...] = ()
    own: tuple[LocalDevice, ...] = ()
    memory_gib: float | None = None

    @property
    def whole(self) -> str:
        """The name of the whole machine: `fast` for the part `fast/a100`."""
        return self.id.partition("/")[0]

    @property
    def part(self) -> str:
        """A unique name, also among the parts of one machine."""
        return f"{self.id}/{self.device}" if self.own else self.id


def parts_by_kind(machine: Machine, seen: Sequence[LocalDevice]) -> list[Machine]:
    """Return a machine as a part for each kind `seen` there, up to `count` devices.

    If nothing was seen, return the machine as it is.
    """
    if not seen:
        return [machine]
    devices = seen[: machine.count]
    alike = is_one_kind(devices)
    return [
        replace(
            machine,
            device=kind.device,
            count=kind.count,
            memory_gib=kind.memory_gib,
            own=() if alike else tuple(of_kind(kind.device, devices)),
        )
        for kind in cluster_of_devices(devices).nodes
    ]


def of_kind(name: str, devices: Iterable[LocalDevice]) -> Iterable[LocalDevice]:
    """Return the devices whose name in the catalogue is `name`."""
    return (device for device in devices if device_name(device) == name)


def cluster_of_machines(
    system: str,
    machines: Sequence[Machine],
    names: Mapping[str, str] = MappingProxyType({}),
) -> Cluster:
    """Return the cluster of the machines; those without accelerators count only if
    there are no others.

    `names` maps a machine's `part` to the node name that it keeps.
    """
    accelerated = [machine for machine in machines if machine.device != "cpu"]
    chosen = accelerated or list(machines)
    used = {names[machine.part] for machine in chosen if machine.part in names}
    found = []
    for machine in chosen:
        name = names.get(machine.part) or _new_name(machine, used)
        used.add(name)
        found.append(
            Node(
                name=name,
                device=machine.device,
                count=machine.count,
                memory_gib=machine.memory_gib,
            )
        )
    return Cluster(name=system, nodes=tuple(found))


def _new_name(machine: Machine, used: AbstractSet[str]) -> str:
    free = [name for name in machine.named if name not in used]
    if free:
        return free[0]
    kind = node_stem(machine.device)
    return next(n for i in count() if (n := f"{kind}-{i}") not in used)


def matched(
    cluster: Cluster,
    machines: Sequence[Machine],
    simulate: bool,
    before: Mapping[str, Machine] = MappingProxyType({}),
) -> dict[str, Machine]:
    """Assign machines to workers: the node's namesake, otherwise one of its kind.

    Nodes whose machines in `before` are all there keep them. A node that gets fewer
    machines than it has hosts is left out. With `simulate` any machine will do, and
    hosts share machines if there are too few.
    """
    kept = {node.name: _kept(node, machines, before) for node in cluster.nodes}
    found = {n.name: kept[n.name] or _namesakes(n, machines) for n in cluster.nodes}
    taken = {machine.part for each in found.values() for machine in each}
    free = [machine for machine in machines if machine.part not in taken]
    for node in cluster.nodes:
        while len(found[node.name]) < node.hosts:
            fitting = [m for m in free if simulate or _fits(node, m)]
            if not fitting and simulate:
                free = fitting = list(machines)
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
    node: Node, machines: Sequence[Machine], before: Mapping[str, Machine]
) -> list[Machine]:
    """Return the node's machines in `before`, in order, if they are all there."""
    there = {machine.part: machine for machine in machines}
    parts = [before[worker].part for worker in node.workers if worker in before]
    found = [there[part] for part in parts if part in there]
    return found if len(found) == node.hosts else []


def _namesakes(node: Node, machines: Sequence[Machine]) -> list[Machine]:
    """Return the last machines that name the node, at most as many as it has hosts.

    Of a machine with unlike accelerators only the part of the node's kind counts.
    """
    kind = canonical_name(node.device)
    return [
        machine
        for machine in machines
        if node.name in machine.named and (not machine.own or machine.device == kind)
    ][-node.hosts :]


def _in_order(machines: Sequence[Machine]) -> list[Machine]:
    return sorted(machines, key=lambda machine: machine.address)


def _fits(node: Node, machine: Machine) -> bool:
    same = canonical_name(node.device) == machine.device
    enough = node.devices_per_host <= machine.count
    return same and (machine.device == "cpu" or enough)
