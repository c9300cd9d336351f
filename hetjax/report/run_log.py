# SPDX-License-Identifier: Apache-2.0
"""Writes the log of a run: a file with all that the screen shows.

Owns the form of its lines, each with the time in UTC. Does not own the lines on a
screen (`progress.py`), nor what worker processes print
(`hetjax/launchers/local_processes.py`).
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput, NoFeasiblePlan, RunFailed
from hetjax.report.display import Display

_INTERVAL_S = 30.0  # between lines of steps: metrics.jsonl has all of them


class LogFile(Display):
    """Appends lines once the run has begun: a start that is refused writes nothing.

    If the file cannot be written, on a full disk, say, it is left as it is: files that
    must be written report the error.
    """

    def __init__(self, num_steps: int, path: Path) -> None:
        super().__init__(num_steps, _INTERVAL_S)
        self._path, self._held = path, list[str]()
        self.has_begun = False

    def note(self, line: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._held.append(f"{now} {line}\n")
        if self.has_begun:
            self._write()

    def begun(self) -> None:
        self.has_begun = True
        self._write()

    def _write(self) -> None:
        held, self._held = self._held, []
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.writelines(held)


class Logged(Display):
    """Shows everything on a screen and in a log."""

    def __init__(self, screen: Display, log: Display) -> None:
        self._both = screen, log

    def note(self, line: str) -> None:
        for each in self._both:
            each.note(line)

    def begun(self) -> None:
        for each in self._both:
            each.begun()

    def doing(self, what: str) -> None:
        for each in self._both:
            each.doing(what)

    def compiled(self, done: int, total: int) -> None:
        for each in self._both:
            each.compiled(done, total)

    def trained(self, metrics: Mapping[str, Any]) -> None:
        for each in self._both:
            each.trained(metrics)


@contextmanager
def logged(screen: Display, num_steps: int, path: Path) -> Iterator[Display]:
    """Show on the screen and in this log.

    The log also gets the error that ends the run, unless it is BadInput before the run
    has begun.
    """
    log = LogFile(num_steps, path)
    try:
        yield Logged(screen, log)
    except BaseException as error:
        log.note(_ending(error))
        if not isinstance(error, BadInput):
            log.begun()
        raise


def _ending(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (BadInput, NoFeasiblePlan, RunFailed)):
        return f"error\n{error}"
    return "".join(traceback.format_exception(error)).rstrip()
