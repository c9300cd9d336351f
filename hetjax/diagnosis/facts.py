# SPDX-License-Identifier: Apache-2.0
"""What was found out about a machine and a run: data that checks judge.

Owns the shapes. Does not own the finding out (`gathering.py`, `peers.py`), nor what
follows (`checks.py`). Where something could not be found out, an `error` says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetjax.mesh.accelerators import Visible
from hetjax.mesh.driver import Card
from hetjax.report.diagnosis import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Devices of one kind, as JAX reports them; `name` is the catalogue's spelling."""

    name: str
    platform: str
    count: int
    memory_gib: float | None = None
    compute_capability: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """The machine and its packages: versions by distribution, settings by variable.

    `visible` is the accelerator of the device files, `cards` what NVIDIA's driver says.
    """

    system: str
    versions: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)
    visible: Visible | None = None
    cards: tuple[Card, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What JAX came up with in a process of its own, or why it did not."""

    devices: tuple[Seen, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """A run directory, written to; `clock_ahead_s` is its file server's clock."""

    path: str
    free_gib: float = 0.0
    write_mb_per_s: float = 0.0
    clock_ahead_s: float = 0.0
    error: str | None = None
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAnswer:
    """A checkpoint store, tried out."""

    url: str
    seconds: float = 0.0
    clock_ahead_s: float = 0.0
    error: str | None = None
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A TCP port of this machine; `error` if it cannot be listened on."""

    number: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another machine that answers as `doctor --listen` does: one way there."""

    address: str
    latency_ms: float = 0.0
    gbit_per_s: float = 0.0
    clock_ahead_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherMachine:
    """A machine of a launcher: what it finds of itself, and its `way` to this one.

    `memory_gib` is 0 where nothing says it.
    """

    name: str
    way: Peer
    findings: tuple[Finding, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    memory_gib: float = 0.0
    sees_run_dir: bool = True
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Those of a launcher, and the `versions` here; `absent` are those that cannot be
    reached: what is wrong, and what to do."""

    versions: Mapping[str, str]
    machines: tuple[OtherMachine, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """A cluster file: how many devices of which kinds, or what is wrong with it."""

    path: str
    kinds: Mapping[str, int] = field(default_factory=dict)
    network_gbit_per_s: float | None = None
    error: str | None = None
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All of it; what was not asked for is not there."""

    installed: Installed
    started: Started
    cluster: ClusterFile | None = None
    run_dir: RunDirectory | None = None
    store: StoreAnswer | None = None
    ports: tuple[Port, ...] = ()
    peers: tuple[Peer, ...] = ()
