# SPDX-License-Identifier: Apache-2.0
"""Parses and opens addresses of processes: host:port (0: any free port) or unix:path.

Owns the socket for an address, listening at an address, and the test whether a
connection stays on this machine. Does not own who may connect (`door.py`,
`handshake.py`).
"""

import ipaddress
import re
import socket
from collections.abc import Iterator
from contextlib import suppress

from hetjax.errors import BadInput

_HOST_AND_PORT = re.compile(r"(?P<host>[A-Za-z0-9_.-]{1,253}):(?P<port>[0-9]{1,5})")
_MOST_PORT = 65_535


def socket_for(address: str) -> socket.socket:
    """Return a socket that can be bound or connected to the address."""
    unix = address.startswith("unix:")
    found = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    if not unix:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return found


def endpoint(address: str) -> str | tuple[str, int]:
    """Return the address in the form that `bind` and `connect` take."""
    if address.startswith("unix:"):
        return address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    return host, int(port)


def listen(address: str) -> tuple[socket.socket, str]:
    """Listen on an address; return the socket and the address with the chosen port."""
    found = socket_for(address)
    found.bind(endpoint(address))
    found.listen(64)
    if found.family == socket.AF_UNIX:
        return found, address
    host, port = found.getsockname()[:2]
    return found, f"{host}:{port}"


def stays_here(found: socket.socket) -> bool:
    """Return whether the connection stays on this machine, out of others' reach."""
    if found.family == socket.AF_UNIX:
        return True
    with suppress(ValueError):
        ends = found.getsockname()[0], found.getpeername()[0]
        return all(ipaddress.ip_address(end).is_loopback for end in ends)
    return False


def address_problems(option: str, address: str, *, least: int) -> Iterator[BadInput]:
    """Yield what is wrong with a user's address; its port must be at least `least`."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None or not least <= int(found["port"]) <= _MOST_PORT:
        yield BadInput(
            got=f"{option} {address}",
            allowed=f"HOST:PORT, a name or an IPv4 address and a port from {least} to "
            f"{_MOST_PORT}",
            fix=f"give {option} 10.0.0.1:7411, for example",
        )
    elif found["host"] == "0.0.0.0":
        yield BadInput(
            got=f"{option} {address}, which others cannot connect to",
            allowed="one address of the run's machine that other machines can reach",
            fix="list the addresses of the run's machine with: ip address",
        )
