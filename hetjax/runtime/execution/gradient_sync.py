# SPDX-License-Identifier: Apache-2.0
"""What REDUCE and NORM mean: the meeting points of one step.

Owns what an executor asks of them, and the meeting in one process. A stage posts and
goes on; results are there once every holder has posted. Does not own the arithmetic of
a group's sum (`hetjax/comm/reduction.py`) nor meetings of processes (`peer_sync.py`).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np

from hetjax.comm.reduction import Rows, exchange
from hetjax.comm.tally import Tally
from hetjax.comm.wire import SUMS
from hetjax.runtime.execution.outcome import StepCommit
from hetjax.schedule.programs.action import Group, StageKey


class GradientSync(Protocol):
    """Meeting points of one training step; all calls return at once but `commit`,
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

    @property
    def commit(self) -> StepCommit | None:
        """What the step has come to, or None while a stage of the plan is missing."""
        ...

    def attend(self) -> None:
        """Take part with no stage at all."""
        ...

    def settle(self, commit: StepCommit) -> None:
        """Take what the step has come to from who knows it."""
        ...


class LocalSync:
    """Meeting points of one training step in one process; a new one for each step.

    `losses` gives those of the last stages, read at NORM: they are ready then. `sent`
    counts what devices send each other, by (from stage, to stage).
    """

    def __init__(
        self,
        holders: Mapping[Group, tuple[StageKey, ...]],
        num_stages: int,
        num_tokens: int,
        losses: Callable[[], Mapping[StageKey, jax.Array]],
    ) -> None:
        self._holders, self._num_stages = holders, num_stages
        self._num_tokens, self._losses = num_tokens, losses
        self._posted: dict[Group, dict[StageKey, Rows]] = {}
        self._sums: dict[tuple[Group, StageKey], Rows] = {}
        self._squares: dict[StageKey, jax.Array] = {}
        self._commit: StepCommit | None = None
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

    @property
    def commit(self) -> StepCommit | None:
        """Waits for the devices once all stages have posted."""
        if self._commit is None and len(self._squares) == self._num_stages:
            found = {stage: self._squares[stage] for stage in sorted(self._squares)}
            squares, losses = jax.device_get(([*found.values()], self._losses()))
            self._commit = StepCommit(
                squares=float(np.sum(squares, dtype=np.float64)),
                losses=tuple((stage, float(losses[stage])) for stage in sorted(losses)),
                num_tokens=self._num_tokens,
            )
        return self._commit

    def attend(self) -> None:
        """Nobody is waited for."""

    def settle(self, commit: StepCommit) -> None:
        self._commit = commit
