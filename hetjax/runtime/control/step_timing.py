# SPDX-License-Identifier: Apache-2.0
"""Combines the times of a step that workers report.

Owns the rule that a step counts only if all workers report the same one, and only times
that are finite and positive. Does not own how workers measure
(`hetjax/runtime/execution/step_clock.py`).
"""

import math
from collections.abc import Mapping

from hetjax.costs.slowness.step_times import Ends, Part, StepTimes
from hetjax.runtime.rpc.schema import Trained


class StepTiming:
    """Whether the next steps are timed, and the times of an earlier step."""

    def __init__(self) -> None:
        self.is_wanted = False
        self._times: StepTimes | None = None

    def record(self, answers: Mapping[str, Trained]) -> None:
        """Record the answers of all workers to a step."""
        self._times = joined_times(answers)

    def pop_times(self) -> StepTimes | None:
        """Return the times that came with the last step, once."""
        found, self._times = self._times, None
        return found


def joined_times(answers: Mapping[str, Trained]) -> StepTimes | None:
    """Return the times of a step, counted from 1; None if workers disagree on the step.

    For a stage on several hosts the slowest host counts.
    """
    of_worker = {worker: answer.times for worker, answer in answers.items()}
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
