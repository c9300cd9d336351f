# SPDX-License-Identifier: Apache-2.0
"""Worker processes that are started before they are needed, one for each worker.

Starting a worker is mostly importing: a process on standby has done that
(`standby_process.py`) and takes the place of one that is lost at once. Owns when they
are started, and their end. Does not own workers that know who they are
(`local_processes.py`).
"""

import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

_STANDBY = "hetjax.launchers.standby_process"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCommand:
    """How a worker process is started: words before its own (`WorkerPlace.prefix`),
    the interpreter, its module, variables."""

    prefix: tuple[str, ...] = ()
    python: str = sys.executable
    module: str
    environment: Mapping[str, str]

    @property
    def words(self) -> list[str]:
        return [*self.prefix, self.python, "-m", self.module]

    @property
    def on_standby(self) -> list[str]:
        """The same for one that waits first."""
        return [*self.prefix, self.python, "-m", _STANDBY, self.module]


class WarmStandby:
    """A process for each worker, `after_s` from when it was asked for; 0: none.

    One that was not needed costs memory, but no device. What it says before it is
    claimed is lost: one that cannot even wait is none.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._lock = threading.Lock()
        self._ready: dict[str, tuple[WorkerCommand, subprocess.Popen[str]]] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._is_over = False

    def prepare(self, worker: str, command: WorkerCommand) -> None:
        """Have one for the worker in a while, in the background."""
        with self._lock:
            if self._after_s and not self._is_over:
                self._stop_timer(worker)
                begin = threading.Timer(self._after_s, self._begin, (worker, command))
                begin.daemon = True
                self._timers[worker] = begin
                begin.start()

    def claim(
        self, worker: str, command: WorkerCommand
    ) -> subprocess.Popen[str] | None:
        """The worker's process, if there is one that was started by this command."""
        with self._lock:
            self._stop_timer(worker)
            made, process = self._ready.pop(worker, (None, None))
        if process is None:
            return None
        if made == command and process.poll() is None:
            return process
        _end(process)
        return None

    def end(self) -> None:
        """End all that wait, and start no more."""
        with self._lock:
            self._is_over = True
            for worker in [*self._timers]:
                self._stop_timer(worker)
            waiting = [process for _, process in self._ready.values()]
            self._ready.clear()
        for process in waiting:
            _end(process)

    def _begin(self, worker: str, command: WorkerCommand) -> None:
        with self._lock:
            if self._is_over or worker in self._ready:
                return
            child = subprocess.Popen(
                command.on_standby,
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


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
