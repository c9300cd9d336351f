# SPDX-License-Identifier: Apache-2.0
"""Chooses which steps of a start are traced, and writes their trace to a file.

Does not own what is traced (`hetjax/runtime/`) nor the form of the file
(`hetjax/schedule/simulation/trace.py`).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from hetjax.files.writing import write_whole
from hetjax.schedule.simulation.trace import Span, perfetto
from hetjax.training.directory.rundir import TRACE
from hetjax.training.settings.config import RunConfig

_NUM_TRACED, _WARM_UP = 3, 2  # steps


def steps_to_trace(config: RunConfig, first: int) -> range:
    """Return which steps of this start to trace: after the warm-up, else the last."""
    left = config.steps - first
    if config.stop_after is not None:
        left = min(left, config.stop_after)
    start = max(0, min(_WARM_UP, left - _NUM_TRACED))
    return range(start, min(start + _NUM_TRACED, left))


class Tracing:
    """The traced steps of a start after step `first`; none without `--trace`."""

    def __init__(self, config: RunConfig, first: int) -> None:
        self._path: Path | None = config.run_dir / TRACE if config.trace else None
        self._steps = steps_to_trace(config, first) if config.trace else range(0)
        self._num_traced = 0

    def includes(self, num_trained: int) -> bool:
        """Return whether the step after `num_trained` is traced; if so, count it."""
        is_traced = num_trained in self._steps
        self._num_traced += is_traced
        return is_traced

    def write(self, spans: Callable[[], Sequence[Span]]) -> str | None:
        """Write the trace, if one was requested; return a message about it."""
        if self._path is None:
            return None
        if not self._num_traced:
            return "--trace: too few steps were left, so none was traced"
        write_whole(self._path, json.dumps(perfetto(spans())))
        return (
            f"trace of {self._num_traced} steps: {self._path}, to open in "
            "ui.perfetto.dev"
        )
