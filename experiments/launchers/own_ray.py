# SPDX-License-Identifier: Apache-2.0
"""Runs a private Ray on this machine: its head, and machines that share no folder.

Each machine is a mount namespace (`tests/launchers/apart.py`) in which `ray start` has
joined the head, with an address of its own and the name of a node of the cluster file.
Owns the daemons and their end. Does not own what runs on the machines.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.launchers.apart import Machines, running_beside, switch_off

_RAY = (sys.executable, "-m", "ray.scripts.scripts", "start")
_HAS_STARTED, _START_S, _LOOK_S = "Ray runtime started", 60.0, 0.1
_ACTOR = b"ray::_Worker"


class OwnRay:
    """The machines of `nodes`, which maps their names to addresses."""

    def __init__(self, port: int, nodes: Mapping[str, str]) -> None:
        self.address = f"127.0.0.1:{port}"
        self._names = {address: name for name, address in nodes.items()}
        self._joined: dict[str, subprocess.Popen[bytes]] = {}

    def join(self, machines: Machines, address: str) -> None:
        """Run `ray start` on the machine at this address until the head has it."""
        log = machines.folder / f"{address}.ray.log"
        words = [str(machines.program), address, *_RAY, "--block", "--num-cpus=2"]
        words += [f"--address={self.address}", f"--node-ip-address={address}"]
        words += [f'--resources={{"hetjax_node_{self._names[address]}": 1}}']
        self._joined[address] = _started(words, log)
        _wait_until_started(log)

    def workers(self, address: str) -> list[int]:
        """Return the workers of runs on this machine: Ray's actors."""
        joined = self._joined[address]
        if joined.poll() is not None:  # Ray has ended there
            return []
        return [pid for pid in running_beside(joined.pid) if is_actor(pid)]

    def switch_off(self, address: str) -> None:
        """Kill all processes of a machine that has joined."""
        joined = self._joined.pop(address)
        if joined.poll() is None:
            switch_off(joined.pid)
        joined.wait()

    def end(self) -> None:
        for address in list(self._joined):
            self.switch_off(address)


@contextmanager
def own_ray(nodes: Mapping[str, str]) -> Iterator[OwnRay]:
    """Run the head meanwhile; `OwnRay.join` lets machines join it."""
    with TemporaryDirectory() as folder:  # short: Ray's sockets are below it
        log, port = Path(folder) / "head.log", _free_port()
        words = [*_RAY, "--block", "--head", f"--port={port}", "--num-cpus=0"]
        words += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        ray = OwnRay(port, nodes)
        head = _started([*words, f"--temp-dir={folder}"], log)
        try:
            _wait_until_started(log)
            yield ray
        finally:
            ray.end()
            head.terminate()  # it ends all that it has started
            head.wait()


def _started(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
            start_new_session=True,
        )


def _wait_until_started(log: Path) -> None:
    end_s = time.monotonic() + _START_S
    while _HAS_STARTED not in log.read_text():
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(_LOOK_S)


def is_actor(pid: int) -> bool:
    """Return whether a process is a worker of a run, as an actor of Ray."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_ACTOR)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]
