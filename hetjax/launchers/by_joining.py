# SPDX-License-Identifier: Apache-2.0
"""Defines the launcher `join`: workers on machines that start and join by themselves.

A machine that has joined stays connected, and starts its worker whenever the run
requests it. If that connection ends, the machine counts as gone, and so does its node,
until a machine joins as it again. Owns when a run waits for machines, the commands for
users to type on them, and when a worker is started. Does not own who may join
(`joining/desk.py`), nor what a machine does (`joining/joiner.py`).
"""

import shlex
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.comm.addresses import listen
from hetjax.comm.pinned import OWNER_ALONE, OwnCertificate, kept_certificate, spelled
from hetjax.errors import BadInput
from hetjax.files.writing import write_whole
from hetjax.launchers.bootstraps import Bootstraps
from hetjax.launchers.joining.desk import Desk
from hetjax.launchers.joining.terms import JoinTerms
from hetjax.launchers.joining.tokens import JoinTokens
from hetjax.launchers.launcher import Launcher, LaunchRequest, RunOnNode
from hetjax.launchers.reprovisioning import nothing_missing
from hetjax.runtime.rpc.schema import Noticed
from hetjax.runtime.rpc.worker_connections import WorkerLost

COMMANDS, FINGERPRINT = "commands.txt", "fingerprint"  # in `JoinTerms.folder`
_LOOK_S = 0.1
_MOST_GRACE_S = 600.0
_ASKS_AFTER_S = 60.0  # for the machines of an earlier start, which join again
_KILLED = 128  # plus the signal's number: a killed process's exit code in a shell


def open_launcher(request: LaunchRequest, stack: ExitStack) -> Launcher:
    """Make the launcher `join` once machines have joined; BadInput if none does."""
    return ByJoining(request, stack)


def find_cluster(hosts: Path | None) -> Cluster:
    """Raise BadInput: machines join as nodes of a cluster file, and there is none."""
    raise BadInput(
        got="--launcher join without a cluster",
        allowed="a cluster file: machines join as its nodes",
        fix="add --cluster FILE",
    )


def run_on_nodes(cluster: Cluster, hosts: Path | None) -> RunOnNode:
    """Return a function that raises BadInput: no machine has joined yet."""

    def refuse(node: Node, module: str, argument: str, limit_s: float):
        raise BadInput(
            got=f"node {node.name!r} with the unknown device {node.device!r}, and "
            "--launcher join",
            allowed="devices of the catalogue, or nodes that give their figures, for "
            "machines that have not joined cannot be measured",
            fix="run hetjax doctor --probe on that machine: it prints its node",
        )

    return refuse


