# SPDX-License-Identifier: Apache-2.0
"""Addresses of processes: host:port (port 0: any free one), or unix:path.

Owns what a socket for an address is, listening at one, and which connections do not
leave this machine. Does not own who may connect (`door.py`, `handshake.py`).
"""

import ipaddress
import socket
from contextlib import suppress


def socket_for(address: str) -> socket.socket:
    """A socket that can be bound or connected there."""
    unix = address.startswith("unix:")
    found = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    if not unix:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return found


def endpoint(address: str) -> str | tuple[str, int]:
    """What `bind` and `connect` take for the address."""
    if address.startswith("unix:"):
        return address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    return host, int(port)


def listen(address: str) -> tuple[socket.socket, str]:
    """Listen on an address; return it with the port that was chosen."""
    found = socket_for(address)
    found.bind(endpoint(address))
    found.listen(64)
    if found.family == socket.AF_UNIX:
        return found, address
    host, port = found.getsockname()[:2]
    return found, f"{host}:{port}"


def stays_here(found: socket.socket) -> bool:
    """Whether what is sent never leaves this machine: nobody else can come between."""
    if found.family == socket.AF_UNIX:
        return True
    with suppress(ValueError):
        ends = found.getsockname()[0], found.getpeername()[0]
        return all(ipaddress.ip_address(end).is_loopback for end in ends)
    return False
