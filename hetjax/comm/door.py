# SPDX-License-Identifier: Apache-2.0
"""A door of a process: who calls is let in once it has proven to be of this run.

Owns listening for callers, how many of them may wait, joining both connections of one,
and that an older start of a worker never takes the place of a newer one. Does not own
the proof (`handshake.py`) nor what becomes of who is let in.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from hetjax.comm.addresses import listen
from hetjax.comm.handshake import MESSAGES, PULSES, Caller, Ends, answer
from hetjax.comm.tls import Tls

Admit = Callable[[Ends, str, int], None]  # whom: connections, name and incarnation

_MOST_WAITING = 64  # callers at a door that have not shown yet who they are
_BREATH_S = 0.1  # until a door that cannot take a connection tries again


class Listener:
    """Lets in callers that know the secret; strangers are turned away without a word.

    Listens at `address` as soon as it is made, which then has the port. `admit` is
    called with each caller's connections, name and incarnation, from a thread of its
    own, and never with an older incarnation than before under that name. Of too many
    that do not show who they are the first has to go: others get their turn.
    """

    def __init__(
        self,
        own: str,
        address: str,
        secret: bytes,
        admit: Admit,
        tls: Tls | None = None,
    ) -> None:
        self._own, self._secret, self._admit, self._tls = own, secret, admit, tls
        self._listener, self.address = listen(address)
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # the first to come first
        # of two connections the first, by caller
        self._first: dict[str, tuple[Caller, socket.socket]] = {}
        self._newest: dict[str, int] = {}  # incarnation that was let in, by caller
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

    def _answer(self, found: socket.socket) -> None:
        try:
            caller = answer(found, self._own, self._secret, self._is_stale, self._tls)
        except OSError:
            caller = None
        if not self._take_out(found) or caller is None:
            return found.close()
        ends = self._paired(caller, found)
        if ends is not None:
            self._admit(ends, caller.name, caller.incarnation)

    def _is_stale(self, name: str, incarnation: int) -> bool:
        return incarnation < self._newest.get(name, 0)

    def _paired(self, caller: Caller, found: socket.socket) -> Ends | None:
        """Both connections of a caller, once they have come, in either order."""
        with self._lock:
            if self._is_stale(caller.name, caller.incarnation):
                return found.close()  # a newer one came meanwhile
            earlier = self._first.pop(caller.name, None)
            if earlier is None or _link(earlier[0]) != _link(caller):
                self._first[caller.name] = caller, found
                if earlier is not None:
                    earlier[1].close()  # it called again, before its second one came
                return None
            self._newest[caller.name] = caller.incarnation
        return _ends((caller, found), earlier)


def _link(caller: Caller) -> tuple[int, bytes]:
    return caller.incarnation, caller.pair


def _ends(*both: tuple[Caller, socket.socket]) -> Ends | None:
    """One link of two connections; None, and closes them, if both are for the same."""
    found = {caller.use: (caller, one) for caller, one in both}
    if len(found) < len(both):
        for _, one in both:
            one.close()
        return None
    (messages, _), (pulses, pulse_socket) = found[MESSAGES], found[PULSES]
    return Ends(messages.stream, pulse_socket, messages.keys, pulses.keys)
