# SPDX-License-Identifier: Apache-2.0
"""What workers tell of the times of a step, put together.

Owns that a step counts only if all tell of the same one, in numbers that can be. Does
not own how they measure (`hetjax/runtime/execution/step_clock.py`).
"""

import math
from collections.abc import Mapping

from hetjax.costs.slowness.step_times import Ends, Part, StepTimes
from hetjax.runtime.rpc.schema import Trained


class StepTiming:
    """Whether the next steps are timed, and what was heard of earlier ones."""

    def __init__(self) -> None:
        self.is_wanted = False
        self._heard: StepTimes | None = None

    def hear(self, told: Mapping[str, Trained]) -> None:
        """Take the answers of all workers to a step."""
        self._heard = told_times(told)

    def take(self) -> StepTimes | None:
        """Return what was heard with the last step, once."""
        found, self._heard = self._heard, None
        return found


def told_times(told: Mapping[str, Trained]) -> StepTimes | None:
    """Return the times of a step, counted from 1; None where there are none.

    Of a stage on several hosts that of the slowest counts.
    """
    of_worker = {worker: answer.times for worker, answer in told.items()}
    [step, *others] = {times and times.step for times in of_worker.values()}
    if others or step is None:
        return None
    parts: dict[Part, float] = {}
    links: dict[Ends, float] = {}
    for worker, times in of_worker.items():
        assert times is not None
        for r, s, kind, seconds in times.worked:
            if _can_be(seconds):
                parts[r, s, kind] = max(seconds, parts.get((r, s, kind), 0.0))
        for peer, s_per_byte in times.sent:
            if _can_be(s_per_byte):
                links[worker, peer] = s_per_byte
    return StepTimes(step=step + 1, parts=parts, links=links)


def _can_be(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
