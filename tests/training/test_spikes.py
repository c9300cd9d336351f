# SPDX-License-Identifier: Apache-2.0
"""Steps that are skipped in float32, and losses that spike."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetjax.errors import RunFailed
from hetjax.runtime.execution.gradient_sync import GradientSync
from hetjax.runtime.execution.shares import StageShare
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.training.recovery.not_finite import MOST_SKIPPED
from hetjax.training.session import run
from hetjax.training.settings.config import CheckpointConfig
from hetjax.training.settings.presets import Preset
from hetjax.training.worker import TrainingWork
from tests.training.small import (
    MODEL,
    ONE_STAGE,
    but,
    events,
    lines,
    losses,
    small_preset,
)

pytestmark = pytest.mark.usefixtures("quick_compiling")

SPIKE, FACTOR = 7, 2.0  # SPIKE is a step


def preset_of(folder: Path, **changes: Any) -> Preset:
    folder.mkdir(exist_ok=True)
    checked = {"spike_factor": FACTOR, "spike_window": 4, "steps": 12}
    checked |= {"checkpoint": CheckpointConfig(every=3)}
    return but(small_preset(folder, ONE_STAGE), **checked | changes)


def skipped(run_dir: Path) -> dict[int, str]:
    """Return the reason of each skipped step, by step."""
    found = lines(run_dir / "metrics.jsonl")
    return {line["step"]: line["reason"] for line in found if "skipped" in line}


def without_norm(patched: pytest.MonkeyPatch, first: int, times: int) -> None:
    """Let the norm of `times` steps be NaN, starting with step `first`."""
    batch, post, now = TrainingWork.batch, GradientSync.post_share, [0]

    def noted_batch(work: TrainingWork, number: int) -> Any:
        now[0] = number + 1
        return batch(work, number)

    def post_nan(sync: GradientSync, stage: Any, share: StageShare) -> None:
        if first <= now[0] < first + times:
            nan = share.squares * np.float32(np.nan)
            share = StageShare(squares=nan, is_finite=share.is_finite)
        post(sync, stage, share)

    patched.setattr(TrainingWork, "batch", noted_batch)
    patched.setattr(GradientSync, "post_share", post_nan)


def spiking(patched: pytest.MonkeyPatch) -> None:
    """Triple the loss of one step, in every repetition."""
    batch, last_losses, now = TrainingWork.batch, StageRuntime._last_losses, [0]

    def noted_batch(work: TrainingWork, number: int) -> Any:
        now[0] = number + 1
        return batch(work, number)

    def larger(runtime: StageRuntime) -> Any:
        found = last_losses(runtime)
        factor = np.float32(3 if now[0] == SPIKE else 1)
        return {stage: factor * loss for stage, loss in found.items()}

    patched.setattr(TrainingWork, "batch", noted_batch)
    patched.setattr(StageRuntime, "_last_losses", larger)


def test_a_step_without_a_norm_is_skipped_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The step has no update, and its checkpoint is saved a step later."""
    without_norm(monkeypatch, first=6, times=1)
    preset = preset_of(tmp_path)
    run_dir = preset.config.run_dir
    assert run(preset.config, preset, MODEL) == 0
    assert skipped(run_dir) == {6: "gradients that are not finite"}
    assert losses(run_dir).keys() == {*range(1, 13)} - {6}
    assert not events(run_dir, "recovered")
    saved = [line["step"] for line in events(run_dir, "saved")]
    assert 6 not in saved and saved[-1] == 12


def test_so_many_steps_without_a_norm_end_the_run_with_the_checkpoint_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_norm(monkeypatch, first=5, times=100)
    preset = preset_of(tmp_path, steps=40)
    with pytest.raises(RunFailed) as error:
        run(preset.config, preset, MODEL)
    assert (
        f"{MOST_SKIPPED} skipped steps in a row, up to step {MOST_SKIPPED + 4}"
        in str(error.value)
    )
    assert "the last checkpoint is of step 3" in str(error.value)
    assert "lower --optimizer.learning-rate" in str(error.value)
    assert len(skipped(preset.config.run_dir)) == MOST_SKIPPED


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory, quickly: None) -> dict[int, Any]:
    preset = preset_of(tmp_path_factory.mktemp("unharmed"))
    assert run(preset.config, preset, MODEL) == 0
    assert not events(preset.config.run_dir, "spiked")
    return losses(preset.config.run_dir)


def test_a_spike_is_told_of_and_changes_nothing_else(
    tmp_path: Path, unharmed: dict[int, Any], monkeypatch: pytest.MonkeyPatch
):
    spiking(monkeypatch)
    found = []
    for name, factor in (("told", FACTOR), ("not told", 1e9)):
        preset = preset_of(tmp_path / name, spike_factor=factor)
        assert run(preset.config, preset, MODEL) == 0
        found.append(losses(preset.config.run_dir))
        told = events(preset.config.run_dir, "spiked")
        assert [line["step"] for line in told] == [SPIKE] * (name == "told")
    assert found[0] == found[1] != unharmed
    assert found[0][SPIKE][0] > FACTOR * np.median(
        [found[0][s][0] for s in range(3, 7)]
    )


def test_a_step_that_spikes_is_skipped_if_so_asked(
    tmp_path: Path, unharmed: dict[int, Any], monkeypatch: pytest.MonkeyPatch
):
    """A run that was stopped also skips it, as it knows the earlier losses."""
    spiking(monkeypatch)
    found = []
    for name, stops in (("whole", []), ("stopped", [5])):
        preset = preset_of(tmp_path / name, on_spike="skip")
        for stop in stops:
            stopping = but(preset, stop_after=stop)
            assert run(stopping.config, stopping, MODEL) == 4
        assert run(preset.config, preset, MODEL) == 0
        run_dir = preset.config.run_dir
        assert skipped(run_dir).keys() == {SPIKE}
        assert skipped(run_dir)[SPIKE].startswith("loss ")
        found.append(losses(run_dir))
    assert found[0] == found[1]
    assert all(found[0][step] == unharmed[step] for step in range(1, SPIKE))
    assert found[0][SPIKE + 1] != unharmed[SPIKE + 1]


def test_a_run_goes_back_from_a_spike_and_leaves_out_the_batches_since(
    tmp_path: Path, unharmed: dict[int, Any], monkeypatch: pytest.MonkeyPatch
):
    spiking(monkeypatch)
    preset = preset_of(tmp_path, on_spike="rollback")
    run_dir = preset.config.run_dir
    assert run(preset.config, preset, MODEL) == 0
    (told,) = events(run_dir, "spiked")
    (back,) = events(run_dir, "recovered")
    assert told["step"] == SPIKE and back["step"] in (3, 6)
    assert skipped(run_dir).keys() == {*range(back["step"] + 1, SPIKE + 1)}
    found = losses(run_dir)
    assert found.keys() == {*range(1, 13)} - skipped(run_dir).keys()
    assert all(found[step] == unharmed[step] for step in range(1, back["step"] + 1))
    assert all(math.isfinite(loss) for loss, _ in found.values())


def test_without_a_checkpoint_a_spike_is_only_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spiking(monkeypatch)
    preset = preset_of(
        tmp_path, on_spike="rollback", checkpoint=CheckpointConfig(every=0)
    )
    assert run(preset.config, preset, MODEL) == 0
    assert len(events(preset.config.run_dir, "spiked")) == 1
    assert not events(preset.config.run_dir, "recovered")
