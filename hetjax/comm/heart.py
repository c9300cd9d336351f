# SPDX-License-Identifier: Apache-2.0
"""Exchanges heartbeats between processes; a child process of each sends and hears them.

    python -I -S heart.py CONTROL_FD PARENT_PID

Owns this process's heart: a child process that sends beats on the connections that it
is handed, and reports connections that fall silent. A thread would not do: it waits for
the interpreter's lock, and if a CPU quota starves the process, that takes longer than
the peers wait. The child runs this file as a script. It has one thread, imports only
the standard library and shares no lock with its parent, so it beats whatever the parent
computes. As it sleeps most of the time, the scheduler runs it even if a quota starves
all other processes. It is silent while the parent is stopped, and ends with the parent.

Over the control socket the child receives what to watch, each with its connection, and
reports the numbers of those that were silent for too long. If a connection has keys,
each beat carries its number and a keyed BLAKE2b of that number: a forged or repeated
beat does not count, nor does anything after it. Does not own the connections' proof of
identity (`handshake.py`).
"""

import hmac
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b

Silent = Callable[[str], None]  # why the peer counts as lost
Codes = tuple[bytes, bytes]  # the key for beats that are sent, and for those received

_KEY_BYTES = 32
# number, silence_s (0: stop watching), whether there are keys, both keys
_COMMAND = struct.Struct(f"<Id?{_KEY_BYTES}s{_KEY_BYTES}s")
_NO_KEYS = bytes(_KEY_BYTES), bytes(_KEY_BYTES)
_COUNT, _CODE_BYTES = struct.Struct("<Q"), 16
_SILENT = struct.Struct("<I")  # number
_BEATS = 5  # per silence_s
_PATIENCE = 0.95  # share of silence_s: the rest is for reporting the loss to others
_FIRST = 12  # times silence_s, until the other side must have sent its first beat
_STOPPED = "Tt"  # states of a process, see proc(5)


