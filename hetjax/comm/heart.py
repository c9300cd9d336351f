# SPDX-License-Identifier: Apache-2.0
"""Signs of life between processes, sent and heard by a process beside each.

Owns this process's heart: a child that beats for it on connections which it is handed,
and tells of those that fall silent. A thread would not do: it waits for the
interpreter's lock, and where a CPU quota starves the process that is longer than the
others wait. Does not own the connections' proof of identity (`connections.py`), nor how
a heart beats (`heart_process.py`).
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from hetjax.comm import heart_process
from hetjax.comm.heart_process import COMMAND, SILENT

Silent = Callable[[str], None]  # why it is taken for lost


class Heart:
    """The heart of this process, which ends with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._silent: dict[int, Silent] = {}
        self._number = 0
        self._parent = os.getpid()
        self._control, child = socket.socketpair()
        with child:
            words = [heart_process.__file__, str(child.fileno()), str(self._parent)]
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[child.fileno()],
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
            )
        threading.Thread(target=self._listen, name="heart", daemon=True).start()

    @property
    def beats(self) -> bool:
        """Whether it does, and for this process."""
        return self._parent == os.getpid() and self._child.poll() is None

    def watch(self, found: socket.socket, silence_s: float, silent: Silent) -> int:
        """Beat on this connection, and call `silent`, once, if the other end does not.

        Takes the connection over; returns the number to `forget` it by.
        """
        with self._lock, found:
            self._number += 1
            self._silent[self._number] = silent
            command = COMMAND.pack(self._number, silence_s)
            socket.send_fds(self._control, [command], [found.fileno()])
            return self._number

    def forget(self, number: int) -> None:
        """Beat there no more; nothing if that was said before."""
        with self._lock:
            if self._silent.pop(number, None) is not None:
                with suppress(OSError):  # it has ended, and this with it
                    self._control.sendall(COMMAND.pack(number, 0.0))

    def _listen(self) -> None:
        with suppress(OSError):
            while data := self._control.recv(SILENT.size, socket.MSG_WAITALL):
                (number,) = SILENT.unpack(data)
                self._tell(number, "gave no sign of life")
        for number in [*self._silent]:  # others will miss this process, too
            self._tell(number, "cannot be heard: what listens for it has ended")

    def _tell(self, number: int, reason: str) -> None:
        with self._lock:
            silent = self._silent.get(number)
        if silent is not None:
            silent(reason)


_lock = threading.Lock()
_hearts: list[Heart] = []  # one, unless an earlier one has ended


def heart() -> Heart:
    """The heart of this process; the first call starts it."""
    with _lock:
        if not (_hearts and _hearts[-1].beats):
            _hearts.append(Heart())
        return _hearts[-1]
