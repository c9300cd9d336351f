# SPDX-License-Identifier: Apache-2.0
"""Reads files of hosts: TOML that names machines, and how ssh reaches each of them.

Owns the keys of the file and their conditions. Does not own ssh's own settings, which
stay the user's, nor what runs there (`launchers/over_ssh.py`).
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetjax.errors import BadInput
from hetjax.files.parsing import parsed, read_file, toml_table
from hetjax.files.tables import read_fields, read_record
from hetjax.names import RULE, is_node

_PORTS = range(65_536)
# ssh reads a first dash as an option, and an @ as the end of a user's name
_ADDRESS = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.:%\[\]-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.$-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine that ssh reaches at `address`: a name, an alias of ssh's, or numbers.

    If `user` is empty or `port` is 0, ssh chooses. If `python` or the working
    `directory` is empty, it is the controller's own, in a folder that all share.
    `peers` is the address at which other hosts reach this one, if it differs.

    >>> Host(name="big", address="10.0.0.2", user="me").peer_address
    '10.0.0.2'
    """

    name: str
    address: str
    user: str = ""
    port: int = 0
    python: str = ""
    directory: str = ""
    peers: str = ""

    @property
    def peer_address(self) -> str:
        return self.peers or self.address


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Hosts in the order of their file; `controller` is the address at which they reach
    the controller. Empty: the address from which the controller reaches them."""

    hosts: tuple[Host, ...]
    controller: str = ""


def load_hosts(path: Path) -> Hosts:
    """Read a file of hosts. Raises BadInput, which starts with the path."""
    return read_file(path, parse_hosts, what="file of hosts")


def parse_hosts(text: str) -> Hosts:
    """Read the TOML text of hosts. Raises BadInput, which names the place."""
    raw = parsed(
        text,
        toml_table,
        what="TOML",
        allowed="TOML: [[host]] tables with name and address",
        fix="correct the file there",
    )
    values = read_record(
        raw, where="", required={"host": "a list"}, optional={"controller": "a string"}
    )
    found = Hosts(
        hosts=tuple(
            Host(**read_fields(host, Host, where=f"host[{i}]"))
            for i, host in enumerate(values["host"])
        ),
        controller=values.get("controller", ""),
    )
    for problem in _problems(found):
        raise problem
    return found


def _problems(found: Hosts) -> Iterator[BadInput]:
    if not found.hosts:
        yield BadInput(
            got="0 hosts", allowed="1 host or more", fix="add a [[host]] table"
        )
    for name, times in Counter(host.name for host in found.hosts).items():
        if times > 1 or not is_node(name):
            yield BadInput(
                got=f"{times} hosts named {name!r}" if times > 1 else f"host {name!r}",
                allowed=f"unique names, each {RULE}",
                fix="rename it",
            )
    if found.controller and not _ADDRESS.fullmatch(found.controller):
        yield _no_address("controller", found.controller)
    for host in found.hosts:
        yield from _host_problems(host)


def _host_problems(host: Host) -> Iterator[BadInput]:
    where = f"host {host.name!r}"
    if not _ADDRESS.fullmatch(host.address):
        yield _no_address(f"{where}: address", host.address)
    if host.peers and not _ADDRESS.fullmatch(host.peers):
        yield _no_address(f"{where}: peers", host.peers)
    if host.user and not _USER.fullmatch(host.user):
        yield BadInput(
            got=f"{where}: user = {host.user!r}",
            allowed="letters, digits, '.', '_', '$' and '-', the first a letter, "
            "digit or '_'",
            fix="write the user's name there, or remove the key",
        )
    if host.port not in _PORTS:
        yield BadInput(
            got=f"{where}: port = {host.port}",
            allowed=f"a port from 1 to {_PORTS[-1]}, or 0 for ssh's own",
            fix="correct port, or remove the key",
        )
    for key in ("python", "directory"):
        if not getattr(host, key).isprintable():
            yield BadInput(
                got=f"{where}: {key} = {getattr(host, key)!r}",
                allowed="a path in one line",
                fix=f"correct {key}, or remove the key",
            )


def _no_address(where: str, got: str) -> BadInput:
    return BadInput(
        got=f"{where} = {got!r}",
        allowed="a host name or IP address, without user, port or blanks",
        fix='write an address such as "10.0.0.2"; user and port have keys of their own',
    )
