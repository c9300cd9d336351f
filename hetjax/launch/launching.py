# SPDX-License-Identifier: Apache-2.0
"""Starting workers in processes of this machine, and what all workers are told then.

Owns the processes, each a child that cannot outlive its controller, and what they say
on their output. Does not own what workers do (`training/worker.py`), nor the run that
they are driven by (`training/recovery/driver.py`).
"""

import os
import secrets
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from hetjax.cluster.cluster import Cluster, Node
from hetjax.comm.tls import Tls
from hetjax.errors import BadInput
from hetjax.launch.spares import Command, Spares
from hetjax.mesh.process_setup import malloc_environment
from hetjax.plans.plan import Plan
from hetjax.plans.worker_map import file_name
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.limits import WATCHDOG_FACTOR
from hetjax.runtime.rpc.worker_connections import (
    SocketConnections,
    WorkerConnections,
    WorkerLost,
)
from hetjax.runtime.worker.bootstrap import WorkerBootstrap

LOOPBACK = "127.0.0.1"
_STARTS = 2**32  # of workers by one controller, at most


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

    def begin(self, workers: Sequence[str]) -> None:
        """The same without waiting."""
        ...

    def are_there(self, workers: Sequence[str]) -> bool:
        """Whether these, which were begun, have called; WorkerLost if one does not."""
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
class StartTerms:
    """What one start of a run has for all of its workers, wherever they are started.

    `number` is greater with each start. Limits of what workers are asked are multiplied
    by `patience`; `watchdog_factor` times as long as expected, and a worker hangs.
    `tls` is what encrypts, if something does.
    """

    number: int = 0
    patience: float = 1.0
    watchdog_factor: float = WATCHDOG_FACTOR
    tls: Tls | None = None


FIRST_START = StartTerms()


class Bootstraps:
    """What workers are told when they are started; they call its `connections`.

    Those that are not at the controller's `address` watch their machines; it watches
    its own. Incarnations of workers grow with the number of the start, and with each
    that is started.
    """

    def __init__(self, address: str, stack: ExitStack, terms: StartTerms) -> None:
        self._secret, self._own = secrets.token_bytes(32), address
        self._tls, self._incarnations = terms.tls, count(terms.number * _STARTS + 1)
        self.connections = SocketConnections(
            f"{address}:0",
            self._secret,
            patience=terms.patience,
            watchdog_factor=terms.watchdog_factor,
            tls=terms.tls,
        )
        stack.callback(self.connections.close)

    def of(self, worker: str, address: str) -> WorkerBootstrap:
        """The bootstrap of a worker that others reach at this address.

        What was started before it under its name is let in no more.
        """
        incarnation = next(self._incarnations)
        self.connections.expect(worker, incarnation)
        return WorkerBootstrap(
            worker=worker,
            controller=self.connections.address,
            listen=f"{address}:0",
            secret=self._secret,
            watches=address != self._own,
            incarnation=incarnation,
            tls=self._tls,
        )


# variables that are set for each worker of a cluster
Environments = Callable[[Cluster], Mapping[str, Mapping[str, str]]]


