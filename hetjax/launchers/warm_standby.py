# SPDX-License-Identifier: Apache-2.0
"""Starts worker processes before they are needed, one for each worker.

Starting a worker is mostly importing. A standby process has done that
(`standby_process.py`), and so replaces a lost worker at once. Owns when standby
processes start and end. Does not own processes that are workers already
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
    """How a worker process is started.

    `prefix` are the words before its own (`WorkerPlace.prefix`), `python` is the
    interpreter, `module` its module, `environment` its variables.
    """

    prefix: tuple[str, ...] = ()
    python: str = sys.executable
    module: str
    environment: Mapping[str, str]

    @property
    def words(self) -> list[str]:
        return [*self.prefix, self.python, "-m", self.module]

    @property
    def on_standby(self) -> list[str]:
        """The command of a process that waits first."""
        return [*self.prefix, self.python, "-m", _STANDBY, self.module]


class WarmStandby:
    """A process for each worker, started `after_s` after `prepare`; 0: none.

    An unused one costs memory, but no device. Its output before it is claimed is lost.
    One that ends while it waits is not used.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._lock = threading.Lock()
        self._ready: dict[str, tuple[WorkerCommand, subprocess.Popen[str]]] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._is_over = False

    def prepare(self, worker: str, command: WorkerCommand) -> None:
        """Start one for the worker in a while, in the background."""
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
        """Return the worker's process, if this command has started one."""
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
