# SPDX-License-Identifier: Apache-2.0
"""Sums how long each stage worked in a step, by kind of action, without waiting for it.

Owns the sums, and the rule that only complete sums are reported: those of a finished
step, while the next one runs. Waiting for others is no work: RECV, REDUCE and NORM are
watched for their ends, but not counted. Does not own when an action ran
(`action_watch.py`) nor the use of the sums (`hetjax/costs/slowness/`).
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hetjax.runtime.execution.action_watch import ActionWatch
from hetjax.schedule.programs.action import Action, Op


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTimes:
    """A worker's report of a finished step.

    `worked` has replica, stage, kind of action and seconds; `sent` the seconds per byte
    of large messages to peers since its last report.
    """

    step: int
    worked: Sequence[tuple[int, int, str, float]]
    sent: Sequence[tuple[str, float]] = ()


_WORK = frozenset({Op.F, Op.B, Op.FB, Op.I, Op.W, Op.UPDATE})
_MOST_MEDIANS = 3.0
_WATCHED = _WORK | {Op.RECV, Op.REDUCE, Op.NORM}


class StepSums:
    """An `ActionObserver` of one step."""

    def __init__(self, step: int, actions: ActionWatch) -> None:
        self.step, self._actions = step, actions
        self._seconds = defaultdict[tuple[int, int, str], list[float]](list)
        self._num_left, self._lock = 0, threading.Lock()

    def enqueued(self, action: Action, start_s: float, end_s: float, made: Any) -> None:
        if action.op in _WATCHED and made is not None:
            with self._lock:
                self._num_left += 1
            self._actions.watch(action, start_s, made, self._seen)

    @property
    def is_whole(self) -> bool:
        """Whether all enqueued actions have run; read once no more will be enqueued."""
        return self._num_left == 0

    def worked(self) -> list[tuple[int, int, str, float]]:
        """Return the sums, once the step is whole.

        An interrupted action counts as at most a few median ones: a pause of the host,
        which hits one of many actions, is no work of the device.
        """
        found = []
        for part, seconds in sorted(self._seconds.items()):
            most_s = _MOST_MEDIANS * median(seconds)
            found.append((*part, sum(min(s, most_s) for s in seconds)))
        return found

    def _seen(self, action: Action, start_s: float, end_s: float) -> None:
        with self._lock:
            self._num_left -= 1
            if action.op in _WORK:
                part = (action.replica, action.stage, str(action.op))
                self._seconds[part].append(end_s - start_s)


class StepClock:
    """The steps of a worker's stages, one after the other."""

    def __init__(self) -> None:
        self._actions = ActionWatch()
        self._begun: list[StepSums] = []  # the last two

    def begin(self, step: int) -> StepSums:
        """Return the observer of this step."""
        sums = StepSums(step, self._actions)
        self._begun = [*self._begun[-1:], sums]
        return sums

    def pop_finished(self, before: int) -> StepSums | None:
        """Return the last step before this one, once, if all of it has run.

        Its UPDATE runs into the next step, so a step is never reported at once.
        """
        over = [sums for sums in self._begun if sums.step < before]
        self._begun = [sums for sums in self._begun if sums.step >= before]
        return over[-1] if over and over[-1].is_whole else None
