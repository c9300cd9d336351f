# SPDX-License-Identifier: Apache-2.0
"""Runs a command while a part measures something else.

Owns its log and its end: no command outlives the block that started it. Does not own
what is run, nor the processes that a command starts in its turn (`time_box.py`).
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TAIL = 800  # characters of a log that go into a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Background:
    """A command that was started; its output is in `log`."""

    process: subprocess.Popen[bytes]
    log: Path

    def exit_code(self, limit_s: float) -> int | None:
        """Wait for its end; None if it still runs after the limit."""
        try:
            return self.process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            return None

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def tail(self) -> str:
        """The end of its output, on one line."""
        return " / ".join(self.output.strip()[-_TAIL:].splitlines())


def ending(code: int | None) -> str:
    """Say in words how a command ended, by its exit code; None means out of time."""
    return "time was up" if code is None else f"exit code {code}"


@contextmanager
def python_module(
    log: Path,
    module: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Background]:
    """Run `python -m MODULE ARGUMENTS`. Kills it at the end of the block if it still
    runs: its last results are not needed, and time is short."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
        )
    try:
        yield Background(process=process, log=log)
    finally:
        process.kill()
        process.wait()
