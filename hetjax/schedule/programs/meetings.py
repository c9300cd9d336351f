# SPDX-License-Identifier: Apache-2.0
"""Who has come to which collective of a simulated step.

Owns the counting of REDUCE and NORM over their holders. Does not own the clock, nor
how long a collective takes (`simulation/simulator.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

from hetjax.schedule.programs.action import (
    COLLECTIVE,
    Action,
    Group,
    Op,
    Programs,
    StageKey,
)

NORM = None  # the name of the one collective that is no group's


class Meetings:
    """The collectives of one step; `waiting` are those to be told when one is done."""

    def __init__(self, programs: Programs) -> None:
        met = [a for program in programs.values() for a in program]
        met = [action for action in met if action.op in COLLECTIVE]
        self._missing = Counter(action.group for action in met)
        self._groups_of: dict[StageKey, list[Group]] = defaultdict(list)
        for action in met:
            if action.group is not None:
                self._groups_of[action.key].append(action.group)
        self.last_s: dict[Group | None, float] = defaultdict(float)
        self.done_s: dict[Group | None, float] = {}
        self.waiting: dict[Group | None, list[Callable[[float], None]]]
        self.waiting = defaultdict(list)

    def come(self, group: Group | None, now: float) -> bool:
        """Note one holder; True if it is the last to come."""
        self._missing[group] -= 1
        self.last_s[group] = max(self.last_s[group], now)
        return not self._missing[group]

    def waits_for(self, action: Action) -> Group | None | Literal[False]:
        """Return what must be done before the action; False if nothing."""
        if action.op is Op.UPDATE:
            return False if NORM in self.done_s else NORM
        if action.op is Op.NORM:
            for group in self._groups_of[action.key]:
                if group not in self.done_s:
                    return group
        return False

    def reduced_s(self, stage: StageKey) -> float:
        """Return when the last of the stage's groups was summed."""
        return max((self.done_s[g] for g in self._groups_of[stage]), default=0.0)
