# SPDX-License-Identifier: Apache-2.0
"""Test workers, forked from a process that has imported what all of them import.

Importing is a fifth of what a short run on workers computes. Like a started worker, a
forked one has its own log, environment, standard input and session. Does not own the
forking process (the standard library's `forkserver`), nor workers that start as users
start them, which `tests/launchers/` and `tests/runtime/test_islands.py` cover.
"""

import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TextIO

from hetjax.launchers.local_processes import Processes
from hetjax.launchers.warm_standby import WorkerCommand

MODULE = "hetjax.training.worker"

# read while Python starts, or while it imports
_READ_AT_START = ("JAX_", "LD_", "PYTHON")
_start = Processes._started
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload([MODULE])


@dataclass(frozen=True, kw_only=True)
class ForkedWorker:
    """The interface of a child process that `Processes` and tests use."""

    process: ForkServerProcess
    stdin: TextIO

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        self.process.kill()


def started(
    processes: Processes, worker: str, command: WorkerCommand
) -> ForkedWorker | subprocess.Popen[str]:
    """Fork a worker, in place of `Processes._started`. Start it as usual if it needs
    another command, or other variables that Python or imports read."""
    is_like = _read_at_start(command.environment) == _read_by_who_forks()
    if command.prefix or command.module != MODULE or not is_like:
        return _start(processes, worker, command)
    told, stdin = os.pipe()
    log = os.open(processes._log(worker), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Connection(told, writable=False) as lines, Connection(log, False) as output:
        process = _forking.Process(
            target=_serve,
            args=(dict(command.environment), Path.cwd(), limit, lines, output),
            daemon=True,
        )
        process.start()
    return ForkedWorker(process=process, stdin=os.fdopen(stdin, "w"))


@cache
def _read_by_who_forks() -> frozenset[tuple[str, str]]:
    """Return the settings of the forking process, which the first worker starts."""
    return _read_at_start(os.environ)


def _read_at_start(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    items = environment.items()
    return frozenset(item for item in items if item[0].startswith(_READ_AT_START))


def _serve(
    environment: Mapping[str, str],
    folder: Path,
    file_bytes: tuple[int, int],
    lines: Connection,
    output: Connection,
) -> None:
    """Behave as `python -m MODULE`."""
    os.setsid()
    for theirs, own in ((lines, 0), (output, 1), (output, 2)):
        os.dup2(theirs.fileno(), own)
    lines.close()
    output.close()
    sys.stdin = open(0)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, file_bytes)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [MODULE]
    sys.modules[MODULE].main()
