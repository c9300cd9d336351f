# SPDX-License-Identifier: Apache-2.0
"""A run ends with its last step saved; it waits for each save, despite failures."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetjax.errors import RunFailed
from hetjax.optimizers.learning_rate import LearningRates
from hetjax.training.directory.best import BestCheckpoint
from hetjax.training.loop import Loop
from hetjax.training.observers.goodput import Spent
from hetjax.training.recovery.notices import StopRequest
from hetjax.training.saving import Saving
from hetjax.training.settings.config import (
    CheckpointConfig,
    EvaluationConfig,
    RunConfig,
)


@dataclass
class _Driver:
    """The driver after the last step; its first `num_failing` saves fail."""

    num_failing: int
    saved: int | None = None
    is_kept: bool = True
    is_not_finite: bool = False
    num_begun: int = 0
    is_writing: bool = False
    begun: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self) -> tuple[bool, tuple[()]]:
        return True, ()

    def save(self, step: int, best: object) -> bool:
        if self.is_writing:
            return False
        self.num_begun += 1
        self.begun.append(step)
        self.is_writing = True
        return True

    def wait_saved(self) -> None:
        if self.is_writing and self.num_begun > self.num_failing:
            self.saved, self.is_kept = self.begun[-1], True
        self.is_writing = False


def ended(driver: _Driver, first: int = 4, **changes: int) -> int:
    """Run the loop from step `first` to step 4; checkpoints are due every 2 steps."""
    config = RunConfig(model="tiny", run_dir=Path(), steps=4, seq_len=8, global_batch=1)
    config = replace(config, checkpoint=CheckpointConfig(every=2), **changes)
    recorder: Any = SimpleNamespace(saved=lambda step: None, note=driver.notes.append)
    loop = Loop(
        config=replace(config, evaluation=EvaluationConfig(every=0, sample_tokens=0)),
        driver=cast(Any, driver),
        dataset=cast(Any, SimpleNamespace()),
        learning_rates=LearningRates(config.optimizer, config.steps, 0),
        recorder=recorder,
        saving=Saving(
            driver=cast(Any, driver),
            recorder=recorder,
            best=BestCheckpoint({}, keep=2),
        ),
        stop=StopRequest(),
        spent=Spent(after=0),
        evaluated={4},
    )
    return loop.run(first)


@pytest.mark.parametrize("num_failing", [0, 1, 2])
def test_a_run_ends_well_with_the_first_of_its_last_saves_that_does_not_fail(
    num_failing: int,
):
    driver = _Driver(num_failing)
    assert ended(driver) == 4
    assert driver.num_begun == num_failing + 1


def test_no_save_is_begun_that_is_not_waited_for():
    driver = _Driver(num_failing=3)
    with pytest.raises(RunFailed, match="no complete checkpoint of step 4"):
        ended(driver)
    assert driver.num_begun == 3 and not driver.is_writing


def test_a_last_checkpoint_that_disks_have_lost_is_saved_again_with_a_store_too():
    driver = _Driver(num_failing=0, saved=4, is_kept=False)
    assert ended(driver) == 4
    assert driver.num_begun == 1 and driver.is_kept


@pytest.mark.parametrize(
    ("changes", "stops"),
    [({}, False), ({"steps": 9, "stop_after": 3}, False), ({"steps": 9}, True)],
    ids=["complete", "--stop-after", "a notice"],
)
def test_the_last_checkpoint_is_not_skipped_because_the_one_before_is_being_written(
    changes: dict[str, int], stops: bool, monkeypatch: pytest.MonkeyPatch
):
    def train(loop: Loop, step: int, is_traced: bool) -> None:
        if stops and step == 3:
            loop.stop.reason = "SIGTERM"

    monkeypatch.setattr(Loop, "_train", train)
    driver = _Driver(num_failing=0)
    assert ended(driver, first=1, **changes) == 4
    assert driver.begun == [2, 4] and driver.saved == 4
    assert driver.notes == []
