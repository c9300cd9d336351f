# SPDX-License-Identifier: Apache-2.0
"""Admits callers to a process once they have proven that they belong to this run.

Owns the pairing of a caller's two connections, and the rule that an older start of a
worker never replaces a newer one. Does not own accepting (`callers.py`), the proof
(`handshake.py`), nor what happens to an admitted caller.
"""

import socket
import threading
from collections.abc import Callable

from hetjax.comm.callers import Callers
from hetjax.comm.handshake import MESSAGES, PULSES, Caller, Ends, answer
from hetjax.comm.tls import Tls

Admit = Callable[[Ends, str, int], None]  # connections, name, incarnation


class Listener:
    """Admits callers that know the secret; turns others away without an answer.

    Listens at `address` from construction on; its `address` then has the port. `admit`
    is called with each caller's connections, name and incarnation, from one thread per
    caller, and never with an older incarnation of a name than it was called with
    before.
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
        self._lock = threading.Lock()
        # the first connection of a pair that waits for its second, by caller
        self._first: dict[str, tuple[Caller, socket.socket]] = {}
        self._newest: dict[str, int] = {}  # admitted incarnation, by caller
        self._callers = Callers(address, self._ask, self._let_in)
        self.address = self._callers.address

    def close(self) -> None:
        """Admit no further callers."""
        self._callers.close()
        with self._lock:
            for _, caller in self._first.values():
                caller.close()
            self._first.clear()

    def _ask(self, found: socket.socket) -> Caller:
        return answer(found, self._own, self._secret, self._is_stale, self._tls)

    def _let_in(self, caller: Caller, found: socket.socket) -> None:
        ends = self._paired(caller, found)
        if ends is not None:
            self._admit(ends, caller.name, caller.incarnation)

    def _is_stale(self, name: str, incarnation: int) -> bool:
        return incarnation < self._newest.get(name, 0)

    def _paired(self, caller: Caller, found: socket.socket) -> Ends | None:
        """Return both connections of a caller once both have come, in either order."""
        with self._lock:
            if self._is_stale(caller.name, caller.incarnation):
                return found.close()  # a newer start was admitted meanwhile
            earlier = self._first.pop(caller.name, None)
            if earlier is None or _link(earlier[0]) != _link(caller):
                self._first[caller.name] = caller, found
                if earlier is not None:
                    earlier[1].close()  # it called again before the second came
                return None
            self._newest[caller.name] = caller.incarnation
        return _ends((caller, found), earlier)


def _link(caller: Caller) -> tuple[int, bytes]:
    return caller.incarnation, caller.pair


def _ends(*both: tuple[Caller, socket.socket]) -> Ends | None:
    """Return the link of two connections; if both have the same use, close them."""
    found = {caller.use: (caller, one) for caller, one in both}
    if len(found) < len(both):
        for _, one in both:
            one.close()
        return None
    (messages, _), (pulses, pulse_socket) = found[MESSAGES], found[PULSES]
    return Ends(messages.stream, pulse_socket, messages.keys, pulses.keys)
