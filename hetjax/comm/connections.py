# SPDX-License-Identifier: Apache-2.0
"""Connects processes: sends messages by key and detects a lost peer at once.

Owns the threads of one link, and the decision when the other side counts as lost. A
link is two connections: one for messages, and one for heartbeats. A child process of
each side sends these, however busy that side is (`heart.py`). A message is a key (six
numbers) and bytes; one thread sends it and another delivers it, in any order relative
to other connections. Does not own proof of identity (`handshake.py`), the form of what
is sent (`frames.py`) and its meaning (`wire.py`, `reduction.py`), nor which
processes connect (`peers.py`).
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from hetjax.comm.frames import ForgedFrame, FrameReader, FrameWriter, Key
from hetjax.comm.handshake import Ends
from hetjax.comm.heart import heart
from hetjax.comm.tls import Stream

Deliver = Callable[[str, Key, np.ndarray], None]  # sender, key, bytes
Lost = Callable[[str, str], None]  # peer, reason
Wrote = Callable[[int, float], None]  # bytes of a message, seconds

SILENCE_S = 10.0  # without a heartbeat, a peer counts as lost
_FAREWELL_S = 5.0  # to send what is still queued
_GOODBYE: Key = (2**32 - 1, 1, 0, 0, 0, 0)
_BUFFER_BYTES = 4 << 20  # of a Unix socket's buffers


class Connection:
    """A connection to one peer that has proven who it is.

    `deliver` and `lost` are called from the link's own threads. `lost` is called at
    most once, also for a peer that leaves in good order, but not after `close`. `wrote`
    is called for each message with the time that the system took to accept it.
    """

    def __init__(
        self,
        ends: Ends,
        peer: str,
        deliver: Deliver,
        lost: Lost,
        silence_s: float = SILENCE_S,
        wrote: Wrote = lambda num_bytes, seconds: None,
    ) -> None:
        self.peer, self._wrote = peer, wrote
        self._socket, self._deliver, self._lost = ends.messages, deliver, lost
        keys = ends.message_keys
        self._writer = FrameWriter(ends.messages, keys and keys.sends)
        self._reader = FrameReader(ends.messages, keys and keys.takes)
        self._outbox = queue.SimpleQueue[tuple[Key, Sequence[np.ndarray]] | None]()
        self._closing = threading.Event()
        self._telling = threading.Lock()  # held by the one thread that reports a loss
        _prepare(self._socket)
        self._heart, pulse = heart(), ends.pulse_keys
        codes = pulse and (pulse.sends, pulse.takes)
        self._pulse = self._heart.watch(ends.pulses, silence_s, self._fail, codes)
        self._threads = [
            threading.Thread(target=target, name=f"{name} {peer}", daemon=True)
            for name, target in (("to", self._transmit), ("from", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, key: Key, parts: Sequence[np.ndarray]) -> None:
        """Send the parts, concatenated, as one message; return at once.

        The parts must not change until they are sent. `lost` reports a lost peer.
        """
        self._outbox.put((key, parts))

    def close(self) -> None:
        """Send what is queued, say goodbye, and end both threads."""
        self._closing.set()
        self._outbox.put(None)
        self._threads[0].join(timeout=_FAREWELL_S)
        self._shut()

    def _transmit(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                start_s = time.perf_counter()
                self._writer.write(*message)
                num_bytes = sum(part.nbytes for part in message[1])
                self._wrote(num_bytes, time.perf_counter() - start_s)
            self._writer.write(_GOODBYE, [])
        except Exception as error:  # any error that ends this thread loses the peer
            self._fail(_reason(error))

    def _receive(self) -> None:
        try:
            while True:
                key, data = self._reader.read()
                if key == _GOODBYE:
                    return self._fail("left")
                self._deliver(self.peer, key, data)
        except Exception as error:
            self._fail(_reason(error))

    def _fail(self, reason: str) -> None:
        """Report the loss, unless already reported or the connection is closing."""
        if not self._closing.is_set() and self._telling.acquire(blocking=False):
            self._closing.set()
            self._lost(self.peer, reason)
        self._shut()

    def _shut(self) -> None:
        """End both threads: whatever they wait for fails now."""
        self._closing.set()
        self._heart.forget(self._pulse)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._outbox.put(None)


def _prepare(found: Stream) -> None:
    found.settimeout(None)
    if found.family != socket.AF_UNIX:  # TCP sizes its own buffers
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return
    for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        found.setsockopt(socket.SOL_SOCKET, size, _BUFFER_BYTES)


def _reason(error: Exception) -> str:
    if isinstance(error, ForgedFrame):
        return f"sent a message that failed authentication ({error})"
    if isinstance(error, OSError):
        return f"closed the connection ({error.strerror or error})"
    return f"sent an unreadable message ({type(error).__name__}: {error})"
