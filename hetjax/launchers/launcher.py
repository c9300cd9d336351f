# SPDX-License-Identifier: Apache-2.0
"""What a launcher is: the protocol of its file, and of what that file opens.

Owns what a launcher is given and what a run asks of it while it goes on. Does not own
which launchers there are (`table.py`), what workers receive when they start
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

# Runs `python -m MODULE ARGUMENT` on a node's machine with the node's devices;
# TimeoutExpired after so many seconds
RunOnNode = Callable[[Node, str, str, float], subprocess.CompletedProcess[str]]


class Launcher(Protocol):
    """Starts workers, also again; `stack` of whoever made it ends them."""

    @property
    def connections(self) -> WorkerConnections: ...

    def start(self, workers: Sequence[str]) -> None:
        """Start these and wait until they have called; WorkerLost if one does not.

        What is left of an earlier one of that name is ended first.
        """
        ...

    def begin(self, workers: Sequence[str]) -> None:
        """The same without waiting."""
        ...

    def are_there(self, workers: Sequence[str]) -> bool:
        """Whether all of these started workers have connected; WorkerLost if one does
        not."""
        ...

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the workers on this machine; other machines' are not in it."""
        ...

    def present(self, cluster: Cluster, again: bool) -> Cluster:
        """What is there of a cluster, and what else there is if it was discovered.

        `again` if it must not be what was seen a moment ago.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """What every launcher is given; each uses what it needs.

    A cluster that is `discovered` is what was found, not what a file says. `here` are
    the accelerators of this machine that workers on it may have; `only_cpu`: they have
    none, whatever is here, and with `simulate` CPUs stand in for them. Output of
    workers goes to `logs`/NAME.log, unless the table says that it is elsewhere.
    `hosts` is the file that names machines, for a launcher that reads one; `joins` are
    the terms on which they join, for one that waits for that.
    `work` makes what a worker in this process works on. A process waits to become a
    worker again `standby_after_s` after that was started; 0: none does.
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
    """What the file of a launcher defines."""

    def open_launcher(self, request: LaunchRequest, stack: ExitStack) -> Launcher:
        """Make the launcher, which has started nobody yet; BadInput where it cannot be.

        `stack` ends its workers.
        """
        ...


class RemoteLauncherFile(LauncherFile, Protocol):
    """What it defines besides where workers are on other machines."""

    def find_cluster(self, hosts: Path | None) -> Cluster:
        """Return the cluster of the machines that there are; BadInput for none.

        `hosts` is the file that names them, for a launcher that reads one.
        """
        ...

    def run_on_nodes(self, cluster: Cluster, hosts: Path | None) -> RunOnNode:
        """Give what runs a module on a node's machine, to look at its devices.

        It raises BadInput if a node has no machine.
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

    Those that are not among `nodes` have one host.
    """
    controller = Controller(plan, launcher.connections, nodes)
    launcher.start(controller.workers)
    return controller