class OnThisMachine:
    """A process for each worker; `stack` ends them all.

    They find the controller at `address`, and each other at those of their `places`.
    Each of the `cluster` gets what `environments` says, so that it sees its own devices
    alone; without them they get what this process has.
    """

    def __init__(
        self,
        logs: Path,
        stack: ExitStack,
        *,
        places: Mapping[str, Place] | None = None,
        address: str = LOOPBACK,
        module: str = "hetjax.training.worker",
        terms: StartTerms = FIRST_START,
        cluster: Cluster | None = None,
        environments: Environments = lambda cluster: {},
        spare_after_s: float = 0.0,
    ) -> None:
        """Errors as `environments` raises them; `spare_after_s` as in `Spares`."""
        self._cluster = self._seen = cluster
        self._environments = environments
        self._own = environments(cluster) if cluster else {}
        self._processes = stack.enter_context(Processes(logs=logs))
        self._spares = Spares(spare_after_s)
        stack.callback(self._spares.end)
        self._places, self._module = dict(places or {}), module
        self._begun_s: dict[str, float] = {}
        self._bootstraps = Bootstraps(address, stack, terms)
        self.connections = self._bootstraps.connections

    def start(self, workers: Sequence[str]) -> None:
        self.begin(workers)
        self.connections.wait_for(workers, lambda: self._processes.check(workers))

    def begin(self, workers: Sequence[str]) -> None:
        shared = os.environ | malloc_environment()
        for worker in workers:
            place = self._places.get(worker, Place())
            command = Command(
                prefix=place.prefix,
                module=self._module,
                environment={**shared, **self._own.get(worker, {})},
            )
            bootstrap = self._bootstraps.of(worker, place.address)
            spare = self._spares.take(worker, command)
            self._processes.start(bootstrap, command, spare)
            self._begun_s[worker] = time.monotonic()
            self._spares.keep(worker, command)

    def are_there(self, workers: Sequence[str]) -> bool:
        begun_s = min((self._begun_s[worker] for worker in workers), default=0.0)
        check = lambda: self._processes.check(workers)  # noqa: E731
        return self.connections.have_called(workers, begun_s, check)

    @property
    def pids(self) -> Mapping[str, int]:
        children = self._processes.children
        return {worker: child.pid for worker, child in children.items()}

    def present(self, cluster: Cluster, again: bool) -> Cluster:
        """All of it; what it was before, with a warning, if devices are missing."""
        if self._cluster is None or cluster == self._seen:
            return self._cluster or cluster
        self._seen = cluster
        try:
            self._own, self._cluster = self._environments(cluster), cluster
        except BadInput as bad:
            warnings.warn(f"the cluster stays as it was: {bad}", stacklevel=2)
        return self._cluster


def started(launcher: Launcher, plan: Plan, nodes: Sequence[Node] = ()) -> Controller:
    """Start a worker for each host of the plan's nodes.

    Those that are not among `nodes` have one host.
    """
    controller = Controller(plan, launcher.connections, nodes)
    launcher.start(controller.workers)
    return controller


_END_S = 5.0


@dataclass(kw_only=True)
class Processes:
    """Children by worker name; each writes to `logs`/NAME.log.

    They are out of reach of the terminal's Ctrl-C: the controller ends them. A context
    manager that leaves none behind.
    """

    logs: Path
    children: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(
        self,
        bootstrap: WorkerBootstrap,
        command: Command,
        spare: subprocess.Popen[str] | None = None,
    ) -> None:
        """Start a worker; its bootstrap is written to its standard input, one line.

        A `spare` becomes that worker instead. What is left of an earlier one of that
        name is killed.
        """
        worker, lines = bootstrap.worker, [bootstrap.text()]
        if earlier := self.children.pop(worker, None):
            earlier.kill()
            earlier.wait()
        self.logs.mkdir(parents=True, exist_ok=True)
        if spare is not None:
            lines.insert(0, str(self._log(worker).absolute()))
        child = self.children[worker] = spare or self._started(worker, command)
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # `check` tells
            child.stdin.write("".join(f"{line}\n" for line in lines))
            child.stdin.close()

    def _started(self, worker: str, command: Command) -> subprocess.Popen[str]:
        with self._log(worker).open("a") as log:
            return subprocess.Popen(
                command.words,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(command.environment),
                text=True,
                start_new_session=True,
            )

    def check(self, workers: Sequence[str]) -> None:
        """Raise WorkerLost for one of these that has ended, with its last words."""
        for worker in workers:
            child = self.children[worker]
            if child.poll() is not None:
                text = self._log(worker).read_text().strip()
                last = text.splitlines()[-1] if text else "without a word"
                raise WorkerLost(
                    worker,
                    f"ended with code {child.returncode} ({last}); its log is "
                    f"{self._log(worker)}",
                    has_failed=child.returncode > 0,  # and was not killed
                )

    def _log(self, worker: str) -> Path:
        return self.logs / f"{file_name(worker)}.log"

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Wait a moment for all to leave by themselves, then kill them."""
        end_s = time.monotonic() + _END_S
        for child in self.children.values():
            try:
                child.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self.children.clear()
