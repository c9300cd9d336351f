# SPDX-License-Identifier: Apache-2.0
"""Machines that share no folder, and join a run whenever it waits for them.

Each is a mount namespace (`tests/launchers/apart.py`) with an address of its own. While
it is on, it runs the command that the run has printed for its node, with the token that
lies there, and again with the next token once that command has ended. Owns this, and
the end of the commands. Does not own what a run makes of a machine that joins.
"""

import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.launchers.apart import Machines, running_beside, switch_off
from tests.launchers.joining import joining, told

_LOOK_S = 0.2
_WORKER = b"hetjax.training.worker"


class JoiningMachines:
    """Machines of `nodes`, which maps their names to addresses, for one run at a time.

    `run_dir` is where the run prints its commands.
    """

    def __init__(self, nodes: Mapping[str, str], run_dir: Path) -> None:
        self._names = {address: name for name, address in nodes.items()}
        self._run_dir = run_dir
        self._on: dict[str, Machines] = {}
        self._joined: dict[str, subprocess.Popen[str]] = {}
        self._used: dict[str, str] = {}  # the last token of each machine
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, machines: Machines, address: str) -> None:
        """Switch the machine at this address on."""
        with self._lock:
            self._on[address] = machines

    def workers(self, address: str) -> list[int]:
        """Return the worker of the run on this machine."""
        joined = self._joined.get(address)
        if joined is None or joined.poll() is not None:
            return []
        return [pid for pid in running_beside(joined.pid) if _is_worker(pid)]

    def client(self, address: str) -> int | None:
        """Return the process that has joined; None if there is none."""
        joined = self._joined.get(address)
        return None if joined is None or joined.poll() is not None else joined.pid

    def switch_off(self, address: str) -> None:
        """Kill all processes of the machine, and keep it off."""
        with self._lock:
            self._on.pop(address, None)
            joined = self._joined.pop(address, None)
        if joined is not None:
            with suppress(FileNotFoundError):  # it has ended meanwhile
                switch_off(joined.pid)
            joined.wait()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        for address in [*self._joined]:
            self.switch_off(address)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            with self._lock:
                for address, machines in self._on.items():
                    if self.client(address) is None:
                        self._try(machines, address)

    def _try(self, machines: Machines, address: str) -> None:
        """Join if the run has printed another command for this machine."""
        with suppress(OSError):
            now = told(self._run_dir).get(self._names[address])
            if now is None or now.token == self._used.get(address):
                return
            self._used[address] = now.token
            typed = [*now.words, "--address", address]
            output = machines.folder / f"{address}.join.log"
            prefix = [str(machines.program), address]
            self._joined[address] = joining(typed, now.token, output, prefix)


@contextmanager
def joining_machines(
    nodes: Mapping[str, str], run_dir: Path
) -> Iterator[JoiningMachines]:
    """Let machines join the run in this directory meanwhile."""
    found = JoiningMachines(nodes, run_dir)
    try:
        yield found
    finally:
        found.end()


def _is_worker(pid: int) -> bool:
    with suppress(OSError):
        return _WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
