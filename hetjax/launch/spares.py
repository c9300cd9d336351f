# SPDX-License-Identifier: Apache-2.0
"""Worker processes that are started before they are needed, one for each worker.

Starting a worker is mostly importing: a spare has done that (`waiting.py`) and takes
the place of one that is lost at once. Owns when spares are started, and their end. Does
not own workers that were told who they are (`launching.py`).
"""

import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """How a worker process is started: words before its own, its module, variables."""

    prefix: tuple[str, ...] = ()
    module: str
    environment: Mapping[str, str]

    @property
    def words(self) -> list[str]:
        return [*self.prefix, sys.executable, "-m", self.module]

    @property
    def waiting(self) -> list[str]:
        """The same for one that waits first."""
        python = [*self.prefix, sys.executable, "-m", "hetjax.launch.waiting"]
        return [*python, self.module]


class Spares:
    """A spare for each worker, `after_s` from when it was asked for; 0: none.

    One that was not needed costs memory, but no device. What it says before it is taken
    is lost: one that cannot even wait is none.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._lock = threading.Lock()
        self._ready: dict[str, tuple[Command, subprocess.Popen[str]]] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._is_over = False

    def keep(self, worker: str, command: Command) -> None:
        """Have one for the worker in a while, in the background."""
        with self._lock:
            if self._after_s and not self._is_over:
                self._stop_timer(worker)
                begin = threading.Timer(self._after_s, self._begin, (worker, command))
                begin.daemon = True
                self._timers[worker] = begin
                begin.start()

    def take(self, worker: str, command: Command) -> subprocess.Popen[str] | None:
        """The worker's spare, if there is one that was started by this command."""
        with self._lock:
            self._stop_timer(worker)
            made, spare = self._ready.pop(worker, (None, None))
        if spare is None:
            return None
        if made == command and spare.poll() is None:
            return spare
        _end(spare)
        return None

    def end(self) -> None:
        """End all that wait, and start no more."""
        with self._lock:
            self._is_over = True
            for worker in [*self._timers]:
                self._stop_timer(worker)
            waiting = [spare for _, spare in self._ready.values()]
            self._ready.clear()
        for spare in waiting:
            _end(spare)

    def _begin(self, worker: str, command: Command) -> None:
        with self._lock:
            if self._is_over or worker in self._ready:
                return
            child = subprocess.Popen(
                command.waiting,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(command.environment),
                text=True,
                start_new_session=True,
            )
            self._ready[worker] = command, child

    def _stop_timer(self, worker: str) -> None:
        if timer := self._timers.pop(worker, None):
            timer.cancel()


def _end(spare: subprocess.Popen[str]) -> None:
    spare.kill()
    spare.wait()
    assert spare.stdin is not None
    spare.stdin.close()
