# SPDX-License-Identifier: Apache-2.0
"""Turns local devices into a cluster, and assigns local devices to a cluster's nodes.

Owns the names of the device kinds that it finds, and the assignment rule of the
embedded mode. Imports no JAX: device objects are arguments. Does not own meshes
(`mesh/`).
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput

_LONGEST_STEM = 40  # of a kind's name, so that a number fits behind it


class Device(Protocol):
    """The part of `jax.Device` that this file reads."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


D = TypeVar("D", bound=Device)


def device_name(device: Device) -> str:
    """Return the catalogue's name of a device's kind, e.g. A100-SXM4-80GB.

    A kind that the catalogue lacks gets a name of the same form.
    """
    if device.platform == "cpu":
        return "cpu"
    kind = re.sub(r"^(NVIDIA|AMD)\s+", "", device.device_kind.strip())
    return canonical_name(re.sub(r"\s+", "-", kind))


def discover(devices: Sequence[Device]) -> Cluster:
    """Return a cluster with one node per device kind, in order of appearance."""
    if not devices:
        raise BadInput(
            got="0 local devices",
            allowed="1 device or more",
            fix="check the JAX installation, or give --cluster with --simulate",
        )
    counts = Counter(device_name(device) for device in devices)
    kinds = {device_name(d): _stem(d) for d in reversed(devices)}
    stems = [kinds[name] for name in counts]
    nodes = [
        Node(name=f"{stem}-{stems[:i].count(stem)}", device=name, count=count)
        for i, (stem, (name, count)) in enumerate(
            zip(stems, counts.items(), strict=True)
        )
    ]
    return Cluster(name="local", nodes=tuple(nodes))


def node_stem(kind: str) -> str:
    """Return the name of a device kind's nodes, without their number."""
    words = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    return words[:_LONGEST_STEM] or "device"


def assign_devices(
    cluster: Cluster, devices: Sequence[D], simulate: bool
) -> dict[str, tuple[D, ...]]:
    """Assign local devices to each node, in file order (the embedded mode).

    Nodes take devices of their own kind; with `simulate` all nodes take CPU devices,
    whatever their kind. Raises BadInput if there are too few.
    """
    free: dict[str, list[D]] = {}
    for device in devices:
        free.setdefault(device_name(device), []).append(device)
    assigned: dict[str, tuple[D, ...]] = {}
    for node in cluster.nodes:
        pool = free.get(_kind(node, simulate), [])
        if len(pool) < node.count:
            raise _too_few(cluster, node, Counter(map(device_name, devices)), simulate)
        assigned[node.name] = tuple(pool[: node.count])
        del pool[: node.count]
    return assigned


def _kind(node: Node, simulate: bool) -> str:
    return "cpu" if simulate else canonical_name(node.device)


def _too_few(
    cluster: Cluster, node: Node, there: Counter[str], simulate: bool
) -> BadInput:
    kind = _kind(node, simulate)
    wanted = sum(n.count for n in cluster.nodes if _kind(n, simulate) == kind)
    found = ", ".join(f"{count} x {name}" for name, count in there.items())
    start = f"set JAX_NUM_CPU_DEVICES={wanted} before the start"
    return BadInput(
        got=f"node {node.name!r} wants {node.count} x {kind}; the cluster wants "
        f"{wanted} in all; here: {found or 'no devices'}",
        allowed=f"at most {there[kind]} x {kind} in the cluster's nodes together",
        fix=f"{start}, or give another --cluster"
        if kind == "cpu"
        else "add --simulate to let CPU devices stand in, or give another --cluster",
    )


def _stem(device: Device) -> str:
    return node_stem("cpu" if device.platform == "cpu" else device.device_kind)
