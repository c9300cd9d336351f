# SPDX-License-Identifier: Apache-2.0
"""Defines the launcher `ssh`: workers on the hosts of a file, an `ssh` each.

Owns the arguments of `ssh` and the shell command on the host, and leaves out hosts that
do not answer. Keys, users and known hosts are ssh's own business: no check is weakened,
and no key is copied anywhere. Does not own the file of hosts
(`hetjax/cluster/hosts.py`), nor where a worker is started (`on_machines.py`).

The end of an `ssh` does not end its worker: the worker ends when its controller does.
"""

import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.hosts import Host, load_hosts
from hetjax.cluster.local_devices import LocalDevice
from hetjax.cluster.machines import Machine, cluster_of_machines, parts_by_kind
from hetjax.errors import BadInput
from hetjax.launchers.isolation import passed_on
from hetjax.launchers.launcher import Launcher, LaunchRequest, RunOnNode
from hetjax.launchers.local_processes import WorkerPlace
from hetjax.launchers.on_machines import (
    OnMachines,
    looked_at,
    number_of,
    runner,
)
from hetjax.mesh.process_setup import malloc_environment

_ANSWER_S = 10  # seconds until a host counts as gone
_SSH = (
    *("ssh", "-T", "-a", "-x"),  # no terminal, no agent, no display there
    *("-o", "BatchMode=yes"),  # no user can answer a question
    *("-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes"),
    *("-o", f"ConnectTimeout={_ANSWER_S}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)


def open_launcher(request: LaunchRequest, stack: ExitStack) -> Launcher:
    """Make the launcher `ssh`; BadInput if a node has no host that answers."""
    return OnMachines(request, SshHosts(request.hosts), stack)


def find_cluster(hosts: Path | None) -> Cluster:
    """Return the cluster of the hosts that answer."""
    return cluster_of_machines("ssh", SshHosts(hosts).machines(looks=True))


def run_on_nodes(cluster: Cluster, hosts: Path | None) -> RunOnNode:
    """Return a function that runs a module on a node's host."""
    return runner(SshHosts(hosts), cluster)


class SshHosts:
    """The hosts of a file; BadInput if it is not a file of hosts."""

    system = "the file of hosts"
    unreached = (
        "make `ssh -o BatchMode=yes ADDRESS true` succeed on this machine: log in once "
        "to compare the host's key, and add your public key to ~/.ssh/authorized_keys "
        "there, even if that host is this machine"
    )

    def __init__(self, file: Path | None) -> None:
        assert file is not None, "checked with the settings"
        found = load_hosts(file)
        if shutil.which("ssh") is None:
            raise BadInput(
                got="no ssh on this machine",
                allowed="OpenSSH's client",
                fix="install it, for instance: apt-get install openssh-client",
            )
        self._hosts = {host.name: host for host in found.hosts}
        self._seen: dict[str, list[LocalDevice]] = {}
        self.controller = found.controller
        self.fix = (
            f"add a [[host]] to {file}, or leave --cluster out: the hosts' devices are "
            "then the cluster"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all hosts in the file."""
        return tuple(self._hosts)

    def machines(self, looks: bool) -> list[Machine]:
        hosts = list(self._hosts.values())
        unseen = [host for host in hosts if host.name not in self._seen]
        answers = _answers([host for host in hosts if not looks or host not in unseen])
        if looks:
            answers |= self._look(unseen)
        for name, why in answers.items():
            if why:
                warnings.warn(f"host {name} is left out: {why}", stacklevel=2)
        there = [host for host in hosts if not answers[host.name]]
        if not there:
            raise BadInput(
                got="no host that answers: "
                + "; ".join(f"{name}: {why}" for name, why in answers.items()),
                allowed="1 host or more that ssh reaches without a prompt",
                fix=f"try it yourself: {shlex.join([*_SSH, *_to(hosts[0])])} true",
            )
        return [part for host in there for part in self._parts(host, looks)]

    def seen(self, machine: Machine) -> Sequence[LocalDevice]:
        return self._seen.get(machine.id, ())

    def place(self, machine: Machine, variables: Mapping[str, str]) -> WorkerPlace:
        host = self._hosts[machine.id]
        passed = passed_on(os.environ) | malloc_environment() | dict(variables)
        set_there = [f"{name}={value}" for name, value in passed.items()]
        if host.directory:
            words = ["cd", shlex.quote(host.directory), "&&"]
        else:  # in the same directory; else at home, and the shell logs why
            words = ["cd", shlex.quote(os.getcwd()), "||", "cd", ";"]
        words += ["exec", "env", *map(shlex.quote, set_there)]
        return WorkerPlace(
            prefix=(*_SSH, *_to(host), *words),
            python=shlex.quote(host.python or sys.executable),
            address=number_of(host.peer_address),
        )

    def spelled(self, word: str) -> str:
        return shlex.quote(word)

    def _look(self, hosts: Sequence[Host]) -> dict[str, str]:
        """Probe the cards of hosts; return failures by name, empty without one."""
        found = looked_at(self, map(_machine, hosts))
        self._seen |= {n: c for n, c in found.items() if not isinstance(c, str)}
        return {n: c if isinstance(c, str) else "" for n, c in found.items()}

    def _parts(self, host: Host, looks: bool) -> list[Machine]:
        cards = self._seen.get(host.name, []) if looks else []
        return parts_by_kind(_machine(host, len(cards) or 1), cards)


def _machine(host: Host, count: int = 1) -> Machine:
    """Return the machine of a host that was not probed."""
    return Machine(
        id=host.name,
        address=host.peer_address,
        device="cpu",
        count=count,
        named=(host.name,),
    )


def _to(host: Host) -> list[str]:
    user = ["-l", host.user] if host.user else []
    port = ["-p", str(host.port)] if host.port else []
    return [*user, *port, "--", host.address]


def _answers(hosts: Sequence[Host]) -> dict[str, str]:
    """Return why each of these cannot be reached, by name; empty if it can."""

    def ask(host: Host) -> str:
        try:
            done = subprocess.run(
                [*_SSH, *_to(host), "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=3 * _ANSWER_S,
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {3 * _ANSWER_S} s"
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return said[-1] if done.returncode else ""

    with ThreadPoolExecutor(len(hosts) or 1) as pool:
        return dict(zip((h.name for h in hosts), pool.map(ask, hosts), strict=True))
