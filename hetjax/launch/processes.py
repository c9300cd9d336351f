# SPDX-License-Identifier: Apache-2.0
"""Worker processes on this machine, each a child that cannot outlive its controller.

Owns starting them, what they say on their output, and their end. Does not own what they
do (`runtime/worker/serving.py`), nor workers on other machines.
"""

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hetjax.plans.worker_map import file_name
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.runtime.worker.service import WorkerBootstrap

_END_S = 5.0


@dataclass(kw_only=True)
class Processes:
    """Children by worker name; each writes to `logs`/NAME.log.

    They are out of reach of the terminal's Ctrl-C: the controller ends them. A context
    manager that leaves none behind.
    """

    logs: Path
    children: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _files: list[IO[str]] = field(default_factory=list)

    def start(
        self,
        bootstrap: WorkerBootstrap,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        """Start a worker; its bootstrap is written to its standard input, one line.

        What is left of an earlier one of that name is killed.
        """
        if earlier := self.children.pop(bootstrap.worker, None):
            earlier.kill()
            earlier.wait()
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self._log(bootstrap.worker).open("a")
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )
        self._files.append(log)
        self.children[bootstrap.worker] = child
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # `check` tells
            child.stdin.write(bootstrap.text() + "\n")
            child.stdin.close()

    def check(self, workers: Sequence[str]) -> None:
        """Raise WorkerLost for one of these that has ended, with its last words."""
        for worker in workers:
            child = self.children[worker]
            if child.poll() is not None:
                text = self._log(worker).read_text().strip()
                last = text.splitlines()[-1] if text else "without a word"
                raise WorkerLost(
                    worker,
                    f"ended with code {child.returncode} ({last}); its log is "
                    f"{self._log(worker)}",
                )

    def _log(self, worker: str) -> Path:
        return self.logs / f"{file_name(worker)}.log"

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Wait a moment for all to leave by themselves, then kill them."""
        end_s = time.monotonic() + _END_S
        for child in self.children.values():
            try:
                child.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for log in self._files:
            log.close()
        self.children.clear()
