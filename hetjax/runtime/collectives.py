# SPDX-License-Identifier: Apache-2.0
"""What REDUCE and NORM mean: the meeting points of one step.

Owns what a worker asks of them, and the meeting in one process. A stage posts and goes
on; results are there once every holder has posted. Does not own the arithmetic of a
group's sum (`hetjax/comm/reduction.py`) nor meetings of processes (`meeting.py`).
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

from hetjax.comm.reduction import Rows, exchange
from hetjax.comm.tally import Tally
from hetjax.comm.wire import SUMS
from hetjax.schedule.action import Group, StageKey


class Collectives(Protocol):
    """Meeting points of one training step; all calls return at once but `squares`,
    which may wait for the devices of stages that have posted."""

    def post(self, group: Group, stage: StageKey, rows: Rows) -> None:
        """Contribute a stage's gradients of a group, packed."""
        ...

    def summed(self, group: Group, stage: StageKey) -> Rows | None:
        """The group's sum for this holder, or None while a holder is missing."""
        ...

    def post_squares(self, stage: StageKey, squares: jax.Array) -> None:
        """Contribute the squared norm of the groups that the stage owns."""
        ...

    def squares(self) -> float | None:
        """The sum over all stages of the plan, or None while one is missing."""
        ...


class InProcessCollectives:
    """Meeting points of one training step; make a new one for each step.

    `sent` counts what devices send each other, by (from stage, to stage).
    """

    def __init__(self, holders: Mapping[Group, tuple[StageKey, ...]], num_stages: int):
        self._holders = holders
        self._num_stages = num_stages
        self._posted: dict[Group, dict[StageKey, Rows]] = {}
        self._sums: dict[tuple[Group, StageKey], Rows] = {}
        self._squares: dict[StageKey, jax.Array] = {}
        self._total: float | None = None
        self.sent = Tally()

    def post(self, group: Group, stage: StageKey, rows: Rows) -> None:
        """Contribute; the last holder to post starts the exchange."""
        posted = self._posted.setdefault(group, {})
        posted[stage] = rows
        if len(posted) == len(self._holders[group]):
            holders = self._holders[group]

            def moved(a: int, b: int, num_bytes: int) -> None:
                self.sent.add((holders[a], holders[b]), SUMS, num_bytes)

            totals = exchange([posted[holder] for holder in holders], moved)
            for holder, total in zip(holders, totals, strict=True):
                self._sums[group, holder] = total
            del self._posted[group]

    def summed(self, group: Group, stage: StageKey) -> Rows | None:
        """The group's sum for this holder, or None while a holder is missing."""
        return self._sums.get((group, stage))

    def post_squares(self, stage: StageKey, squares: jax.Array) -> None:
        """Contribute the squared norm of the groups that the stage owns."""
        self._squares[stage] = squares

    def squares(self) -> float | None:
        """The sum over all stages, or None while one is missing; waits for devices."""
        if len(self._squares) < self._num_stages:
            return None
        if self._total is None:
            parts = [self._squares[stage] for stage in sorted(self._squares)]
            self._total = float(np.sum(jax.device_get(parts), dtype=np.float64))
        return self._total
