# SPDX-License-Identifier: Apache-2.0
"""Defines runs to attack: six steps of preset `tiny` on two nodes, a replica each.

Owns starting a run as a process, watching its progress, and its output. Does not own
the attacks.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.attacks.victim import FOLDER, MODULE
from experiments.recovery.kills import losses, workers
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import EVENTS, LOGS, METRICS
from tests import jax_settings
from tests.training.pair import training

STEPS = 6
_LOOK_S, _LONGEST_S = 0.05, 900.0
EMBEDDED = ("--launcher", "embedded")
DONE, REFUSED, STOPPED = 0, 2, 4  # exit codes


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run in its own folder; all runs share their data below `top`."""

    folder: Path
    top: Path

    @cached_property
    def attacks(self) -> Path:
        found = self.folder / "attacks"
        found.mkdir(parents=True, exist_ok=True)
        return found

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def attack(self, *names: str) -> None:
        """Request these attacks, which happen at their triggers."""
        for name in names:
            (self.attacks / name).touch()

    def words(self, *options: str) -> list[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return training(self.run_dir, self.top / "cache", *options)

    @contextmanager
    def going(
        self, *options: str, env: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start the run; it does not outlive the `with`."""
        command = [sys.executable, "-m", MODULE, *self.words(*options)]
        flags = " ".join(jax_settings.quick_flags())
        quick = {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        path = [*filter(None, (env or {}).get("PYTHONPATH", "").split(os.pathsep))]
        shared = {
            **os.environ,
            **quick,
            FOLDER: str(self.attacks),
            **(env or {}),
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)]),
        }
        with self.said.open("ab") as said:
            pipe = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=said)
        # its output goes through a pipe, so that limits on file size do not apply to it
        run = subprocess.Popen(
            command, stdout=pipe.stdin, stderr=subprocess.STDOUT, env=shared
        )
        try:
            yield run
        finally:
            if run.poll() is None:
                run.kill()
                run.wait()
            assert pipe.stdin is not None
            pipe.stdin.close()
            pipe.wait()

    def ended(self, *options: str, env: Mapping[str, str] | None = None) -> int:
        """Run to the end without further attacks; return the exit code."""
        with self.going(*options, env=env) as run:
            return run.wait(_LONGEST_S)

    def wait_until(
        self, run: subprocess.Popen[bytes], is_so: Callable[[], object]
    ) -> None:
        """Return once `is_so()` holds or the run is over."""
        end_s = time.monotonic() + _LONGEST_S
        while run.poll() is None and not is_so():
            assert time.monotonic() < end_s, "the run neither ends nor goes on"
            time.sleep(_LOOK_S)

    def has_done(self, step: int) -> Callable[[], bool]:
        return lambda: any(line["step"] >= step for line in self.trained)

    def kill(self, worker: str) -> None:
        os.kill(workers(self.run_dir)[worker], signal.SIGKILL)

    @property
    def said(self) -> Path:
        return self.folder / "said"

    @property
    def words_said(self) -> str:
        return self.said.read_text(errors="replace")

    @property
    def trained(self) -> list[dict[str, Any]]:
        return [line for line in read_journal(self.run_dir / METRICS) if "loss" in line]

    def events(self, name: str) -> list[dict[str, Any]]:
        found = read_journal(self.run_dir / EVENTS)
        return [line for line in found if line["event"] == name]

    @property
    def logs(self) -> str:
        return "".join(log.read_text() for log in (self.run_dir / LOGS).glob("*"))

    @property
    def losses(self) -> list[dict[str, Any]]:
        return losses(self.run_dir)

    def is_left_alone(self) -> bool:
        """Whether no worker is left."""
        return not workers(self.run_dir)


def run_in(folder: Path, number: int = 0) -> Run:
    """Return one of the runs of an attack, which uses this folder."""
    return Run(folder=folder / str(number), top=folder.parent)


def unharmed(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Return the numbers of a run without attacks; one is kept for each launcher."""
    name = "-".join(["whole", *options]).replace("--", "")
    whole = Run(folder=folder.parent / name, top=folder.parent)
    if not whole.events("finished"):
        assert whole.ended(*options) == DONE, whole.words_said
    return whole.losses
