# SPDX-License-Identifier: Apache-2.0
"""Connections between processes: messages by key, and a lost peer seen at once.

Owns one link: proof of identity, framing, and when the other side counts as lost. A
link is two connections: one for messages, and one on which a process beside each side
gives signs of life, however busy both are (`heart.py`). A message is a key (six
numbers) and bytes; it is sent by a thread of its own and delivered from another, in any
order relative to other connections. Only lengths that the header says are read: nothing
is unpickled. Does not own what messages mean (`wire.py`, `reduction.py`), nor who is
connected to whom (`peers.py`).
"""

import hmac
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hetjax.comm.heart import heart
from hetjax.names import LONGEST_WORKER, is_worker

Key = tuple[int, int, int, int, int, int]
Deliver = Callable[[str, Key, np.ndarray], None]  # from whom, under which key, bytes
Lost = Callable[[str, str], None]  # who, and why

SILENCE_S = 10.0  # without a sign of life, a peer counts as lost
_HANDSHAKE_S = 30.0  # for all of it: the other side may be starved
_MOST_WAITING = 64  # callers at a door that have not shown yet who they are
_BREATH_S = 0.1  # until a door that cannot take a connection tries again
_FAREWELL_S = 5.0  # for what is still to be sent
_HEADER = struct.Struct("<6IQ")
_GOODBYE: Key = (2**32 - 1, 1, 0, 0, 0, 0)
_ALIGNMENT = 64  # bytes: JAX takes over such host arrays without a copy
_BUFFER_BYTES = 4 << 20  # of a Unix socket
_MOST_VIEWS = 64  # in one call, of what the system takes
_NONCE_BYTES, _NAME_BYTES = 32, LONGEST_WORKER
_GREETING = struct.Struct(f"<{_NAME_BYTES}s{_NAME_BYTES}s{_NONCE_BYTES}s")
_MESSAGES, _PULSES = b"m", b"p"  # what a connection is for
_PAIR_BYTES = 16  # that both connections of a link have in common


class HandshakeRefused(ConnectionError):
    """The other side could not show that it belongs to this run."""


@dataclass(frozen=True, slots=True)
class Ends:
    """This side's ends of both connections to a peer that has proven who it is."""

    messages: socket.socket
    pulses: socket.socket

    def close(self) -> None:
        self.messages.close()
        self.pulses.close()


def dial(address: str, own: str, peer: str, secret: bytes) -> Ends:
    """Connect to the peer that listens there and prove to each other who we are."""
    pair, found = os.urandom(_PAIR_BYTES), dict[bytes, socket.socket]()
    try:
        for use in (_PULSES, _MESSAGES):
            found[use] = _dialled(address, own, peer, secret)
            found[use].sendall(use + pair)
    except BaseException:
        for one in found.values():
            one.close()
        raise
    return Ends(found[_MESSAGES], found[_PULSES])


def _dialled(address: str, own: str, peer: str, secret: bytes) -> socket.socket:
    found, end_s = _socket(address), time.monotonic() + _HANDSHAKE_S
    try:
        found.settimeout(_HANDSHAKE_S)
        found.connect(_endpoint(address))
        names = [_name_bytes(name) for name in (own, peer)]
        greeting = _GREETING.pack(*names, os.urandom(_NONCE_BYTES))
        found.sendall(greeting)
        answer = _read(found, _NONCE_BYTES + 32, end_s)
        nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"accept", greeting, nonce)):
            raise HandshakeRefused(
                f"{peer} at {address} does not know this run's secret"
            )
        found.sendall(_proof(secret, b"dial", greeting, nonce))
        return found
    except BaseException:
        found.close()
        raise


