# SPDX-License-Identifier: Apache-2.0
"""Defines launchers: the protocol of a launcher's file, and of what that file opens.

Owns the input of a launcher, and what a run requests of it. Does not own which
launchers there are (`table.py`), what workers receive when they start
(`bootstraps.py`), nor when a worker is started (`training/recovery/driver.py`).
"""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.local_devices import LocalDevice
from hetjax.launchers.bootstraps import FIRST_START, StartTerms
from hetjax.launchers.joining.terms import JoinTerms
from hetjax.launchers.table import LAUNCHERS
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.schema import Json
from hetjax.runtime.rpc.worker_connections import WorkerConnections
from hetjax.runtime.worker.service import Work

# Runs `python -m MODULE ARGUMENT` on a node's machine with the node's devices; raises
# TimeoutExpired after that many seconds
RunOnNode = Callable[[Node, str, str, float], subprocess.CompletedProcess[str]]


class Launcher(Protocol):
    """Starts and restarts workers; the `stack` of its maker ends them."""

    @property
    def connections(self) -> WorkerConnections: ...

    def start(self, workers: Sequence[str]) -> None:
        """Start these and wait until they have connected; WorkerLost if one does not.

        First ends what is left of earlier workers of these names.
        """
        ...

    def begin(self, workers: Sequence[str]) -> None:
        """Start these without waiting."""
        ...

    def are_there(self, workers: Sequence[str]) -> bool:
        """Return whether all of these started workers have connected.

        Raises WorkerLost if one does not.
        """
        ...

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the workers on this machine; other machines' are left out."""
        ...

    def present(self, cluster: Cluster, again: bool) -> Cluster | None:
        """Return the nodes of the cluster that are there; None if none is.

        If the cluster was discovered, newly found nodes are added. If `again`, checks
        anew instead of returning a recent result.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """The input of every launcher; each uses what it needs.

    If `discovered`, the cluster is what was found, not what a file says. `here` are the
    accelerators of this machine that its workers may have. With `only_cpu` they have
    none, whatever is here; with `simulate`, CPUs stand in for accelerators. Output of
    workers goes to `logs`/NAME.log, unless the table names another place. `hosts` is
    the file that names machines, for a launcher that reads one. `joins` are the terms
    on which machines join, for a launcher that waits for them. `work` makes the work of
    a worker in this process. `standby_after_s` after a worker's start, a process starts
    that waits to replace it (0: none does).
    """

    cluster: Cluster
    discovered: bool = False
    here: Sequence[LocalDevice] = ()
    only_cpu: bool = False
    simulate: bool = False
    hosts: Path | None = None
    joins: JoinTerms | None = None
    logs: Path
    cache_dir: Path
    work: Callable[[Json], Work]
    standby_after_s: float = 0.0
    terms: StartTerms = FIRST_START


class LauncherFile(Protocol):
    """The functions that the file of a launcher defines."""

    def open_launcher(self, request: LaunchRequest, stack: ExitStack) -> Launcher:
        """Make the launcher, without any worker yet; BadInput if that is impossible.

        `stack` ends its workers.
        """
        ...


class RemoteLauncherFile(LauncherFile, Protocol):
    """The functions of a launcher's file if workers are on other machines."""

    def find_cluster(self, hosts: Path | None) -> Cluster:
        """Return the cluster of the machines that exist; BadInput if there are none.

        `hosts` is the file that names them, for a launcher that reads one.
        """
        ...

    def run_on_nodes(self, cluster: Cluster, hosts: Path | None) -> RunOnNode:
        """Return a function that runs a module on a node's machine, to probe devices.

        A node without a machine raises BadInput.
        """
        ...


def launcher_file(name: str) -> LauncherFile:
    """Import the file of a launcher of the table."""
    return cast(LauncherFile, import_module(LAUNCHERS[name].module))


def remote_launcher_file(name: str) -> RemoteLauncherFile:
    """Import the file of a launcher whose workers are on other machines."""
    assert not LAUNCHERS[name].workers_are_here, name
    return cast(RemoteLauncherFile, import_module(LAUNCHERS[name].module))


def start_workers(
    launcher: Launcher, plan: Plan, nodes: Sequence[Node] = ()
) -> Controller:
    """Start a worker for each host of the plan's nodes.

    Nodes that are not among `nodes` have one host.
    """
    controller = Controller(plan, launcher.connections, nodes)
    launcher.start(controller.workers)
    return controller
