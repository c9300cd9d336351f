# SPDX-License-Identifier: Apache-2.0
"""Makes unequal hosts of one Linux machine: each a network, a link rate, a CPU share.

Owns the description of a host, the set-up of all hosts and their removal in reverse
order, and the words that run a command on a host. Does not own the making of a
namespace (`network.py`) or a quota (`cpu_quota.py`), the end of a process
(`processes.py`), nor Ray (`ray_nodes.py`).
"""

import itertools
import os
import re
import shutil
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from experiments.testbed import cpu_quota, network, processes
from hetjax.errors import BadInput

LOOPBACK = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_MOST_HOSTS = 250  # of one /24
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# share of a machine that quotas may take: the rest is for Ray and the driver
_QUOTA_SHARE = 0.9
_QUOTA_LESS = (
    "pass --quota-less (or quota_less=True) to run all hosts on 127.0.0.1 at full speed"
)
JOIN = 'echo $$ > "$0" && exec "$@"'
_serial = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One host; `cpu_percent` is of one core. None means no limit."""

    name: str
    cpu_percent: float | None = None
    egress_mbit_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a host is while the testbed exists."""

    namespace: str
    port: str
    address: str
    cpu_group: Path | None


class Testbed:
    """Unequal hosts for the time of a `with` block. Raises BadInput if set-up fails.

    SIGTERM, SIGHUP and Ctrl-C leave the block by an exception, so everything is
    removed. With `quota_less` nothing is built: all hosts are this machine, unlimited.
    """

    __test__ = False  # no test class, though pytest would take it for one

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        name: str = "hetjax",
        quota_less: bool = False,
    ) -> None:
        _check(hosts, name)
        self.hosts = tuple(hosts)
        self.quota_less = quota_less
        self.controller_address = LOOPBACK
        self._name = name
        self._link = f"hj-{os.getpid()}-{next(_serial)}"  # at most 15 characters
        self._places: dict[str, _Place] = {}
        self._undo = ExitStack()
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        if not self.quota_less:
            problem = obstacle(self.hosts)
            if problem is not None:
                raise problem
            _warn_of_quotas(self.hosts)
            self._signals.enter_context(processes.ended_by_signals())
            try:
                with processes.undisturbed():
                    clear_abandoned(self._name)
                    self._build()
                network.wait_for_links(self._bridge, self._namespaces())
            except BaseException:
                self._take_down()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._take_down()

    def address(self, host: str) -> str:
        """Return a host's IPv4 address."""
        return LOOPBACK if self.quota_less else self._place(host).address

    def prefix(self, host: str) -> list[str]:
        """Return the words before a command that run it on a host, under its quota.

        The process keeps its id through all of them.
        """
        words = self.network_prefix(host)
        group = self.cpu_group(host)
        return words if group is None else ["sh", "-c", JOIN, str(group), *words]

    def network_prefix(self, host: str) -> list[str]:
        """Return the words that run a command on a host outside its quota."""
        return [] if self.quota_less else network.enter(self._place(host).namespace)

    def cpu_group(self, host: str) -> Path | None:
        """Return the file that takes a process's id to put it under a host's quota."""
        group = None if self.quota_less else self._place(host).cpu_group
        return group and group / "cgroup.procs"

    def members(self, host: str) -> set[int]:
        """Return the ids of the processes on a host."""
        if self.quota_less:
            return set()
        place = self._place(host)
        found = network.members(place.namespace)
        if place.cpu_group is not None:
            found |= cpu_quota.members(place.cpu_group)
        return found

    def hold_quotas(self) -> None:
        """Put processes that were started outside the hosts' quotas under them."""
        for host in self.hosts:
            group = self.cpu_group(host.name)
            if group is None:
                continue
            for pid in self.members(host.name):
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    group.write_text(str(pid))

    def set_link(self, host: str, mbit_per_s: float | None) -> None:
        """Change the rate at which a host sends, even while it sends."""
        _check_positive(f"host {host!r}", "link rate", mbit_per_s)
        network.shape(self._place(host).namespace, mbit_per_s)

    def cut(self, host: str) -> None:
        """Pull a host's cable: data sent in either direction is lost, silently."""
        network.set_port(self._bridge, self._place(host).port, "down")

    def mend(self, host: str) -> None:
        """Plug a host's cable in again and wait until it carries."""
        place = self._place(host)
        network.set_port(self._bridge, place.port, "up")
        network.wait_for_links(self._bridge, [place.namespace])

    @property
    def _label(self) -> str:
        return f"{_prefix(self._name)}-{self._link}"

    @property
    def _bridge(self) -> str:
        return f"{self._label}.bridge"

    def _namespaces(self) -> list[str]:
        return [place.namespace for place in self._places.values()]

    def _place(self, host: str) -> _Place:
        if self.quota_less:
            raise BadInput(
                got=f"a quota-less testbed, whose host {host!r} has no link of its own",
                allowed="links can be slowed and cut where namespaces are made",
                fix="run as root without quota_less",
            )
        if host not in self._places:
            raise BadInput(
                got=f"host {host!r}",
                allowed=f"a host of this testbed: {', '.join(self._places)}",
                fix="name one of them, inside the `with` block",
            )
        return self._places[host]

    def _build(self) -> None:
        # register the removal of each thing before making it
        self._undo.callback(network.delete_namespace, self._bridge)
        network.make_namespace(self._bridge)
        network.make_bridge(self._bridge)
        subnet = network.free_subnet(os.getpid() % 256)
        self.controller_address = str(subnet[1])
        self._undo.callback(network.unplug_machine, self._link)
        network.plug_machine(self._bridge, self._link, f"{subnet[1]}/24")
        for n, host in enumerate(self.hosts):
            self._build_host(host, f"host{n}", str(subnet[2 + n]))
        # all at once; processes that are just starting end with their host
        self._undo.callback(processes.end, self._members)

    def _build_host(self, host: Host, port: str, address: str) -> None:
        namespace = f"{self._label}-{host.name}"
        self._undo.callback(network.delete_namespace, namespace)
        network.make_namespace(namespace)
        network.plug_host(self._bridge, port, namespace, f"{address}/24")
        network.shape(namespace, host.egress_mbit_per_s)
        self._places[host.name] = _Place(
            namespace=namespace,
            port=port,
            address=address,
            cpu_group=self._build_group(namespace, host.cpu_percent),
        )

    def _build_group(self, name: str, cpu_percent: float | None) -> Path | None:
        if cpu_percent is None:
            return None
        controller = cpu_quota.find_controller()
        assert controller is not None  # `obstacle` checked this
        self._undo.callback(cpu_quota.remove_group, controller.mount / name)
        return cpu_quota.make_group(controller, name, cpu_percent)

    def _members(self) -> set[int]:
        return set().union(*map(self.members, self._places))

    def _take_down(self) -> None:
        try:
            with processes.undisturbed():
                self._undo.close()
                self._places.clear()
        finally:
            self._signals.close()


