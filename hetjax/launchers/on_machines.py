# SPDX-License-Identifier: Apache-2.0
"""Implements what launchers `slurm` and `ssh` share: workers reached by a program.

Owns which machine a worker is started on, which of its cards the worker sees, the probe
of the cards, and which nodes are there during a run. Does not own how a program reaches
a machine (`on_slurm.py`, `over_ssh.py`), the processes themselves
(`local_processes.py`), nor which machine stands for which node
(`hetjax/cluster/machines.py`).
"""

import os
import socket
import subprocess
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Protocol

from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.cluster.local_devices import LocalDevice, read_devices
from hetjax.cluster.machines import Machine, matched, of_kind
from hetjax.errors import BadInput
from hetjax.launchers.isolation import memory_share, visible_devices
from hetjax.launchers.launcher import LaunchRequest, RunOnNode
from hetjax.launchers.local_processes import LOOPBACK, OnThisMachine, WorkerPlace

_PROBE, _PROBE_S = "hetjax.launchers.device_probe", 180.0
_EVERY_S = 60.0  # between checks for lost machines that are back
_ANY_PORT = 9  # nothing is sent there


class Reach(Protocol):
    """A set of machines, and the way to run a command on one of them."""

    @property
    def system(self) -> str:
        """The name of the set, for messages."""
        ...

    @property
    def controller(self) -> str:
        """Where machines reach this one; empty: its address on the route to them."""
        ...

    @property
    def fix(self) -> str:
        """The remedy for a node that has no machine."""
        ...

    @property
    def unreached(self) -> str:
        """The remedy for a machine that does not answer."""
        ...

    def machines(self, looks: bool) -> list[Machine]:
        """Return the machines that are there now; if `looks`, probe their cards.

        Warns about missing machines. Raises BadInput if they cannot be determined.
        """
        ...

    def seen(self, machine: Machine) -> Sequence[LocalDevice]:
        """Return the machine's cards, if they were probed."""
        ...

    def place(self, machine: Machine, variables: Mapping[str, str]) -> WorkerPlace:
        """Return the place of a worker on the machine, with these variables set."""
        ...

    def spelled(self, word: str) -> str:
        """Return a word as it must be spelled after the prefix of a place."""
        ...


def placed(
    reach: Reach, cluster: Cluster, machines: Sequence[Machine], simulate: bool
) -> dict[str, Machine]:
    """Return a machine for every worker; raise BadInput if one gets none."""
    found = matched(cluster, machines, simulate)
    for node in cluster.nodes:
        if node.workers[0] not in found:
            there = ", ".join(f"{m.count} x {m.device} ({m.id})" for m in machines)
            each = f" on {node.hosts} machines" if node.hosts > 1 else ""
            raise BadInput(
                got=f"node {node.name!r} wants {node.count} x {node.device}{each}; "
                f"there {'is' if len(machines) == 1 else 'are'} {there or 'none'}",
                allowed="for each host of each node, a machine of "
                f"{reach.system} with the node's name or devices",
                fix=reach.fix,
            )
    return found


