# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a run goes on: a live bar on a terminal, else plain lines.

Owns the lines, which show the numbers of `metrics.jsonl` under the same names, and
the way of warnings to the screen. Does not own the numbers (`loop.py`).
"""

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_FORMATS = {
    "loss": ".4f",
    "val_loss": ".4f",
    "val_bits_per_byte": ".4f",
    "grad_norm": ".3f",
    "learning_rate": ".2e",
    "tokens_per_s": ",.0f",
    "mfu": ".1%",
}


class Display(Protocol):
    """Where progress is shown."""

    def note(self, line: str) -> None:
        """Show a line that stays."""
        ...

    def compiled(self, done: int, total: int) -> None:
        """Show that so many of all programs are compiled."""
        ...

    def trained(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics line of a step."""
        ...


def metrics_line(metrics: Mapping[str, Any], num_steps: int) -> str:
    """Return the line of a step or of an evaluation, in columns.

    >>> metrics_line({"step": 7, "loss": 2.5, "tokens": 64, "grad_norm": 0.25}, 100)
    'step   7/100  loss 2.5000  grad_norm 0.250'
    """
    width = len(str(num_steps))
    shown = [f"{k} {metrics[k]:{f}}" for k, f in _FORMATS.items() if k in metrics]
    return "  ".join([f"step {metrics['step']:>{width}}/{num_steps}", *shown])


@contextmanager
def display(num_steps: int) -> Iterator[Display]:
    """Open the display that suits standard output; warnings go to it as well."""
    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        bar = _bar(console)
        with bar, _warnings_to(shown := LiveDisplay(bar, num_steps)):
            yield shown
    else:
        with _warnings_to(shown := PlainDisplay(num_steps)):
            yield shown


class PlainDisplay:
    """Lines on standard output; of fast steps only one in `interval_s`."""

    def __init__(self, num_steps: int, interval_s: float = 2.0) -> None:
        self._num_steps, self._interval_s = num_steps, interval_s
        self._next_s = 0.0

    def note(self, line: str) -> None:
        print(line, file=sys.stdout, flush=True)

    def compiled(self, done: int, total: int) -> None:
        if done == total or done * 4 // total > (done - 1) * 4 // total:
            self.note(f"compiled {done}/{total} programs")

    def trained(self, metrics: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or metrics["step"] == self._num_steps:
            self._next_s = now_s + self._interval_s
            self.note(metrics_line(metrics, self._num_steps))


class LiveDisplay:
    """One moving line; what is noted scrolls by above it."""

    def __init__(self, bar: Progress, num_steps: int) -> None:
        self._bar, self._num_steps = bar, num_steps
        self._task: TaskID | None = None

    def note(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def compiled(self, done: int, total: int) -> None:
        self._move(f"compiled {done}/{total} programs", done, total)

    def trained(self, metrics: Mapping[str, Any]) -> None:
        line = metrics_line(metrics, self._num_steps)
        self._move(line, metrics["step"], self._num_steps)

    def _move(self, line: str, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task(line, total=total)
        elif self._bar.tasks[0].total != total:  # from compiling to training
            self._bar.reset(self._task, total=total)
        self._bar.update(self._task, description=line, completed=done, total=total)


def _bar(console: Console) -> Progress:
    text = TextColumn("{task.description}", markup=False)
    # the last line of a run stays: it is the bar's
    return Progress(
        text, BarColumn(bar_width=20), TimeRemainingColumn(), console=console
    )


@contextmanager
def _warnings_to(shown: Display) -> Iterator[None]:
    """Show Python's warnings as notes: on a live terminal they would be overwritten."""

    def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        shown.note(f"warning: {message}")

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before
