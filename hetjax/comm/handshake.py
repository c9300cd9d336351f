# SPDX-License-Identifier: Apache-2.0
"""Authenticates both ends of a connection: each proves that it knows the run's secret.

    caller -> greeting: names, nonce, incarnation, use of the connection
    called -> nonce, proof over everything so far
    caller -> proof
    called -> verdict: welcome, or that a newer start of the caller has been admitted

Owns these messages, all covered by a proof; the keys of a connection, derived from the
secret and both nonces; and the refusal of older incarnations. An incarnation is a
number that grows with every start of a worker. Does not own who listens (`door.py`) nor
what is sent afterwards (`frames.py`, `heart.py`).
"""

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from hetjax.comm.addresses import endpoint, socket_for, stays_here
from hetjax.comm.tls import FIRST_BYTE, Stream, Tls, TlsStream
from hetjax.names import LONGEST_WORKER, is_worker

_HANDSHAKE_S = 30.0  # for the whole handshake: the other side may be starved
_NONCE_BYTES, _NAME_BYTES = 32, LONGEST_WORKER
_PAIR_BYTES = 16  # the same for both connections of a link
_PROOF_BYTES = 32
# caller, called, nonce, incarnation, use, whether frames have codes, pair
_GREETING = struct.Struct(
    f"<{_NAME_BYTES}s{_NAME_BYTES}s{_NONCE_BYTES}sQc?{_PAIR_BYTES}s"
)
MESSAGES, PULSES = b"m", b"p"  # the use of a connection


class HandshakeRefused(ConnectionError):
    """The other side could not prove that it belongs to this run."""


class StaleIncarnation(HandshakeRefused):
    """A newer start of this worker has been admitted: this one is no longer needed."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys for a connection's codes, one for each direction."""

    sends: bytes
    takes: bytes