def looked_at(
    reach: Reach, machines: Iterable[Machine]
) -> dict[str, list[LocalDevice] | str]:
    """Probe machines, all at once; return each one's cards, or the failure, by id."""

    def look(machine: Machine) -> list[LocalDevice] | str:
        try:
            done = run_on_machine(reach, machine, {}, [_PROBE], _PROBE_S)
            return read_devices(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return f"no answer in {_PROBE_S:g} s"
        except (IndexError, ValueError, TypeError):
            said = done.stderr.strip().splitlines()
            return said[-1] if said else f"exit code {done.returncode}"

    asked = list(machines)
    with ThreadPoolExecutor(len(asked) or 1) as pool:
        return dict(zip((m.id for m in asked), pool.map(look, asked), strict=True))


def runner(reach: Reach, cluster: Cluster) -> RunOnNode:
    """Return a function that runs `python -m MODULE ARGUMENT` on a node's machine."""
    machines = placed(reach, cluster, reach.machines(looks=True), simulate=False)

    def run(
        node: Node, module: str, argument: str, limit_s: float
    ) -> subprocess.CompletedProcess[str]:
        machine = machines[node.workers[0]]
        variables = _variables(reach, node, machine)
        return run_on_machine(reach, machine, variables, [module, argument], limit_s)

    return run


class OnMachines:
    """A process on each node's machine; `stack` ends them all."""

    def __init__(self, request: LaunchRequest, reach: Reach, stack: ExitStack) -> None:
        """Raise BadInput if a node has no machine."""
        self._reach, self._cluster = reach, request.cluster
        self._simulate = request.simulate
        self._only_cpu = request.only_cpu or request.simulate
        self._there = reach.machines(looks=not self._only_cpu)
        self._machines = placed(reach, request.cluster, self._there, request.simulate)
        self._own = _names(self._there)  # hosts that nodes may be named after
        self._places: dict[str, WorkerPlace] = {}
        self._processes = OnThisMachine(
            request.logs,
            stack,
            places=self._places,
            address=reach.controller or address_towards(self._machines.values()),
            terms=request.terms,
        )
        self.connections = self._processes.connections
        self._looks = stack.enter_context(ThreadPoolExecutor(1))
        self._look: Future[list[Machine]] | None = None
        self._looked_s = time.monotonic()

    def start(self, workers: Sequence[str]) -> None:
        self._place(workers)
        self._processes.start(workers)

    def begin(self, workers: Sequence[str]) -> None:
        self._place(workers)
        self._processes.begin(workers)

    def are_there(self, workers: Sequence[str]) -> bool:
        return self._processes.are_there(workers)

    @property
    def pids(self) -> Mapping[str, int]:
        """Empty: only the programs that reach the workers run here."""
        return {}

    def present(self, cluster: Cluster, again: bool) -> Cluster | None:
        """Return the nodes whose machines are there; None if none is."""
        if cluster != self._cluster:
            self._cluster = cluster
            self._match(self._there)
        if again:
            self._match(self._machines_now())
        elif self._look is not None and self._look.done():
            self._match(self._look.result())
        elif self._is_due():
            self._look = self._looks.submit(self._machines_now)
        there = {n.name for n in cluster.nodes if {*n.workers} <= {*self._machines}}
        return part_of(cluster, there) if there else None

    def _is_due(self) -> bool:
        """Return whether to check for lost machines that are back.

        New losses need no check: connections report them.
        """
        workers = {worker for node in self._cluster.nodes for worker in node.workers}
        is_time = time.monotonic() - self._looked_s >= _EVERY_S
        return is_time and self._look is None and not workers <= {*self._machines}

    def _match(self, there: list[Machine]) -> None:
        self._look, self._looked_s, self._there = None, time.monotonic(), there
        self._own |= _names(there)
        found = matched(self._awaited(), there, self._simulate, self._machines)
        self._machines = found or self._machines

    def _awaited(self) -> Cluster:
        """Return the cluster without simulated nodes that wait for their own host.

        Any machine can simulate any node. But if another machine took a node that is
        named after a lost host, the node would not return to that host.
        """
        lost = self._own - _names(self._there) if self._simulate else set()
        stay = {node.name for node in self._cluster.nodes} - lost
        return part_of(self._cluster, stay) if stay else self._cluster

    def _machines_now(self) -> list[Machine]:
        """Return the present machines; if unknown, the previous ones with a warning."""
        try:
            return self._reach.machines(looks=not self._only_cpu)
        except BadInput as bad:
            warnings.warn(
                f"assuming no change in {self._reach.system}: {bad}", stacklevel=2
            )
            return self._there

    def _place(self, workers: Sequence[str]) -> None:
        """Note where these are to be started, and which devices they see there."""
        nodes = {worker: n for n in self._cluster.nodes for worker in n.workers}
        for worker in workers:
            machine = self._machines[worker]
            variables = (
                visible_devices((), ())
                if self._only_cpu
                else _variables(self._reach, nodes[worker], machine)
            )
            self._places[worker] = self._reach.place(machine, variables)


def _names(machines: Iterable[Machine]) -> set[str]:
    return {name for machine in machines for name in machine.named}


def _variables(reach: Reach, node: Node, machine: Machine) -> dict[str, str]:
    """Return what shows a worker its own cards; without a probe, all of them."""
    if machine.device == "cpu":
        return visible_devices((), ())
    here = reach.seen(machine)
    own = list(of_kind(machine.device, here))[: node.devices_per_host]
    shown = visible_devices(own, here) if own else {}
    return shown | (
        {} if machine.device.startswith("TPU") else memory_share(os.environ)
    )


def run_on_machine(
    reach: Reach,
    machine: Machine,
    variables: Mapping[str, str],
    words: Iterable[str],
    limit_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m WORDS` on a machine, with these variables set there.

    Raises subprocess.TimeoutExpired after the limit.
    """
    place = reach.place(machine, variables)
    return subprocess.run(
        [*place.prefix, place.python, "-m", *map(reach.spelled, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def address_towards(machines: Iterable[Machine]) -> str:
    """Return this machine's address on the route to the first that is not this one."""
    found = [_own_address(number_of(machine.address)) for machine in machines]
    others = [address for address in found if not address.startswith("127.")]
    return [*others, *found, LOOPBACK][0]


def _own_address(address: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((address, _ANY_PORT))
        return way.getsockname()[0]
    return LOOPBACK


def number_of(address: str) -> str:
    """Resolve an address, so that all machines mean the same one.

    Returns it unchanged if this machine does not know it.
    """
    with suppress(OSError):
        return socket.gethostbyname(address)
    return address