def obstacle(hosts: Sequence[Host]) -> BadInput | None:
    """Return why these hosts cannot be built on this machine, or None if they can."""
    lacking = _lacking(any(host.cpu_percent is not None for host in hosts))
    if lacking is None:
        return None
    allowed = (
        "Linux, as root, with ip and tc (iproute2), nsenter (util-linux) and, for "
        "quotas, a writable cgroup `cpu` controller"
    )
    return BadInput(got=lacking, allowed=allowed, fix=f"run as root, or {_QUOTA_LESS}")


def _lacking(needs_quota: bool) -> str | None:
    if os.uname().sysname != "Linux":
        return f"{os.uname().sysname}, which has no network namespaces"
    if os.geteuid() != 0:
        return f"user id {os.geteuid()}, not root"
    held = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
    for name, bit in _CAPABILITIES.items():
        if held is None or not int(held[1], 16) >> bit & 1:
            return f"root without {name}, as in a container"
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"no `{tool}` command"
    controller = cpu_quota.find_controller() if needs_quota else None
    if needs_quota and (controller is None or not os.access(controller.mount, os.W_OK)):
        return "no writable cgroup `cpu` controller"
    return None


def _check(hosts: Sequence[Host], name: str) -> None:
    names = [host.name for host in hosts]
    for word in (name, *names):
        if not _NAME.fullmatch(word):
            raise BadInput(
                got=f"the name {word!r}",
                allowed="1 to 64 letters, digits, _ or -, not beginning with -",
                fix="choose another name",
            )
    if not 1 <= len(set(names)) == len(names) <= _MOST_HOSTS:
        raise BadInput(
            got=f"{len(names)} hosts, {len(set(names))} different names",
            allowed=f"1 to {_MOST_HOSTS} hosts of different names",
            fix="name each host once, as in --host fast:80:1000 --host slow:20:100",
        )
    for host in hosts:
        _check_positive(f"host {host.name!r}", "cpu_percent", host.cpu_percent)
        _check_positive(f"host {host.name!r}", "link rate", host.egress_mbit_per_s)


def _check_positive(owner: str, quantity: str, value: float | None) -> None:
    if value is not None and not 0.1 <= value <= 1e6:
        raise BadInput(
            got=f"{owner} with {quantity} {value:g}",
            allowed="0.1 to 1e6 (percent of one core, Mbit/s), None for no limit",
            fix="give a limit in this range, or leave it out",
        )


def _warn_of_quotas(hosts: Sequence[Host]) -> None:
    percent = sum(host.cpu_percent or 0.0 for host in hosts)
    most = _QUOTA_SHARE * 100 * len(os.sched_getaffinity(0))
    if percent > most:
        warnings.warn(
            f"cpu_percent of all hosts is {percent:g}, more than {most:g} of this "
            "machine: hosts that compute at the same time slow each other",
            stacklevel=3,
        )


def _prefix(name: str) -> str:
    """Return how labels of a name start in the process-id space of this process."""
    pid_space = Path("/proc/self/ns/pid").stat().st_ino  # a container has its own
    return f"{name}-{pid_space}"


def clear_abandoned(name: str) -> None:
    """Remove the remains of testbeds that were killed by SIGKILL.

    Those of other containers stay: this process cannot see whether their makers live.
    """
    pattern = re.compile(rf"{re.escape(_prefix(name))}-(hj-(\d+)-\d+)[.-].+")
    controller = cpu_quota.find_controller()
    groups = {g.name: g for g in controller.mount.glob("*")} if controller else {}
    for found in sorted(network.namespaces() | set(groups)):
        maker = pattern.fullmatch(found)
        if maker is None or Path("/proc", maker[2]).exists():
            continue
        warnings.warn(f"removing {found}, left by process {maker[2]}", stacklevel=3)
        network.unplug_machine(maker[1])
        network.delete_namespace(found)
        if found in groups:
            cpu_quota.remove_group(groups[found])