class ByJoining:
    """Machines that have joined, each with one worker; `stack` releases them."""

    def __init__(self, request: LaunchRequest, stack: ExitStack) -> None:
        terms = request.joins
        assert terms is not None, "of the settings"
        own = _certificate(terms.folder)
        tokens = JoinTokens(terms.folder, terms.token_s)
        host = terms.address.rpartition(":")[0]
        self._desk = _opened(request, terms, own, tokens)
        stack.callback(lambda: self._desk.close(is_done=terms.is_done()))
        self._bootstraps = Bootstraps(host, stack, request.terms)
        self.connections = self._bootstraps.connections
        self._desk.noticed = self._noticed
        self._lock = threading.Lock()
        self._cluster = request.cluster
        self._opened_s = time.monotonic()
        self._begun_s: dict[str, float] = {}
        self._waiting = set[str]()  # workers to start once a machine joins
        _tell(terms, self._desk.address, own, tokens, request.cluster)
        if terms.on_waiting is not None:
            stack.callback(terms.on_waiting, nothing_missing)
            terms.on_waiting(self._missing)
        self._wait(terms.wait_s)

    def start(self, workers: Sequence[str]) -> None:
        self.begin(workers)
        self.connections.wait_for(workers, lambda: self._check(workers))

    def begin(self, workers: Sequence[str]) -> None:
        """Start these; a worker without a machine starts when one joins as it."""
        for worker in workers:
            self._begun_s[worker] = time.monotonic()
        self._waiting.update(workers)
        self._hand_out(workers)

    def are_there(self, workers: Sequence[str]) -> bool:
        begun_s = min((self._begun_s[worker] for worker in workers), default=0.0)
        check = lambda: self._check(workers)  # noqa: E731
        return self.connections.have_called(workers, begun_s, check)

    @property
    def pids(self) -> Mapping[str, int]:
        """Empty: workers are on other machines."""
        return {}

    def present(self, cluster: Cluster, again: bool) -> Cluster | None:
        """Return the nodes whose machines have joined; None if none has.

        May be called from any thread.
        """
        with self._lock:
            self._cluster = cluster
        self._desk.follow(cluster)
        return self._there(cluster)

    def _noticed(self, worker: str, grace_s: float) -> None:
        """Report a SIGTERM of a machine; called by the thread that reads from it."""
        grace_s = min(max(0.0, grace_s), _MOST_GRACE_S)
        notice = Noticed(source=f"SIGTERM on {worker}", grace_s=grace_s)
        self.connections.noticed(worker, notice)

    def _there(self, cluster: Cluster) -> Cluster | None:
        machines = self._desk.machines
        names = {n.name for n in cluster.nodes if {*n.workers} <= {*machines}}
        return part_of(cluster, names) if names else None

    def _missing(self) -> Sequence[Node]:
        """Return the nodes to ask for: machines may also come by themselves."""
        if time.monotonic() < self._opened_s + _ASKS_AFTER_S:
            return ()
        with self._lock:
            cluster = self._cluster
        there = self._there(cluster)
        return [n for n in cluster.nodes if there is None or n not in there.nodes]

    def _wait(self, most_s: float) -> None:
        """Wait up to `most_s` for all nodes; raise BadInput if none is there then."""
        end_s = time.monotonic() + most_s
        while (found := self._there(self._cluster)) != self._cluster:
            if time.monotonic() > end_s:
                break
            time.sleep(_LOOK_S)
            self._desk.follow(self._cluster)
        names = [node.name for node in self._cluster.nodes]
        if found is None:
            raise BadInput(
                got=f"no machine joined within {most_s:g} s as one of "
                f"{', '.join(names)}",
                allowed="1 node or more whose machines have joined (--join.wait-s)",
                fix="run on each machine the command that the run printed for it",
            )
        there = {node.name for node in found.nodes}
        if gone := [name for name in names if name not in there]:
            warnings.warn(
                f"no machine joined as {', '.join(gone)} within {most_s:g} s: the run "
                "continues without them and adds them when they join",
                stacklevel=2,
            )

    def _hand_out(self, workers: Sequence[str]) -> None:
        """Start those of `workers` that wait to start and whose machines are there."""
        for worker, machine in self._desk.machines.items():
            if worker in workers and worker in self._waiting:
                self._waiting.discard(worker)
                found = self._bootstraps.bootstrap_for(worker, machine.address)
                self._desk.start(machine, found.text())

    def _check(self, workers: Sequence[str]) -> None:
        """Raise WorkerLost for a worker that will not connect.

        If no machine is there at all, the run waits for one.
        """
        self._hand_out(workers)
        machines = self._desk.machines
        for worker in workers:
            machine = machines.get(worker)
            if machine is None:
                if machines:
                    raise WorkerLost(worker, "has left: its machine's connection ended")
            elif worker not in self._waiting and machine.ended is not None:
                code, where = machine.ended, machine.address
                raise WorkerLost(
                    worker,
                    f"ended with code {code}; its output is on {where}",
                    has_failed=0 < code < _KILLED,
                )


def _certificate(folder: Path) -> OwnCertificate:
    try:
        return kept_certificate(folder)
    except (OSError, ValueError) as error:
        raise BadInput(
            got=f"an unusable certificate in {folder} ({error})",
            allowed="certificate.pem and key.pem as a run wrote them, or neither",
            fix=f"rm {folder}/*.pem; machines then need the new fingerprint",
        ) from error


def _opened(
    request: LaunchRequest, terms: JoinTerms, own: OwnCertificate, tokens: JoinTokens
) -> Desk:
    try:
        return Desk(
            terms.address,
            own,
            tokens,
            request.cluster,
            only_cpu=request.only_cpu or request.simulate,
            model_code=terms.model_code,
        )
    except OSError as error:
        raise _cannot_listen(terms.address, error) from error


def check_address(address: str) -> None:
    """Raise BadInput if machines cannot join at the address."""
    try:
        listen(address)[0].close()
    except OSError as error:
        raise _cannot_listen(address, error) from error


def _cannot_listen(address: str, error: OSError) -> BadInput:
    return BadInput(
        got=f"--join.address {address}: {error.strerror or error}",
        allowed="HOST:PORT: an address of this machine that others reach, and a free "
        "port",
        fix="choose another; ip address lists the addresses of this machine",
    )


def _tell(
    terms: JoinTerms,
    address: str,
    own: OwnCertificate,
    tokens: JoinTokens,
    cluster: Cluster,
) -> None:
    """Tell users what to type on which machine, on the screen and in a file."""
    lines = []
    for worker in (worker for node in cluster.nodes for worker in node.workers):
        command = ["hetjax", "worker", "--join", address, "--node", worker]
        command += ["--fingerprint", spelled(own.fingerprint)]
        if terms.model_code:
            command += ["--allow-model-code", terms.model_code]
        token = shlex.quote(str(tokens.file(worker).absolute()))
        lines.append(f"{shlex.join(command)} < {token}")
    fingerprint, file = terms.folder / FINGERPRINT, terms.folder / COMMANDS
    write_whole(fingerprint, f"{spelled(own.fingerprint)}\n", OWNER_ALONE)
    write_whole(file, "".join(f"{line}\n" for line in lines), OWNER_ALONE)
    terms.note(
        f"machines join at {address}; on each, run its command with its token as input "
        f"(also in {file}):\n" + "\n".join(f"  {line}" for line in lines)
    )
