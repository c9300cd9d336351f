# SPDX-License-Identifier: Apache-2.0
"""Shows what a command is doing: a live line, or plain lines in a log.

The live line names the current work and how long it has taken; a separate thread keeps
it moving, whatever the command waits for. In a notebook it is a line of the cell's
output that changes in place. Owns live lines, and showing warnings on the screen. Does
not own what the lines of training say (`display.py`) nor the log (`run_log.py`).
"""

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hetjax.report.display import Display, metrics_line
from hetjax.report.run_log import logged

_TRAINING, _WARNING = "training", "warning: "
_SILENCE_S = 5.0  # of a log, before it names the current work
_INTERVAL_S = 2.0  # at least, between lines that `now_and_then` passes on
_TEXT = TextColumn("{task.description}", markup=False)


class LiveDisplay(Display):
    """One moving line; notes scroll by above it."""

    def __init__(self, bar: Progress, num_steps: int) -> None:
        super().__init__(num_steps)
        self._bar = bar
        self._phase, self._task = "", TaskID(0)

    def note(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def doing(self, what: str) -> None:
        self._move(what, what, 0, None)

    def compiled(self, done: int, total: int) -> None:
        self._move("compiling", f"compiled {done}/{total} programs", done, total)

    def trained(self, metrics: Mapping[str, Any]) -> None:
        line = metrics_line(metrics, self._num_steps)
        self._move(_TRAINING, line, metrics["step"], self._num_steps)

    def end(self) -> None:
        """Remove the line, unless it is a step's: the last step stays."""
        if self._phase != _TRAINING:
            self._clear()

    def _move(self, phase: str, line: str, done: int, total: int | None) -> None:
        """Change the line; the clock restarts with another phase."""
        if phase != self._phase:
            self._phase = phase
            self._clear()
            self._task = self._bar.add_task(line, total=total)
        self._bar.update(self._task, description=line, completed=done)

    def _clear(self) -> None:
        # all tasks: Ctrl-C may have come before the number of one was kept
        for task in self._bar.task_ids:
            self._bar.remove_task(task)


class QuietDisplay(Display):
    """Shows only warnings, on standard error."""

    def note(self, line: str) -> None:
        if line.startswith(_WARNING):
            print(line, file=sys.stderr, flush=True)


class NotebookLine:
    """A line of a notebook cell's output, which changes in place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, line: str) -> None:
        from IPython.display import DisplayHandle  # which every notebook has

        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display({"text/plain": line}, raw=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)

    def clear(self) -> None:
        if self._handle is not None:
            self.show("")


class NotebookDisplay(Display):
    """A line of the cell's output that changes in place; notes stay."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps, interval_s=0.5)
        self._line, self._is_step = NotebookLine(), False

    def doing(self, what: str) -> None:
        self._move(what)

    def compiled(self, done: int, total: int) -> None:
        self._move(f"compiled {done}/{total} programs")

    def trained(self, metrics: Mapping[str, Any]) -> None:
        if self._is_due(metrics):
            self._move(metrics_line(metrics, self._num_steps), is_step=True)

    def end(self) -> None:
        """Remove the line, unless it is a step's: the last step stays."""
        if not self._is_step:
            self._line.clear()

    def _move(self, line: str, *, is_step: bool = False) -> None:
        self._line.show(line)
        self._is_step = is_step


_is_quiet = False  # a process has one screen


@contextmanager
def quiet_if(asked: bool) -> Iterator[None]:
    """Within it, show no progress if `asked`: only errors, warnings and results."""
    global _is_quiet
    before, _is_quiet = _is_quiet, _is_quiet or asked
    try:
        yield
    finally:
        _is_quiet = before


def is_quiet() -> bool:
    return _is_quiet


@contextmanager
def display(num_steps: int, log: Path | None = None) -> Iterator[Display]:
    """Open the display that suits standard output; warnings go to it as well.

    If there is a `log`, it gets everything that the display shows.
    """
    with ExitStack() as stack:
        shown = stack.enter_context(_on_screen(num_steps))
        if log is not None:
            shown = stack.enter_context(logged(shown, num_steps, log))
        stack.enter_context(_warnings_to(shown))
        yield shown


@contextmanager
def _on_screen(num_steps: int) -> Iterator[Display]:
    console = Console()
    if _is_quiet:
        yield QuietDisplay(num_steps)
    elif console.is_jupyter:
        shown = NotebookDisplay(num_steps)
        try:
            yield shown
        finally:
            shown.end()
    elif is_live(console):
        columns = SpinnerColumn(), _TEXT, BarColumn(bar_width=20)
        clocks = TimeElapsedColumn(), TimeRemainingColumn()
        with Progress(*columns, *clocks, console=console) as bar:
            shown = LiveDisplay(bar, num_steps)
            try:
                yield shown
            finally:
                shown.end()
    else:
        yield Display(num_steps)


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress on standard error, unless quiet.

    On a terminal and in a notebook the line is gone at the end, so that results stand
    alone. A log shows `what` once it has been silent for a while.
    """
    console = Console(stderr=True)
    if quiet or _is_quiet:
        yield lambda line: None
    elif console.is_jupyter:
        notebook_line = NotebookLine()
        try:
            yield notebook_line.show
        finally:
            notebook_line.clear()
    elif is_live(console):
        line = SpinnerColumn(), _TEXT, TimeElapsedColumn()
        with Progress(*line, console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda line: bar.update(task, description=line)
    else:
        with _said_after(_SILENCE_S, what):
            yield say_aside


def now_and_then(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes on at most one line per _INTERVAL_S to `tell`."""
    next_s = time.monotonic() + _INTERVAL_S

    def report_line(line: str) -> None:
        nonlocal next_s
        if (now_s := time.monotonic()) >= next_s:
            next_s = now_s + _INTERVAL_S
            tell(line)

    return report_line


def say_aside(line: str) -> None:
    """Print a line on standard error, apart from results, unless all is quiet."""
    if not _is_quiet:
        print(line, file=sys.stderr, flush=True)


def say_at_once(line: str) -> None:
    """Print a line on standard error from a signal's handler.

    The signal may have interrupted a print. If the terminal is gone, does nothing.
    """
    with suppress(OSError):
        os.write(2, f"\n{line}\n".encode())


@contextmanager
def _said_after(silence_s: float, what: str) -> Iterator[None]:
    """Name the current work after `silence_s`, unless it is done before."""
    timer = threading.Timer(silence_s, say_aside, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def _warnings_to(shown: Display) -> Iterator[None]:
    """Show Python's warnings as notes: on a live terminal they would be overwritten."""

    def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        shown.note(f"{_WARNING}{message}")

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before
