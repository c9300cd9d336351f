# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a run in lines: what is being done, and the metrics of steps.

Owns which lines are shown if there is no live line: in the output of a job, in a log.
Does not own live lines (`progress.py`), the numbers (`training/loop.py`) nor their
words (`metrics.py`).
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

from hetjax.files.writing import naming
from hetjax.report.metrics import METRICS, spelled

_SHOWN = tuple(metric for metric in METRICS if metric.in_progress)


def metrics_line(metrics: Mapping[str, Any], num_steps: int) -> str:
    """Return the line of a step or of an evaluation, in columns.

    >>> metrics_line({"step": 7, "loss": 2.5, "tokens": 64, "grad_norm": 0.25}, 100)
    'step   7/100  loss 2.5000  grad_norm 0.250'
    """
    width = len(str(num_steps))
    step = f"step {metrics['step']:>{width}}/{num_steps}"
    return "  ".join([step, *spelled(_SHOWN, metrics)])


class Display:
    """Shows progress in lines on standard output, as in a log.

    Of fast steps, only one in `interval_s` is shown.
    """

    def __init__(self, num_steps: int, interval_s: float = 2.0) -> None:
        self._num_steps, self._interval_s = num_steps, interval_s
        self._next_s = 0.0

    def note(self, line: str) -> None:
        """Show a line that stays."""
        with naming("standard output"):
            print(line, file=sys.stdout, flush=True)

    def begun(self) -> None:
        """Note that the run has begun, and owns its directory."""

    def doing(self, what: str) -> None:
        """Show what is being done, until something else is shown."""
        self.note(what)

    def compiled(self, done: int, total: int) -> None:
        """Show how many of all programs are compiled: the first, then each quarter."""
        if done in (1, total) or done * 4 // total > (done - 1) * 4 // total:
            self.note(f"compiled {done}/{total} programs")

    def trained(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics line of a step."""
        if self._is_due(metrics):
            self.note(metrics_line(metrics, self._num_steps))

    def _is_due(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether this step is shown: the last one is, and one per interval."""
        now_s = time.monotonic()
        if now_s < self._next_s and metrics["step"] != self._num_steps:
            return False
        self._next_s = now_s + self._interval_s
        return True
