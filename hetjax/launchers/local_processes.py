# SPDX-License-Identifier: Apache-2.0
"""Defines the launcher `processes`: workers in processes that this machine starts.

Owns the processes (each is a child that cannot outlive its controller), their output,
and the words that a launcher puts before their commands. Does not own what workers do
(`training/worker.py`), nor the run that drives them (`training/recovery/driver.py`).
"""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.errors import BadInput
from hetjax.launchers.bootstraps import FIRST_START, Bootstraps, StartTerms
from hetjax.launchers.isolation import hidden_devices, worker_environments
from hetjax.launchers.launcher import Launcher, LaunchRequest
from hetjax.launchers.warm_standby import WarmStandby, WorkerCommand
from hetjax.mesh.process_setup import malloc_environment
from hetjax.plans.worker_map import file_name
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.runtime.worker.bootstrap import WorkerBootstrap

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlace:
    """Where a worker process runs, and the command that gets it there.

    `prefix` goes before the worker's command. With it, a launcher reaches other
    machines through a local program such as `srun`, `ssh` or `ip netns exec`. Such a
    program

    * runs the words after its own unchanged (ssh joins them with blanks and gives
      them to a shell: quote them);
    * passes on its standard input: there the bootstrap arrives, one line, and with it
      the run's secret, which is in no argument and no variable;
    * passes on the environment, or sets it (behind ssh: `env NAME=VALUE`);
    * stays as long as the worker, and prints its log: its end is the worker's end.

    The program is the child whose process id this launcher knows. Standby processes are
    started through it, too. `python` is the interpreter there, spelled as the program
    needs it. `address` is where peers reach the worker. If it is not the controller's,
    the worker watches its own machine for notices.
    """

    prefix: tuple[str, ...] = ()
    python: str = sys.executable
    address: str = LOOPBACK


def open_launcher(request: LaunchRequest, stack: ExitStack) -> Launcher:
    """Make the launcher `processes`; each of its workers sees its own devices."""
    return OnThisMachine(
        request.logs,
        stack,
        terms=request.terms,
        cluster=request.cluster,
        environments=partial(_environments, request),
        standby_after_s=request.standby_after_s,
    )


def _environments(
    request: LaunchRequest, cluster: Cluster
) -> Mapping[str, Mapping[str, str]]:
    if request.only_cpu:
        return hidden_devices(cluster)
    return worker_environments(cluster, request.here, os.environ)


# the variables to set for each worker of a cluster
Environments = Callable[[Cluster], Mapping[str, Mapping[str, str]]]


class OnThisMachine:
    """A process for each worker; `stack` ends them all.

    Workers find the controller at `address`, and each other at the addresses of their
    `places`. A place is looked up whenever its worker is started; a worker without one
    is on this machine. Each worker of the `cluster` gets the variables of
    `environments`, so that it sees only its own devices. By default, workers get the
    variables of this process.
    """

    def __init__(
        self,
        logs: Path,
        stack: ExitStack,
        *,
        places: Mapping[str, WorkerPlace] | None = None,
        address: str = LOOPBACK,
        module: str = "hetjax.training.worker",
        terms: StartTerms = FIRST_START,
        cluster: Cluster | None = None,
        environments: Environments = lambda cluster: {},
        standby_after_s: float = 0.0,
    ) -> None:
        """Raise what `environments` raises; `standby_after_s` as in `WarmStandby`."""
        self._cluster = self._seen = cluster
        self._environments = environments
        self._own = environments(cluster) if cluster else {}
        self._processes = stack.enter_context(Processes(logs=logs))
        self._standby = WarmStandby(standby_after_s)
        stack.callback(self._standby.end)
        self._places = {} if places is None else places  # may be filled later
        self._module = module
        self._begun_s: dict[str, float] = {}
        self._bootstraps = Bootstraps(address, stack, terms)
        self.connections = self._bootstraps.connections

    def start(self, workers: Sequence[str]) -> None:
        self.begin(workers)
        self.connections.wait_for(workers, lambda: self._processes.check(workers))

    def begin(self, workers: Sequence[str]) -> None:
        shared = os.environ | malloc_environment()
        for worker in workers:
            place = self._places.get(worker, WorkerPlace())
            command = WorkerCommand(
                prefix=place.prefix,
                python=place.python,
                module=self._module,
                environment={**shared, **self._own.get(worker, {})},
            )
            bootstrap = self._bootstraps.bootstrap_for(worker, place.address)
            standby = self._standby.claim(worker, command)
            self._processes.start(bootstrap, command, standby)
            self._begun_s[worker] = time.monotonic()
            self._standby.prepare(worker, command)

    def are_there(self, workers: Sequence[str]) -> bool:
        begun_s = min((self._begun_s[worker] for worker in workers), default=0.0)
        check = lambda: self._processes.check(workers)  # noqa: E731
        return self.connections.have_called(workers, begun_s, check)

    @property
    def pids(self) -> Mapping[str, int]:
        children = self._processes.children
        return {worker: child.pid for worker, child in children.items()}

    def present(self, cluster: Cluster, again: bool) -> Cluster:
        """Return the cluster; warn and return the previous if devices are missing."""
        if self._cluster is None or cluster == self._seen:
            return self._cluster or cluster
        self._seen = cluster
        try:
            self._own, self._cluster = self._environments(cluster), cluster
        except BadInput as bad:
            warnings.warn(f"the run keeps its previous cluster: {bad}", stacklevel=2)
        return self._cluster


_END_S = 5.0
_KILLED = 128  # plus the signal's number: how shells and srun report a kill


@dataclass(kw_only=True)
class Processes:
    """Children by worker name; each writes to `logs`/NAME.log.

    The terminal's Ctrl-C does not reach them: the controller ends them. As a context
    manager, leaves none behind.
    """

    logs: Path
    children: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(
        self,
        bootstrap: WorkerBootstrap,
        command: WorkerCommand,
        standby: subprocess.Popen[str] | None = None,
    ) -> None:
        """Start a worker; its bootstrap is written to its standard input, one line.

        If `standby` is given, that process becomes the worker instead. What is left of
        an earlier process of that name is killed.
        """
        worker, lines = bootstrap.worker, [bootstrap.text()]
        if earlier := self.children.pop(worker, None):
            earlier.kill()
            earlier.wait()
        self.logs.mkdir(parents=True, exist_ok=True)
        if standby is not None:
            lines.insert(0, str(self._log(worker).absolute()))
        child = self.children[worker] = standby or self._started(worker, command)
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # `check` reports it
            child.stdin.write("".join(f"{line}\n" for line in lines))
            child.stdin.close()

    def _started(self, worker: str, command: WorkerCommand) -> subprocess.Popen[str]:
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
        """Raise WorkerLost for a worker that has ended, with its last output line."""
        for worker in workers:
            child = self.children[worker]
            if child.poll() is not None:
                text = self._log(worker).read_text().strip()
                last = text.splitlines()[-1] if text else "no output"
                raise WorkerLost(
                    worker,
                    f"ended with code {child.returncode} ({last}); its log is "
                    f"{self._log(worker)}",
                    # neither killed nor lost by ssh (255)
                    has_failed=0 < child.returncode < _KILLED,
                )

    def _log(self, worker: str) -> Path:
        return self.logs / f"{file_name(worker)}.log"

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Wait a moment for all to end by themselves, then kill them."""
        end_s = time.monotonic() + _END_S
        for child in self.children.values():
            try:
                child.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self.children.clear()
