# SPDX-License-Identifier: Apache-2.0
"""Accepts callers at an address that have not yet proven who they are.

Owns listening, the limit on waiting callers, and one thread per caller. Does not own
the proof that callers must show, nor what happens to them afterwards (`door.py`, and
`launchers/joining/desk.py`).
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from hetjax.comm.addresses import listen

Shown = TypeVar("Shown")

_MOST_WAITING = 64
_BREATH_S = 0.1  # before `accept` is retried after an error


class Callers(Generic[Shown]):
    """Listens at `address` from construction on; its `address` then has the port.

    Calls `ask` with each caller, from one thread per caller; `ask` returns who the
    caller is. If `ask` raises OSError or returns None, the caller is turned away;
    otherwise `admit` is called with the result. If too many callers wait unproven, the
    one that has waited longest is turned away to make room.
    """

    def __init__(
        self,
        address: str,
        ask: Callable[[socket.socket], Shown | None],
        admit: Callable[[Shown, socket.socket], None],
    ) -> None:
        self._ask, self._admit = ask, admit
        self._listener, self.address = listen(address)
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # oldest first
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Accept no further callers."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                caller, _ = self._listener.accept()
            except OSError:  # closed, or out of file descriptors for now
                self._closed.wait(_BREATH_S)
                continue
            self._let_wait(caller)
            try:
                threading.Thread(
                    target=self._answer, args=(caller,), daemon=True
                ).start()
            except RuntimeError:  # out of threads for now
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
        """Stop the caller's wait; return False if it was turned away to make room."""
        with self._lock:
            there = caller in self._waiting
            self._waiting.pop(caller, None)
            return there

    def _answer(self, caller: socket.socket) -> None:
        shown = None
        try:
            with suppress(OSError):
                shown = self._ask(caller)
        finally:
            if not self._take_out(caller) or shown is None:
                caller.close()
                shown = None
        if shown is not None:
            self._admit(shown, caller)
