# SPDX-License-Identifier: Apache-2.0
"""Defines the facts about a machine and a run that checks judge.

Owns the data classes. Does not own the gathering (`gathering.py`, `peers.py`), nor the
judgement (`checks.py`). If a fact could not be determined, its `error` says why.
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

    `visible` is the accelerator of the device files, `cards` are those that NVIDIA's
    driver reports.
    """

    system: str
    versions: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)
    visible: Visible | None = None
    cards: tuple[Card, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The devices that JAX found in a separate process, or why it did not start."""

    devices: tuple[Seen, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """The result of writing to a run directory; `clock_ahead_s` is how far its file
    server's clock is ahead."""

    path: str
    free_gib: float = 0.0
    write_mb_per_s: float = 0.0
    clock_ahead_s: float = 0.0
    error: str | None = None
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAnswer:
    """The result of a trial of a checkpoint store."""

    url: str
    seconds: float = 0.0
    clock_ahead_s: float = 0.0
    error: str | None = None
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A TCP port of this machine; `error` says why hetjax cannot listen on it."""

    number: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """The measured connection to another machine, which answers as `doctor --listen`
    does."""

    address: str
    latency_ms: float = 0.0
    gbit_per_s: float = 0.0
    clock_ahead_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherMachine:
    """A machine of a launcher: its own findings, and its connection (`way`) to this
    one.

    `granted` is what its system says it has for the run, and how many of them:
    ("A100-SXM4-40GB", 2); `cards` is how many JAX finds there. `memory_gib` is 0 if
    unknown.
    """

    name: str
    way: Peer
    granted: tuple[tuple[str, int], ...] = ()
    cards: int = 0
    findings: tuple[Finding, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    memory_gib: float = 0.0
    sees_run_dir: bool = True
    writes_run_dir: bool = True
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The machines of a launcher, and the `versions` here; `absent` has, for each
    machine that is missing or cannot be reached, the problem and its fix."""

    versions: Mapping[str, str]
    machines: tuple[OtherMachine, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """A cluster file: the number of devices of each kind, or its error."""

    path: str
    kinds: Mapping[str, int] = field(default_factory=dict)
    network_gbit_per_s: float | None = None
    error: str | None = None
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All facts; those that were not requested are None or empty."""

    installed: Installed
    started: Started
    cluster: ClusterFile | None = None
    run_dir: RunDirectory | None = None
    store: StoreAnswer | None = None
    ports: tuple[Port, ...] = ()
    peers: tuple[Peer, ...] = ()
