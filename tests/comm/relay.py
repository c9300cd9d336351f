# SPDX-License-Identifier: Apache-2.0
"""A relay on the path of a link, which may change what the caller sends.

It knows the form of the handshake and of frames, but not the run's secret.
"""

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from hetjax.comm.addresses import endpoint, listen
from hetjax.comm.handshake import _GREETING

GREETING_BYTES, PROOF_BYTES, CODE_BYTES, BEAT_BYTES = _GREETING.size, 32, 16, 24
HEADER = struct.Struct("<6IQ")
# What it sends instead of a frame, from its number and the frames so far
Attack = Callable[[int, Sequence[bytes]], Sequence[bytes]]


def honest(number: int, frames: Sequence[bytes]) -> Sequence[bytes]:
    return frames[-1:]


class Relay:
    """Relays both connections of a caller to `address`, and attacks one of them."""

    def __init__(
        self, address: str, frames: Attack = honest, beats: Attack = honest
    ) -> None:
        self._to = address
        self._attacks = {b"m": (frames, _frame), b"p": (beats, _beat)}
        self._door, self.address = listen("127.0.0.1:0")
        self._open: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for found in self._open:
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
            found.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._door.accept()
                called = socket.socket()
                called.connect(endpoint(self._to))
                self._open += [caller, called]
                for work in (self._there, self._back):
                    both = (caller, called)
                    threading.Thread(target=work, args=both, daemon=True).start()

    def _back(self, caller: socket.socket, called: socket.socket) -> None:
        with suppress(OSError):
            while data := called.recv(1 << 16):
                caller.sendall(data)
            caller.shutdown(socket.SHUT_WR)

    def _there(self, caller: socket.socket, called: socket.socket) -> None:
        with suppress(OSError):
            greeting = _exactly(caller, GREETING_BYTES)
            called.sendall(greeting)
            called.sendall(_exactly(caller, PROOF_BYTES))
            attack, read = self._attacks[_use(greeting)]
            seen: list[bytes] = []
            while True:
                seen.append(read(caller))
                for frame in attack(len(seen) - 1, seen):
                    called.sendall(frame)


def _use(greeting: bytes) -> bytes:
    return _GREETING.unpack(greeting)[4]


def _frame(found: socket.socket) -> bytes:
    header = _exactly(found, HEADER.size + CODE_BYTES)
    size = HEADER.unpack(header[: HEADER.size])[-1]
    return header + (_exactly(found, size + CODE_BYTES) if size else b"")


def _beat(found: socket.socket) -> bytes:
    return _exactly(found, BEAT_BYTES)


def _exactly(found: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = found.recv(size - len(data))
        if not more:
            raise ConnectionError("end of stream")
        data += more
    return data
