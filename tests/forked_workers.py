# SPDX-License-Identifier: Apache-2.0
"""Workers of tests, forked from a process that has imported what all of them import.

Importing is a third of what a short run on workers computes. `started` is the side of
the test, `main` the process that forks. A forked worker has a log, an environment, a
standard input and a session of its own, as one that is started has them. Does not own
starts as users have them, of which `tests/launch/` and `tests/runtime/test_islands.py`
make many.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TextIO

from hetjax.launch.launching import Processes
from hetjax.launch.spares import Command

# read while Python starts or what it imports does; others may differ between workers
_READ_AT_START = ("GLIBC_", "JAX_", "LD_", "MALLOC_", "PJRT_", "PYTHON", "XLA_")
_SIZE = 8  # bytes of a number between the two


@dataclass(kw_only=True)
class ForkedWorker:
    """What `Processes` asks of a child; its code comes through a pipe as it ends."""

    pid: int
    stdin: TextIO
    code: int  # the pipe's descriptor
    returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self.code], [], [], timeout_s)[0]:
            self.returncode = int(os.read(self.code, 16) or "-9")
            os.close(self.code)
        return self.returncode


# by what is read at a start: the other end of a process that forks, which ends with it
_forking: dict[frozenset[tuple[str, str]], socket.socket] = {}
_one_at_a_time = threading.Lock()


_start = Processes._started


def started(
    processes: Processes, worker: str, command: Command
) -> ForkedWorker | subprocess.Popen[str]:
    """Fork a worker, in place of `Processes._started`; start it where it has words
    before its own."""
    if command.prefix:
        return _start(processes, worker, command)
    asked = json.dumps(dict(command.environment)).encode()
    told, stdin = os.pipe()
    code, ended = os.pipe()
    with _one_at_a_time, processes._log(worker).open("ab") as log:
        asking = _forking_for(command)
        fds = [told, log.fileno(), ended]
        socket.send_fds(asking, [len(asked).to_bytes(_SIZE, "big")], fds)
        asking.sendall(asked)
        pid = int.from_bytes(asking.recv(_SIZE), "big")
    os.close(told)
    os.close(ended)
    return ForkedWorker(pid=pid, stdin=os.fdopen(stdin, "w"), code=code)


def _forking_for(command: Command) -> socket.socket:
    """The way to a process that forks what this command would start."""
    variables = command.environment.items()
    at_start = [item for item in variables if item[0].startswith(_READ_AT_START)]
    key = frozenset({("module", command.module), *at_start})
    if key not in _forking:
        _forking[key], theirs = socket.socketpair()
        words = [sys.executable, "-m", "tests.forked_workers", command.module]
        with theirs:
            subprocess.Popen(
                words,
                stdin=theirs.fileno(),
                env=dict(command.environment),
                start_new_session=True,
            )
    return _forking[key]


def main() -> None:
    """Fork a worker for each request, and tell the code of each that ends."""
    module = sys.argv[1]
    import_module(module)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    asked = socket.socket(fileno=os.dup(0))
    children: dict[int, tuple[int, int]] = {}  # by descriptor: process, where to tell
    while True:
        ready, _, _ = select.select([asked.fileno(), *children], [], [])
        for ended in children.keys() & ready:
            pid, told = children.pop(ended)
            _, status = os.waitpid(pid, 0)
            os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(told)
            os.close(ended)
        if asked.fileno() in ready:
            environment, fds = _request(asked)
            stdin, log, told = fds
            pid = os.fork()
            if not pid:
                _become(module, environment, stdin, log)
            asked.sendall(pid.to_bytes(_SIZE, "big"))
            os.close(stdin)
            os.close(log)
            children[os.pidfd_open(pid)] = pid, told


def _request(asked: socket.socket) -> tuple[Mapping[str, str], list[int]]:
    """Environment and descriptors of a worker; the process ends with its other end."""
    size, fds, _, _ = socket.recv_fds(asked, _SIZE, 3)
    if not size:
        os._exit(0)
    with asked.makefile("rb") as request:
        return json.loads(request.read(int.from_bytes(size, "big"))), fds


def _become(module: str, environment: Mapping[str, str], stdin: int, log: int) -> None:
    """Be what `python -m MODULE` is, with no descriptor but the three standard ones."""
    os.setsid()
    for theirs, own in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(theirs, own)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [module]
    del sys.modules[module]  # what it imports stays
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