class Heart:
    """The heart of this process, which ends with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._silent: dict[int, Silent] = {}
        self._number = 0
        self._parent = os.getpid()
        self._control, child = socket.socketpair()
        with child:
            words = [__file__, str(child.fileno()), str(self._parent)]
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[child.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C does not reach it
            )
        threading.Thread(target=self._listen, name="heart", daemon=True).start()

    @property
    def beats(self) -> bool:
        """Whether the child runs, and belongs to this process."""
        return self._parent == os.getpid() and self._child.poll() is None

    def watch(
        self,
        found: socket.socket,
        silence_s: float,
        silent: Silent,
        codes: Codes | None = None,
    ) -> int:
        """Beat on this connection; call `silent` once if the other end stops beating.

        Takes over the connection. Returns the number to `forget` it by.
        """
        with self._lock, found:
            self._number += 1
            self._silent[self._number] = silent
            keys = codes or _NO_KEYS
            command = _COMMAND.pack(self._number, silence_s, codes is not None, *keys)
            socket.send_fds(self._control, [command], [found.fileno()])
            return self._number

    def forget(self, number: int) -> None:
        """Stop beating there; do nothing if that was already requested."""
        with self._lock:
            if self._silent.pop(number, None) is not None:
                with suppress(OSError):  # the child has ended, and its beats with it
                    self._control.sendall(_COMMAND.pack(number, 0.0, False, *_NO_KEYS))

    def _listen(self) -> None:
        with suppress(OSError):
            while data := self._control.recv(_SILENT.size, socket.MSG_WAITALL):
                (number,) = _SILENT.unpack(data)
                self._tell(number, "gave no sign of life")
        for number in [*self._silent]:  # peers will miss this process, too
            self._tell(
                number, "cannot be heard: the process that listens for it has ended"
            )

    def _tell(self, number: int, reason: str) -> None:
        with self._lock:
            silent = self._silent.get(number)
        if silent is not None:
            silent(reason)


_lock = threading.Lock()
_hearts: list[Heart] = []  # one, after any that have ended


def heart() -> Heart:
    """Return the heart of this process; the first call starts it."""
    with _lock:
        if not (_hearts and _hearts[-1].beats):
            _hearts.append(Heart())
        return _hearts[-1]


class Beats:
    """The beats of one direction: bare bytes, or numbered beats with codes."""

    def __init__(self, key: bytes | None) -> None:
        self._key, self._count = key, 0
        self._waiting = b""  # the unsent rest of a beat, or the received part of one

    def next(self, send: Callable[[bytes], int]) -> None:
        """Send the next beat, or the rest of the last one; raise OSError on failure."""
        if not self._waiting:
            self._waiting = self._beat()
            self._count += 1
        self._waiting = self._waiting[send(self._waiting) :]

    def are_in(self, data: bytes) -> bool:
        """Return whether these bytes continue the beats and hold nothing else."""
        if self._key is None:
            return bool(data)
        self._waiting += data
        size = _COUNT.size + _CODE_BYTES
        while len(self._waiting) >= size:
            if not hmac.compare_digest(self._waiting[:size], self._beat()):
                return False
            self._waiting = self._waiting[size:]
            self._count += 1
        return bool(data)

    def _beat(self) -> bytes:
        if self._key is None:
            return b"\1"
        count = _COUNT.pack(self._count)
        code = blake2b(count, key=self._key, digest_size=_CODE_BYTES, person=b"beat")
        return count + code.digest()


class Watched:
    """A connection to another heart: when to beat next, how long to wait for beats."""

    def __init__(
        self,
        found: socket.socket,
        silence_s: float,
        now_s: float,
        codes: Codes | None = None,
    ) -> None:
        self.found, self.silence_s = found, silence_s
        sends, takes = codes or (None, None)
        self._sent, self._received = Beats(sends), Beats(takes)
        self.beat_s = now_s
        self.patient_until_s = now_s + _FIRST * silence_s
        self.is_silent = False
        found.setblocking(False)

    @property
    def due_s(self) -> float:
        """The time of the next thing to do, if nothing arrives."""
        return self.beat_s if self.is_silent else min(self.beat_s, self.patient_until_s)

    def read(self, now_s: float) -> bool:
        """Read what has arrived; return False if nothing more will arrive."""
        try:
            data = self.found.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        is_theirs = self._received.are_in(data)
        if is_theirs:
            self.patient_until_s = now_s + _PATIENCE * self.silence_s
        return is_theirs

    def beat(self, now_s: float, runs: bool) -> None:
        self.beat_s = now_s + self.silence_s / _BEATS
        if runs:
            try:
                self._sent.next(self.found.send)
            except OSError:
                pass  # the peer does not read, or is gone: its own silence shows that


class Hearing:
    """All watched connections, by number, including those that no longer beat.

    A connection that ends says nothing about its process: the link for messages does.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control, self._watched = control, dict[int, Watched]()
        self._numbers, self._poll = dict[int, int](), select.poll()
        self._poll.register(control, select.POLLIN)

    def wait(self) -> tuple[bool, float]:
        """Sleep until something is due or arrives; return (parent is there, late_s)."""
        due_s = min((w.due_s for w in self._watched.values()), default=None)
        left_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        found = self._poll.poll(None if left_s is None else left_s * 1000 + 1)
        now_s = time.monotonic()
        for fd, _ in found:
            if fd == self._control.fileno():
                if not self._obey(now_s):
                    return False, 0.0
            elif fd in self._numbers and not self._watched_at(fd).read(now_s):
                self._deafen(fd)
        return True, 0.0 if due_s is None else now_s - due_s

    def forgive(self, late_s: float) -> None:
        """Do not count beats that were missed while this process could not run."""
        for watched in self._watched.values():
            if late_s > watched.silence_s / _BEATS:
                watched.patient_until_s += late_s

    def beat(self, runs: bool) -> None:
        now_s = time.monotonic()
        for watched in self._watched.values():
            if watched.beat_s <= now_s:
                watched.beat(now_s, runs)

    def tell(self) -> None:
        now_s = time.monotonic()
        for number, watched in self._watched.items():
            if not watched.is_silent and watched.patient_until_s <= now_s:
                watched.is_silent = True
                self._control.sendall(_SILENT.pack(number))

    def _watched_at(self, fd: int) -> Watched:
        return self._watched[self._numbers[fd]]

    def _obey(self, now_s: float) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, _COMMAND.size, 1)
        while len(data) < _COMMAND.size:
            more = self._control.recv(_COMMAND.size - len(data)) if data else b""
            if not more:
                return False
            data += more
        number, silence_s, has_keys, *keys = _COMMAND.unpack(data)
        if fds:
            found = socket.socket(fileno=fds[0])
            codes: Codes | None = (keys[0], keys[1]) if has_keys else None
            watched = self._watched[number] = Watched(found, silence_s, now_s, codes)
            watched.beat(now_s, runs=True)  # its first: whatever the parent does
            self._numbers[fds[0]] = number
            self._poll.register(found, select.POLLIN)
        elif number in self._watched:
            self._deafen(self._watched[number].found.fileno())
            self._watched.pop(number).found.close()
        return True

    def _deafen(self, fd: int) -> None:
        if self._numbers.pop(fd, None) is not None:
            self._poll.unregister(fd)


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped; False if the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state.decode() in _STOPPED


def main(control_fd: int, parent: int) -> None:
    # whoever ends a process group signals all its members, and the parent has to save
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hearing = Hearing(socket.socket(fileno=control_fd))
    with suppress(ConnectionError):  # of the control socket: the parent is gone
        while True:
            is_there, late_s = hearing.wait()
            if not is_there or os.getppid() != parent:
                return
            hearing.forgive(late_s)
            hearing.beat(runs=not is_stopped(parent))
            hearing.tell()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
