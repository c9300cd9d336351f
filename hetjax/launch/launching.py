# SPDX-License-Identifier: Apache-2.0
"""Starting workers in processes of this machine, and what all workers are told then.

Does not own what workers do (`training/worker.py`), nor the run that they are driven by
(`elastic/driver.py`).
"""

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hetjax.cluster.cluster import Cluster, Node
from hetjax.launch.processes import Processes
from hetjax.mesh.simulated import keeping_environment
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.worker_connections import SocketConnections, WorkerConnections
from hetjax.runtime.worker.service import WorkerBootstrap

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker process runs: words before its command, and its address there."""

    prefix: tuple[str, ...] = ()
    address: str = LOOPBACK


class Launcher(Protocol):
    """Starts workers, also again; `stack` of whoever made it ends them."""

    @property
    def connections(self) -> WorkerConnections: ...

    def start(self, workers: Sequence[str]) -> None:
        """Start these and wait until they have called; WorkerLost if one does not.

        What is left of an earlier one of that name is ended first.
        """
        ...

    def present(self, cluster: Cluster, again: bool) -> Cluster:
        """What is there of a cluster, and what else there is if it was discovered.

        `again` if it must not be what was seen a moment ago.
        """
        ...


class Bootstraps:
    """What workers are told when they are started; they call its `connections`.

    Those that are not at the controller's `address` watch their machines; it watches
    its own.
    """

    def __init__(self, address: str, stack: ExitStack, patience: float) -> None:
        self._secret, self._own = secrets.token_bytes(32), address
        self.connections = SocketConnections(
            f"{address}:0", self._secret, patience=patience
        )
        stack.callback(self.connections.close)

    def of(self, worker: str, address: str) -> WorkerBootstrap:
        return WorkerBootstrap(
            worker=worker,
            controller=self.connections.address,
            listen=f"{address}:0",
            secret=self._secret,
            watches=address != self._own,
        )


class OnThisMachine:
    """A process for each worker; `stack` ends them all.

    They find the controller at `address`, and each other at those of their `places`.
    """

    def __init__(
        self,
        logs: Path,
        stack: ExitStack,
        *,
        places: Mapping[str, Place] | None = None,
        address: str = LOOPBACK,
        module: str = "hetjax.training.worker",
        patience: float = 1.0,
    ) -> None:
        self._processes = stack.enter_context(Processes(logs=logs))
        self._places, self._module = dict(places or {}), module
        self._bootstraps = Bootstraps(address, stack, patience)
        self.connections = self._bootstraps.connections

    def start(self, workers: Sequence[str]) -> None:
        environment = os.environ | keeping_environment()
        for worker in workers:
            place = self._places.get(worker, Place())
            command = [*place.prefix, sys.executable, "-m", self._module]
            bootstrap = self._bootstraps.of(worker, place.address)
            self._processes.start(bootstrap, command, environment)
        check = lambda: self._processes.check(workers)  # noqa: E731
        self.connections.wait_for(workers, check)

    def present(self, cluster: Cluster, again: bool) -> Cluster:
        return cluster


def started(launcher: Launcher, plan: Plan, nodes: Sequence[Node] = ()) -> Controller:
    """Start a worker for each host of the plan's nodes.

    Those that are not among `nodes` have one host.
    """
    controller = Controller(plan, launcher.connections, nodes)
    launcher.start(controller.workers)
    return controller
