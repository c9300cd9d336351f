# SPDX-License-Identifier: Apache-2.0
"""Who calls at an address, and has not shown yet who it is.

Owns listening, how many callers may wait at once, and a thread for each. Does not own
what they have to show, nor what becomes of them then (`door.py`, and
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
_BREATH_S = 0.1  # until a door that cannot take a connection tries again


class Callers(Generic[Shown]):
    """Listens at `address`, which then has the port, as soon as it is made.

    `ask` is called with each caller from a thread of its own, and says who it is;
    OSError or None, and it is turned away. Else `admit` is, with what was found. Of too
    many that do not show who they are the first has to go: others get their turn.
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
        self._waiting: dict[socket.socket, None] = {}  # the first to come first
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

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