def answer(found: socket.socket, own: str, secret: bytes) -> str:
    """Let a caller prove who it is, and prove who we are; return its name."""
    end_s = time.monotonic() + _HANDSHAKE_S
    greeting = _read(found, _GREETING.size, end_s)
    caller, called, _ = _GREETING.unpack(greeting)
    nonce = os.urandom(_NONCE_BYTES)
    found.sendall(nonce + _proof(secret, b"accept", greeting, nonce))
    proof = _read(found, 32, end_s)
    if not hmac.compare_digest(proof, _proof(secret, b"dial", greeting, nonce)):
        raise HandshakeRefused("a caller does not know this run's secret")
    if called != _name_bytes(own):
        raise HandshakeRefused(
            f"a caller looks for {called.rstrip(bytes(1))!r}, not {own!r}"
        )
    name = caller.rstrip(b"\0").decode(errors="replace")
    if not is_worker(name):
        raise HandshakeRefused(
            f"a caller says that it is {name!r}, which is no worker's name"
        )
    return name


def listen(address: str) -> tuple[socket.socket, str]:
    """Listen on an address; return it with the port that was chosen.

    An address is host:port, with port 0 for any free one, or unix:path.
    """
    found = _socket(address)
    found.bind(_endpoint(address))
    found.listen(64)
    if found.family == socket.AF_UNIX:
        return found, address
    host, port = found.getsockname()[:2]
    return found, f"{host}:{port}"


class Listener:
    """Lets in callers that know the secret; strangers are turned away without a word.

    Listens at `address` as soon as it is made, which then has the port. `admit` is
    called with each caller's connections and name, from a thread of its own. Of too
    many that do not show who they are the first has to go: others get their turn.
    """

    def __init__(
        self,
        own: str,
        address: str,
        secret: bytes,
        admit: Callable[[Ends, str], None],
    ) -> None:
        self._own, self._secret, self._admit = own, secret, admit
        self._listener, self.address = listen(address)
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # the first to come first
        self._first: dict[str, tuple[bytes, socket.socket]] = {}  # of two, by caller
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for _, caller in self._first.values():
                caller.close()
            self._first.clear()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                caller, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor is to be had for now
                self._closed.wait(_BREATH_S)
                continue
            self._let_wait(caller)
            try:
                threading.Thread(
                    target=self._answer, args=(caller,), daemon=True
                ).start()
            except RuntimeError:  # no thread is to be had for now
                self._take_out(caller)
                caller.close()

    def _let_wait(self, caller: socket.socket) -> None:
        with self._lock:
            if len(self._waiting) == _MOST_WAITING:
                first = next(iter(self._waiting))
                del self._waiting[first]
                with suppress(OSError):
                    first.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._waiting[caller] = None

    def _take_out(self, caller: socket.socket) -> bool:
        """Whether it still waited, and did not have to make room for another."""
        with self._lock:
            there = caller in self._waiting
            self._waiting.pop(caller, None)
            return there

    def _answer(self, caller: socket.socket) -> None:
        try:
            name = answer(caller, self._own, self._secret)
            end_s = time.monotonic() + _HANDSHAKE_S
            words = _read(caller, len(_MESSAGES) + _PAIR_BYTES, end_s)
        except OSError:
            name, words = None, b""
        if not self._take_out(caller) or name is None:
            return caller.close()
        ends = self._paired(name, words, caller)
        if ends is not None:
            self._admit(ends, name)

    def _paired(self, name: str, words: bytes, caller: socket.socket) -> Ends | None:
        """Both connections of a caller, once they have come, in either order."""
        use, pair = words[:1], words[1:]
        with self._lock:
            earlier = self._first.pop(name, None)
            if earlier is None or earlier[0] != pair:
                self._first[name] = pair, caller
                if earlier is not None:
                    earlier[1].close()  # it called again, before its second one came
                return None
        if use == _MESSAGES:
            return Ends(caller, earlier[1])
        return Ends(earlier[1], caller)


