# SPDX-License-Identifier: Apache-2.0
"""Makes network namespaces on one bridge, with links that can be slowed and cut.

Owns the `ip` and `tc` commands: namespaces, the bridge in its own namespace (so that no
packet filter of the machine sees the hosts' traffic), cables, rates, the choice of a
free subnet, and the processes in a namespace. Does not own what a host is, nor when
things are removed (`hosts.py`).
"""

import ipaddress
import json
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from experiments.testbed import processes

HOST_END = "eth0"  # a host's name for its end of the cable
_BRIDGE = "bridge"
_NAMESPACES = Path("/run/netns")
# The bucket is what a link that was idle sends at once. It must be small, or short
# messages would cross at no cost. But 64 KiB packets must fit, and timers may be late
# by this much.
_BURST_S = 0.005
_LEAST_BURST_BYTES = 80_000
_LATENCY = "200ms"  # of a full queue
_LINK_UP_S = 10.0


def run(*words: str) -> str:
    """Run a command and return its output. Raises RuntimeError with its errors."""
    # in its own session: else the Ctrl-C that ends a testbed would stop its removal
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def free_subnet(first: int, routes: str | None = None) -> ipaddress.IPv4Network:
    """Return a 10.77.x.0/24 that no route of the machine uses, from x = first on.

    `routes` is the output of `ip -4 -json route show table all`.
    """
    text = run("ip", "-4", "-json", "route", "show", "table", "all")
    taken = [
        ipaddress.ip_network(route["dst"], strict=False)
        for route in json.loads(text if routes is None else routes)
        if route["dst"] != "default"
    ]
    # routes wider than /16 lead to distant networks through a gateway; the testbed may
    # shadow 256 addresses of such a network
    narrow = [network for network in taken if network.prefixlen >= 16]
    for n in range(256):
        subnet = ipaddress.IPv4Network(f"10.77.{(first + n) % 256}.0/24")
        if not any(subnet.overlaps(network) for network in narrow):
            return subnet
    raise RuntimeError("all of 10.77.0.0/16 is in use; no subnet is left for a testbed")


def namespaces() -> set[str]:
    """Return the names of the machine's named network namespaces."""
    return {file.name for file in _NAMESPACES.glob("*")}


def make_namespace(name: str) -> None:
    """Make a network namespace with its loopback up."""
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")


def delete_namespace(name: str) -> None:
    """Delete a namespace, its interfaces and its processes; a missing one is no error.

    Once the name is gone no process can enter, but those inside would keep it alive.
    """
    if name in namespaces():
        inode = (_NAMESPACES / name).stat().st_ino
        run("ip", "netns", "delete", name)
        processes.end(lambda: _inside(inode))


def members(name: str) -> set[int]:
    """Return the ids of the processes in a namespace, none if it is gone."""
    if name not in namespaces():
        return set()
    return _inside((_NAMESPACES / name).stat().st_ino)


def enter(name: str) -> list[str]:
    """Return the words that run a command in a namespace, as the same process.

    These avoid `ip netns exec`, which hides /sys/fs/cgroup from the command.
    """
    return ["nsenter", f"--net={_NAMESPACES / name}", "--"]


def make_bridge(namespace: str) -> None:
    """Make the bridge that all cables of a testbed are plugged into."""
    run("ip", "-n", namespace, "link", "add", _BRIDGE, "type", "bridge")
    run("ip", "-n", namespace, "link", "set", _BRIDGE, "up")


def plug_host(bridge: str, port: str, host: str, interface: str) -> None:
    """Lay a cable from a port of the bridge to a host with an address `a.b.c.d/24`."""
    cable = ("type", "veth", "peer", "name", HOST_END, "netns", host)
    run("ip", "-n", bridge, "link", "add", port, *cable)
    run("ip", "-n", bridge, "link", "set", port, "master", _BRIDGE, "up")
    run("ip", "-n", host, "address", "add", interface, "dev", HOST_END)
    run("ip", "-n", host, "link", "set", HOST_END, "up")


def plug_machine(bridge: str, link: str, interface: str) -> None:
    """Lay a cable from the bridge to this process's own namespace."""
    port = "machine"
    cable = ("type", "veth", "peer", "name", port, "netns", bridge)
    run("ip", "link", "add", link, *cable)
    run("ip", "-n", bridge, "link", "set", port, "master", _BRIDGE, "up")
    run("ip", "address", "add", interface, "dev", link)
    run("ip", "link", "set", link, "up")


def unplug_machine(link: str) -> None:
    """Remove this process's own cable; a missing one is no error."""
    if any(there["ifname"] == link for there in _links()):
        run("ip", "link", "delete", link)


def set_port(bridge: str, port: str, state: str) -> None:
    """Set a port of the bridge `up` or `down`; the host sees its carrier change."""
    run("ip", "-n", bridge, "link", "set", port, state)


def shape(host: str, mbit_per_s: float | None) -> None:
    """Limit what a host sends, even while it sends; None lifts the limit."""
    if mbit_per_s is not None:
        run("tc", "-n", host, "qdisc", "replace", *_root(), *bucket(mbit_per_s))
    elif "qdisc tbf" in run("tc", "-n", host, "qdisc", "show", "dev", HOST_END):
        run("tc", "-n", host, "qdisc", "delete", *_root())


def bucket(mbit_per_s: float) -> list[str]:
    """Return the words of a token bucket, see tc-tbf(8)."""
    bytes_per_s = mbit_per_s * 1e6 / 8
    burst_bytes = max(_LEAST_BURST_BYTES, round(bytes_per_s * _BURST_S))
    rate = f"{round(mbit_per_s * 1e6)}bit"
    return ["tbf", "rate", rate, "burst", str(burst_bytes), "latency", _LATENCY]


def wait_for_links(bridge: str, hosts: Iterable[str]) -> None:
    """Wait until every cable carries; the kernel may take a second to notice."""
    end_s = time.monotonic() + _LINK_UP_S
    for namespace in (bridge, *hosts):
        while down := _down(namespace):
            if time.monotonic() > end_s:
                raise RuntimeError(f"{namespace}: {', '.join(down)} did not come up")
            time.sleep(0.02)


def _inside(inode: int) -> set[int]:
    def is_inside(pid: int) -> bool:
        with suppress(OSError):  # it has ended, or belongs to another container
            return Path(f"/proc/{pid}/ns/net").stat().st_ino == inode
        return False

    return {pid for pid in processes.all_alive() if is_inside(pid)}


def _root() -> tuple[str, ...]:
    return ("dev", HOST_END, "root")


def _down(namespace: str) -> list[str]:
    # a loopback has no such state; a cable that was cut is down on purpose
    links = [link for link in _links("-n", namespace) if link["ifname"] != "lo"]
    asked = [link for link in links if "UP" in link["flags"]]
    return [link["ifname"] for link in asked if link["operstate"] != "UP"]


def _links(*where: str) -> list[dict]:
    return json.loads(run("ip", *where, "-json", "link", "show"))