@dataclass(frozen=True, slots=True)
class Ends:
    """This side's ends of both connections to a peer that has proven who it is.

    Without keys, what is sent has no codes.
    """

    messages: Stream
    pulses: socket.socket
    message_keys: Keys | None = None
    pulse_keys: Keys | None = None

    def close(self) -> None:
        self.messages.close()
        self.pulses.close()


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller that has proven who it is, and the use of one of its two connections."""

    name: str
    incarnation: int
    use: bytes
    pair: bytes
    keys: Keys | None
    stream: Stream


def dial(
    address: str,
    own: str,
    peer: str,
    secret: bytes,
    incarnation: int = 0,
    coded: bool | None = None,
    tls: Tls | None = None,
) -> Ends:
    """Connect to the peer that listens there; both sides prove who they are.

    `coded` says whether what is sent carries codes; None: only if it leaves this
    machine. With `tls`, messages go through TLS, and only the heartbeats have codes.
    Raises OSError: StaleIncarnation if the peer has admitted a newer start of this
    worker.
    """
    pair = os.urandom(_PAIR_BYTES)
    found = dict[bytes, tuple[Stream, Keys | None]]()
    try:
        for use in (PULSES, MESSAGES):
            about = own, peer, incarnation, use, pair
            found[use] = _dialled(address, secret, about, coded, tls)
    except BaseException:
        for one, _ in found.values():
            one.close()
        raise
    (messages, message_keys), (pulses, pulse_keys) = found[MESSAGES], found[PULSES]
    assert isinstance(pulses, socket.socket), "handed to another process"
    return Ends(messages, pulses, message_keys, pulse_keys)


def _dialled(
    address: str,
    secret: bytes,
    about: tuple[str, str, int, bytes, bytes],
    coded: bool | None,
    tls: Tls | None = None,
) -> tuple[Stream, Keys | None]:
    end_s = time.monotonic() + _HANDSHAKE_S
    found: Stream = socket_for(address)
    own, peer, incarnation, use, pair = about
    try:
        found.settimeout(_HANDSHAKE_S)
        found.connect(endpoint(address))
        coded = not stays_here(found) if coded is None else coded
        binding = b""
        if tls is not None:
            coded = use == PULSES
        if tls is not None and use == MESSAGES:
            found = TlsStream(found, tls, is_called=False, end_s=end_s)
            binding = found.binding
        names = [_name_bytes(name) for name in (own, peer)]
        nonce = os.urandom(_NONCE_BYTES)
        greeting = _GREETING.pack(*names, nonce, incarnation, use, coded, pair)
        found.sendall(greeting)
        answer = read(found, _NONCE_BYTES + _PROOF_BYTES, end_s)
        said = greeting + answer[:_NONCE_BYTES] + binding
        if not _is_proof(answer[_NONCE_BYTES:], secret, b"accept", said):
            raise HandshakeRefused(
                f"{peer} at {address} does not know this run's secret"
            )
        found.sendall(_proof(secret, b"dial", said))
        _check_verdict(read(found, _PROOF_BYTES, end_s), secret, said, own)
        keys = _keys(secret, said)
        return found, keys if coded else None
    except BaseException:
        found.close()
        raise


def answer(
    found: socket.socket,
    own: str,
    secret: bytes,
    is_stale: Callable[[str, int], bool] = lambda name, incarnation: False,
    tls: Tls | None = None,
) -> Caller:
    """Let a caller prove who it is, and prove who we are; raise OSError if that fails.

    With `tls`, the connection for messages must use TLS; the one for heartbeats must
    not. A caller that `is_stale`, by name and incarnation, is refused, and learns why.
    """
    end_s = time.monotonic() + _HANDSHAKE_S
    stream = found if tls is None else _within(found, tls, end_s)
    binding = stream.binding if isinstance(stream, TlsStream) else b""
    greeting = read(stream, _GREETING.size, end_s)
    nonce = os.urandom(_NONCE_BYTES)
    said = greeting + nonce + binding
    stream.sendall(nonce + _proof(secret, b"accept", said))
    if not _is_proof(read(stream, _PROOF_BYTES, end_s), secret, b"dial", said):
        raise HandshakeRefused("a caller does not know this run's secret")
    caller = _caller(greeting, own, secret, said, stream)
    if tls is not None and bool(binding) != (caller.use == MESSAGES):
        raise HandshakeRefused(f"{caller.name!r} does not use TLS as required")
    if is_stale(caller.name, caller.incarnation):
        stream.sendall(_proof(secret, b"stale", said))
        raise HandshakeRefused(
            f"an older start of {caller.name!r} (incarnation {caller.incarnation}) "
            "called"
        )
    stream.sendall(_proof(secret, b"welcome", said))
    return caller


def _within(found: socket.socket, tls: Tls, end_s: float) -> Stream:
    """Return the stream that the caller starts: TLS, or the plain socket."""
    found.settimeout(_HANDSHAKE_S)
    if found.recv(1, socket.MSG_PEEK) != FIRST_BYTE:
        return found
    return TlsStream(found, tls, is_called=True, end_s=end_s)


def _caller(
    greeting: bytes, own: str, secret: bytes, said: bytes, stream: Stream
) -> Caller:
    """Return the sender of a proven greeting; raise HandshakeRefused if it is wrong."""
    name_bytes, called, _, incarnation, use, coded, pair = _GREETING.unpack(greeting)
    if called != _name_bytes(own):
        raise HandshakeRefused(
            f"a caller looks for {called.rstrip(bytes(1))!r}, not {own!r}"
        )
    name = name_bytes.rstrip(b"\0").decode(errors="replace")
    if not is_worker(name):
        raise HandshakeRefused(
            f"a caller says that it is {name!r}, which is not a worker name"
        )
    if use not in (MESSAGES, PULSES):
        raise HandshakeRefused(f"{name!r} calls for the unknown use {use!r}")
    theirs = _keys(secret, said)
    keys = Keys(sends=theirs.takes, takes=theirs.sends) if coded else None
    return Caller(name, incarnation, use, pair, keys, stream)


def _check_verdict(verdict: bytes, secret: bytes, said: bytes, own: str) -> None:
    if _is_proof(verdict, secret, b"stale", said):
        raise StaleIncarnation(f"a newer start of {own!r} has taken its place")
    if not _is_proof(verdict, secret, b"welcome", said):
        raise HandshakeRefused("the other side's verdict failed authentication")


def _name_bytes(name: str) -> bytes:
    """Return the name padded to its field; raise HandshakeRefused if it is no name."""
    if not is_worker(name):
        raise HandshakeRefused(f"{name!r} is not a worker name")
    return name.encode().ljust(_NAME_BYTES, b"\0")


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    """Return the proof, in this role, that we know the secret, over all said so far."""
    return hmac.digest(secret, role + said, "sha256")


def _is_proof(found: bytes, secret: bytes, role: bytes, said: bytes) -> bool:
    return hmac.compare_digest(found, _proof(secret, role, said))


def _keys(secret: bytes, said: bytes) -> Keys:
    """Return the caller's keys; both nonces make them new for each connection."""
    return Keys(
        sends=_proof(secret, b"key of caller", said),
        takes=_proof(secret, b"key of called", said),
    )


def read(found: Stream, size: int, end_s: float) -> bytes:
    """Read `size` bytes until `end_s`, however few arrive at a time."""
    data = b""
    while len(data) < size:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no proof of identity within {_HANDSHAKE_S:g} s")
        found.settimeout(left_s)
        more = found.recv(size - len(data))
        if not more:
            raise ConnectionError("end of stream")
        data += more
    return data
