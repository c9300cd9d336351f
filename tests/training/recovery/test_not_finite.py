# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite reach no checkpoint; the run rolls back or ends."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetjax.checkpoint.reader import Checkpoint, steps
from hetjax.errors import RunFailed
from hetjax.launchers.local_processes import OnThisMachine
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.train import main
from hetjax.training.recovery.driver import Driver
from hetjax.training.session import run
from hetjax.training.settings.config import CheckpointConfig
from hetjax.training.worker import TrainingWork
from tests.short_runs import draws
from tests.training import test_workers
from tests.training.pair import between_steps, training
from tests.training.poison import poison
from tests.training.small import MODEL, but, events, lines, losses, small_preset


def poisoned(patched: pytest.MonkeyPatch, step: int, times: int) -> None:
    """Let a weight turn infinite after the update of this step, `times` times."""
    train, batch = StageRuntime.step, TrainingWork.batch
    left, asked = [None] * times, list[int]()

    def noted_batch(self: TrainingWork, number: int) -> Any:
        asked.append(number)
        return batch(self, number)

    def step_and_poison(self: StageRuntime, *arguments: Any) -> Any:
        result = train(self, *arguments)
        if asked[-1] + 1 == step and left:
            left.pop()
            poison(self)
        return result

    patched.setattr(TrainingWork, "batch", noted_batch)
    patched.setattr(StageRuntime, "step", step_and_poison)


def assert_finite(directory: Path) -> None:
    """Assert that all complete checkpoints are finite."""
    found = steps(directory)
    assert found
    for step in found:
        checkpoint = Checkpoint.open(directory, step)
        for entry in checkpoint.entries.values():
            assert np.isfinite(checkpoint.read(entry)).all(), (step, entry.name)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    preset = small_preset(tmp_path_factory.mktemp("unharmed"))
    assert run(preset.config, preset, MODEL) == 0
    return losses(preset.config.run_dir)


@pytest.mark.parametrize("step", draws([7, 10, 6], short=2))
def test_one_bad_weight_costs_the_steps_since_the_last_checkpoint(
    step: int,
    tmp_path: Path,
    unharmed: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """Steps: just before a save; between saves, where the next NORM tells; the last."""
    poisoned(monkeypatch, step, times=1)
    preset = but(small_preset(tmp_path), checkpoint=CheckpointConfig(every=2))
    run_dir = preset.config.run_dir
    assert run(preset.config, preset, MODEL) == 0
    assert losses(run_dir) == unharmed
    assert_finite(run_dir / "checkpoints")
    (back,) = events(run_dir, "recovered")
    assert back["step"] < step and back["step"] % 2 == 0
    assert "back to step" in back["reason"]


@pytest.mark.parametrize("every", [1, 2])
def test_what_comes_again_after_going_back_ends_the_run_with_advice(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    poisoned(monkeypatch, 4, times=100)
    preset = but(small_preset(tmp_path), checkpoint=CheckpointConfig(every=every))
    run_dir = preset.config.run_dir
    with pytest.raises(RunFailed) as error:
        run(preset.config, preset, MODEL)
    assert "again after rolling back" in str(error.value)
    assert "lower --optimizer.learning-rate" in str(error.value)
    assert_finite(run_dir / "checkpoints")
    assert max(steps(run_dir / "checkpoints")) < 4
    assert 1 <= len(events(run_dir, "recovered")) <= 2


def test_a_validation_loss_that_is_no_number_ends_the_run_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Driver, "validate", lambda self, number: math.nan)
    preset = small_preset(tmp_path)
    with pytest.raises(
        RunFailed, match="got: validation loss nan after step 0\nallowed"
    ):
        run(preset.config, preset, MODEL)


@pytest.mark.nightly
@pytest.mark.usefixtures("environment")
def test_workers_go_back_together_from_one_bad_weight(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir, once = tmp_path / "run", tmp_path / "once"
    monkeypatch.setenv("HETJAX_TEST_POISON", str(once))
    defaults = OnThisMachine.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "module", "tests.training.poison")
    between_steps(monkeypatch, once.touch)
    save = Driver.save

    def save_whole(driver: Driver, step: int, *best: Any) -> bool:
        begun = save(driver, step, *best)
        if step < 4:  # so that no save is left out before the weights turn bad
            driver.wait_saved()
        return begun

    monkeypatch.setattr(Driver, "save", save_whole)
    assert main(training(run_dir, cache, "--checkpoint.every", "1")) == 0
    assert test_workers.losses(run_dir) == whole
    (back,) = events(run_dir, "recovered")
    # 4 if the other worker has saved the leaves that both hold
    assert back["step"] in (3, 4) and back["bytes"].keys() == {"disk"}
    assert_finite(run_dir / "checkpoints")
    assert [m["step"] for m in lines(run_dir / "metrics.jsonl") if "loss" in m] == [
        *range(1, 7)
    ]
