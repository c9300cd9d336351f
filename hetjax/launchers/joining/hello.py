# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between a run and a machine that joins, within TLS.

    run     -> nonce
    machine -> hello: who it is, what it has; proof of its token
    run     -> welcome, or a refusal in three parts
    run     -> start: a worker's bootstrap, and which devices it gets; leave
    machine -> ended: the worker's exit code

Owns these messages and their form: frames of JSON with limits on size and time. A proof
covers the token, the nonce, the hello and the run's certificate, so that nobody can
pass it on. Does not own the stream (`comm/pinned.py`), who may join (`desk.py`), nor
what a machine does then (`joiner.py`).
"""

import hmac
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from hetjax.cluster.local_devices import LocalDevice
from hetjax.comm.handshake import read
from hetjax.comm.tls import TlsStream
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value
from hetjax.files.tables import read_fields, read_list, read_record

JOIN_S = 30.0  # for all messages: the other side may be starved
HELLO_BYTES = 16 << 10  # limit for a caller that is not yet authenticated
MESSAGE_BYTES = 64 << 10
NONCE_BYTES, PROOF_BYTES = 32, 32
_FORM = 1  # version of these messages
_SIZE = struct.Struct("<I")
_GONE_S = 20  # until a connection is lost if the other system does not answer
_ALIVE = (  # the systems probe, whatever both processes do
    ("SO_KEEPALIVE", socket.SOL_SOCKET, 1),
    ("TCP_KEEPIDLE", socket.IPPROTO_TCP, 5),
    ("TCP_KEEPINTVL", socket.IPPROTO_TCP, 5),
    ("TCP_KEEPCNT", socket.IPPROTO_TCP, 3),
    ("TCP_USER_TIMEOUT", socket.IPPROTO_TCP, 1000 * _GONE_S),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """A machine that joins: its worker, versions of packages and devices.

    Peers reach it at `address` (empty: the address that it calls from). `allows` is the
    function that may be called there as the model (empty: none).
    """

    worker: str
    versions: Mapping[str, str]
    devices: tuple[LocalDevice, ...] = ()
    address: str = ""
    allows: str = ""

    def text(self) -> bytes:
        fields = {"form": _FORM, **asdict(self)}
        return json.dumps(fields).encode()


def read_hello(data: bytes) -> Hello:
    """Parse `Hello.text`; raises ValueError, or BadInput for another form of it."""
    raw = json_value(data.decode(errors="replace"))
    if not isinstance(raw, dict) or raw.pop("form", None) != _FORM:
        raise BadInput(
            got="a message in the format of another release",
            allowed=f"the release of the run: {_spelled(versions_here())}",
            fix="install the same release of hetjax on both machines",
        )
    fields = read_record(
        raw,
        where="hello",
        required={
            "worker": "a string",
            "versions": "a table",
            "devices": "a list",
            "address": "a string",
            "allows": "a string",
        },
    )
    fields["devices"] = tuple(
        LocalDevice(**read_fields(device, LocalDevice, where=f"devices[{i}]"))
        for i, device in enumerate(fields["devices"])
    )
    read_list(fields["versions"].values(), "a string", where="versions")
    return Hello(**fields)


def versions_here() -> dict[str, str]:
    """Return the versions that must be alike on all machines of a run."""
    return {name: version(name) for name in ("hetjax", "jax")}


def check_versions(theirs: Mapping[str, str]) -> None:
    """Raise BadInput unless a machine has the versions of this one."""
    here = versions_here()
    if dict(theirs) != here:
        unlike = {n: v for n, v in here.items() if theirs.get(n) != v}
        hetjax = unlike.pop("hetjax", None)
        jax = [f"pip install '{name}=={number}'" for name, number in unlike.items()]
        words = jax if hetjax is None else [f"install the run's hetjax {hetjax}", *jax]
        raise BadInput(
            got=f"a machine with {_spelled(theirs)}",
            allowed=f"the versions of the run: {_spelled(here)}",
            fix=f"on that machine, {' and '.join(words)}",
        )


def _spelled(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def proof(key: bytes, nonce: bytes, said: bytes, stream: TlsStream) -> bytes:
    """Return proof of the token, bound to nonce, hello and the run's certificate."""
    return hmac.digest(key, b"join" + nonce + stream.binding + said, "sha256")


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def refusal(bad: BadInput, is_for_now: bool = False) -> dict[str, Any]:
    """Return the message of a refusal; if `is_for_now`, a later retry may succeed."""
    parts = {"got": bad.got, "allowed": bad.allowed, "fix": bad.fix}
    return {"refused": parts, "for_now": is_for_now}


def send(stream: TlsStream, message: Mapping[str, Any]) -> None:
    """Send a message; raises OSError."""
    send_frame(stream, json.dumps(message).encode())


def send_frame(stream: TlsStream, data: bytes) -> None:
    stream.sendall(_SIZE.pack(len(data)) + data)


def receive(stream: TlsStream, end_s: float | None = None) -> dict[str, Any]:
    """Return the next message; raises OSError, also at time `end_s`, and ValueError.

    `end_s` is a monotonic time.
    """
    found = json_value(receive_frame(stream, MESSAGE_BYTES, end_s))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def receive_frame(stream: TlsStream, most: int, end_s: float | None = None) -> bytes:
    """Return the bytes of the next frame; ValueError if they are more than `most`."""
    (size,) = _SIZE.unpack(_read(stream, _SIZE.size, end_s))
    if size > most:
        raise ValueError(f"{size:,} bytes, above the limit of {most:,}")
    return _read(stream, size, end_s)


def _read(stream: TlsStream, size: int, end_s: float | None) -> bytes:
    """Read exactly `size` bytes, until `end_s` if it is given."""
    if end_s is not None:
        return read(stream, size, end_s)
    stream.settimeout(None)
    data = b""
    while len(data) < size:
        more = stream.recv(size - len(data))
        if not more:
            raise ConnectionError("end of stream")
        data += more
    return data


def keep_alive(stream: TlsStream) -> None:
    """Let the systems detect that the other side is gone, even if both are silent."""
    for name, level, value in _ALIVE:
        if hasattr(socket, name):  # not every system has them all
            stream.setsockopt(level, getattr(socket, name), value)
