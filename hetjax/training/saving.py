# SPDX-License-Identifier: Apache-2.0
"""Starts, checks and records the checkpoints of a run, and makes the last one.

Owns that only a sound state is saved, and that a run ends with its state saved. Does
not own writing (`hetjax/checkpoint/`) nor when a checkpoint is due (`loop.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetjax.errors import RunFailed
from hetjax.runtime.execution.checking.checks import Disagreement
from hetjax.training.directory.best import BestCheckpoint
from hetjax.training.recorder import Recorder
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.rollback import NotFinite, disagreed

_NUM_LAST_SAVES = 3  # one may lose a worker, and another meet a full disk


@dataclass(kw_only=True, slots=True)
class Saving:
    """Saves the driver's state.

    `restore_files` writes the run's files again if they were removed, and returns
    whether it had to.
    """

    driver: Driver
    recorder: Recorder
    best: BestCheckpoint
    restore_files: Callable[[], bool] = lambda: False
    _recorded: int | None = None
    _recorded_best: int | None = None

    def begin(self) -> None:
        """Take the checkpoint that the driver resumes from as recorded already."""
        self._recorded, self._recorded_best = self.driver.saved, self.best.step

    def save(self, step: int) -> None:
        """Start a checkpoint, unless the previous one is still being written."""
        self.restore_files()
        self.check_state(step, *self.driver.check())
        self._check_saved_is_finite(step)
        started = self.driver.save(step, self._best_saved)
        self.record()
        self._check_saved_is_finite(step)
        if not started:
            self.recorder.note(
                f"checkpoint of step {step} skipped: the previous one is still being "
                "written (a larger --checkpoint.every avoids this)"
            )

    def save_last(self, step: int) -> None:
        """Save until a checkpoint of this step is complete; else raise RunFailed."""
        for number in range(_NUM_LAST_SAVES + 1):
            self.driver.wait_saved()
            self.record()
            self._check_saved_is_finite(step)
            is_saved = self.driver.saved == step and self.driver.is_kept
            if is_saved and not self.restore_files():
                return
            if number < _NUM_LAST_SAVES:
                self.save(step)
        raise RunFailed(
            got=f"no complete checkpoint of step {step}",
            allowed="a run ends with its state saved",
            fix="make room on the disk and run the same command again",
        )

    def newest(self) -> int | None:
        """Wait for all writes to end; return the newest complete checkpoint."""
        self.driver.wait_saved()
        return self.driver.saved

    def check_state(
        self, step: int, is_finite: bool, found: Sequence[Disagreement]
    ) -> None:
        """Raise RollbackNeeded unless the weights after this step are sound."""
        if found:
            raise disagreed(step, found, self.driver.plan)
        if not is_finite:
            raise NotFinite(step, f"weights that are not finite after step {step}")

    def record(self) -> None:
        """Record a checkpoint that was completed since the last call."""
        if self.driver.saved not in (None, self._recorded):
            self._recorded = self.driver.saved
            self.recorder.saved(self._recorded)
            self.best.on_saved(self._recorded)
            self.record_best()

    def record_best(self) -> None:
        """Record the best checkpoint, if it has changed."""
        step, loss = self.best.step, self.best.loss
        if step is not None and loss is not None and step != self._recorded_best:
            self.recorder.best(step, loss)
        self._recorded_best = step

    def _best_saved(self) -> int | None:
        self.record()
        return self.best.step

    def _check_saved_is_finite(self, step: int) -> None:
        if self.driver.is_not_finite:
            got = f"weights that are not finite, in a checkpoint up to step {step}"
            raise NotFinite(step, got)