class Connection:
    """A connection to one peer, which has proven who it is.

    `deliver` and `lost` are called from the link's own threads; `lost` at most once,
    also for a peer that leaves in good order, but not after `close`.
    """

    def __init__(
        self,
        ends: Ends,
        peer: str,
        deliver: Deliver,
        lost: Lost,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.peer = peer
        self._socket, self._deliver, self._lost = ends.messages, deliver, lost
        self._outbox = queue.SimpleQueue[tuple[Key, Sequence[np.ndarray]] | None]()
        self._closing = threading.Event()
        self._telling = threading.Lock()  # of a loss: taken once
        _prepare(self._socket)
        self._heart = heart()
        self._pulse = self._heart.watch(ends.pulses, silence_s, self._fail)
        self._threads = [
            threading.Thread(target=target, name=f"{name} {peer}", daemon=True)
            for name, target in (("to", self._transmit), ("from", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, key: Key, parts: Sequence[np.ndarray]) -> None:
        """Send the parts one after the other as one message; returns at once.

        They must not change until they are sent. Lost peers are told of by `lost`.
        """
        self._outbox.put((key, parts))

    def close(self) -> None:
        """Send what is waiting, say goodbye, and end both threads."""
        self._closing.set()
        self._outbox.put(None)
        self._threads[0].join(timeout=_FAREWELL_S)
        self._shut()

    def _transmit(self) -> None:
        try:
            while True:
                message = self._outbox.get()
                if message is None:
                    self._socket.sendall(_HEADER.pack(*_GOODBYE, 0))
                    return
                key, parts = message
                views = [_bytes_of(part) for part in parts if part.size]
                header = _HEADER.pack(*key, sum(map(len, views)))
                _write(self._socket, [memoryview(header), *views])
        except Exception as error:  # whatever ends this thread loses the peer
            self._fail(_reason(error))

    def _receive(self) -> None:
        header = memoryview(bytearray(_HEADER.size))
        try:
            while True:
                _fill(self._socket, header)
                *numbers, size = _HEADER.unpack(header)
                key: Key = tuple(numbers)
                if key == _GOODBYE:
                    return self._fail("left")
                data = _aligned(size)
                _fill(self._socket, data.data)
                self._deliver(self.peer, key, data)
        except Exception as error:
            self._fail(_reason(error))

    def _fail(self, reason: str) -> None:
        """Tell of the loss, unless another thread has, or nobody cares."""
        if not self._closing.is_set() and self._telling.acquire(blocking=False):
            self._closing.set()
            self._lost(self.peer, reason)
        self._shut()

    def _shut(self) -> None:
        """End both threads: what they wait for fails now."""
        self._closing.set()
        self._heart.forget(self._pulse)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._outbox.put(None)


def _prepare(found: socket.socket) -> None:
    found.settimeout(None)
    if found.family != socket.AF_UNIX:  # TCP fits its buffers to the path, unless told
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return
    for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        found.setsockopt(socket.SOL_SOCKET, size, _BUFFER_BYTES)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"closed the connection ({error.strerror or error})"
    return f"sent what cannot be read ({type(error).__name__}: {error})"


def _socket(address: str) -> socket.socket:
    unix = address.startswith("unix:")
    found = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    if not unix:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return found


def _endpoint(address: str) -> str | tuple[str, int]:
    if address.startswith("unix:"):
        return address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    return host, int(port)


def _name_bytes(name: str) -> bytes:
    """The name as long as the greeting has room for; what reads it cuts nothing off."""
    if not is_worker(name):
        raise HandshakeRefused(f"{name!r} is no worker's name")
    return name.encode().ljust(_NAME_BYTES, b"\0")


def _proof(secret: bytes, role: bytes, greeting: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + greeting + nonce, "sha256")


def _write(found: socket.socket, views: list[memoryview]) -> None:
    """Write all, the header together with what follows: it wakes nobody for itself."""
    while views:
        count = found.sendmsg(views[:_MOST_VIEWS])
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[start : start + size]


def _read(found: socket.socket, size: int, end_s: float) -> bytes:
    """Read all of it by then, however little of it comes at a time."""
    data = b""
    while len(data) < size:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no proof of who it is within {_HANDSHAKE_S:g} s")
        found.settimeout(left_s)
        more = found.recv(size - len(data))
        if not more:
            raise ConnectionError("end of stream")
        data += more
    return data


def _fill(found: socket.socket, view: memoryview) -> None:
    while len(view):
        count = found.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("end of stream")
        view = view[count:]
