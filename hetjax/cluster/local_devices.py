# SPDX-License-Identifier: Apache-2.0
"""Describes the accelerators of one machine, as its driver reports them.

Owns what is known of each before JAX starts, which of NVIDIA's cards the user's own
CUDA_VISIBLE_DEVICES shows, and their cluster: a node for each kind. Starts nothing and
imports no JAX. Does not own the queries (`hetjax/launchers/device_probe.py`,
`hetjax/mesh/driver.py`), nor which of them a worker sees
(`hetjax/launchers/isolation.py`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.discovery import device_name, discover
from hetjax.cluster.reported_memory import with_reported_memory
from hetjax.files.parsing import json_value

VISIBLE = "CUDA_VISIBLE_DEVICES"
VISIBLE_AMD = "HIP_VISIBLE_DEVICES"  # indices into ROCR_VISIBLE_DEVICES, which stays
_ORDER = "CUDA_DEVICE_ORDER"


class DriverCard(Protocol):
    """The part of a card in NVIDIA's driver that this file reads."""

    @property
    def uuid(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def memory_gib(self) -> float: ...

    @property
    def is_cut(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDevice:
    """One accelerator of this machine; `platform` is cuda, rocm or tpu.

    `device_kind` has JAX's spelling. `handle` is its name in the platform's variable
    for visible devices: a UUID, or an index.
    """

    platform: str
    device_kind: str
    handle: str
    memory_bytes: int


def devices_json(devices: Iterable[LocalDevice]) -> str:
    """Return the devices as text for `read_devices`."""
    return json.dumps([asdict(device) for device in devices])


def read_devices(text: str) -> list[LocalDevice]:
    """Return the devices of a text from `devices_json`."""
    return [LocalDevice(**fields) for fields in json_value(text)]


def is_one_kind(devices: Sequence[LocalDevice]) -> bool:
    """Return whether one process may have all these devices; True for none."""
    return len({(device.platform, device.device_kind) for device in devices}) <= 1


def cluster_of_devices(devices: Sequence[LocalDevice]) -> Cluster:
    """Return a cluster with a node for each kind. Raises as `discover` does."""
    return as_reported(discover(devices), devices)


def as_reported(cluster: Cluster, devices: Sequence[LocalDevice]) -> Cluster:
    """Return the cluster with the memory that the devices of each kind report."""

    def gib_of(device: str) -> list[float]:
        mine = (d for d in devices if device_name(d) == canonical_name(device))
        return [d.memory_bytes / 2**30 for d in mine if d.memory_bytes]

    nodes = (with_reported_memory(node, gib_of(node.device)) for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def nvidia_devices(
    reported: Sequence[DriverCard], environment: Mapping[str, str]
) -> list[LocalDevice] | None:
    """Return those of the driver's cards that CUDA shows to a process.

    Returns None if only CUDA itself can tell: for cards cut into instances (MIG), and
    for indices of unlike cards in CUDA_VISIBLE_DEVICES. CUDA numbers these from the
    fastest, nvidia-smi by their place on the bus, unless CUDA_DEVICE_ORDER makes CUDA
    do so, too.
    """
    if any(card.is_cut for card in reported):
        return None
    cards = [
        LocalDevice(
            platform="cuda",
            device_kind=card.name,
            handle=card.uuid,
            memory_bytes=int(card.memory_gib * 2**30),
        )
        for card in reported
    ]
    visible = environment.get(VISIBLE)
    if visible is None:
        return cards
    tokens = [token.strip() for token in visible.split(",")]
    by_bus = environment.get(_ORDER) == "PCI_BUS_ID"
    if any(map(str.isdigit, tokens)) and not (by_bus or is_one_kind(cards)):
        return None
    return _shown(cards, tokens, by_bus)


def _shown(
    cards: Sequence[LocalDevice], tokens: Iterable[str], by_bus: bool
) -> list[LocalDevice]:
    """Return the cards that CUDA shows: those up to the first unknown token."""
    found: list[LocalDevice] = []
    for token in tokens:
        if token.isdigit():
            meant = cards[int(token) : int(token) + 1]
            if not by_bus:  # alike cards, whose order is unknown
                meant = [replace(card, handle=token) for card in meant]
        else:
            meant = [c for c in cards if token and c.handle.startswith(token)]
        if len(meant) != 1:
            break
        found += meant
    return found
