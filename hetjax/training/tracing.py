# SPDX-License-Identifier: Apache-2.0
"""Which steps of a start are traced, and the file that their trace is written to.

Does not own what is traced (`hetjax/runtime/`) nor the form of the file
(`hetjax/schedule/simulation/trace.py`).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from hetjax.files.writing import write_whole
from hetjax.schedule.simulation.trace import Span, perfetto
from hetjax.training.config import RunConfig

_NUM_TRACED, _WARM_UP = 3, 2  # steps


def steps_to_trace(config: RunConfig, first: int) -> range:
    """Return which steps of this start to trace: past the warm-up, else the last."""
    left = config.steps - first
    if config.stop_after is not None:
        left = min(left, config.stop_after)
    start = max(0, min(_WARM_UP, left - _NUM_TRACED))
    return range(start, min(start + _NUM_TRACED, left))


def write_trace(path: Path, spans: Sequence[Span], num_steps: int) -> str:
    """Write the trace of so many steps, if there are any; return what is said of it."""
    if not num_steps:
        return "--trace: too few steps were left to trace one"
    write_whole(path, json.dumps(perfetto(spans)))
    return f"trace of {num_steps} steps: {path}, to open in ui.perfetto.dev"
