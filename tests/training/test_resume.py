# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped, killed or moved resumes as if undisturbed."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.checkpoint.reader import steps
from hetjax.errors import BadInput
from hetjax.plans.plan_files import write_plan
from hetjax.training.session import run
from hetjax.training.settings.config import CheckpointConfig
from hetjax.training.settings.presets import Preset
from tests.training.small import (
    MODEL,
    ONE_REPLICA,
    but,
    lines,
    losses,
    small_preset,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    """An uninterrupted run of ten steps."""
    preset = small_preset(tmp_path_factory.mktemp("reference"))
    assert run(preset.config, preset, MODEL) == 0
    return preset


@pytest.fixture(scope="module")
def stopped(reference: Preset, tmp_path_factory: pytest.TempPathFactory) -> Preset:
    """The same run, stopped after five steps."""
    preset = in_folder(reference, tmp_path_factory.mktemp("stopped"))
    stopping = but(preset, stop_after=5)
    assert run(stopping.config, stopping, MODEL) == 4
    return preset


def in_folder(reference: Preset, folder: Path) -> Preset:
    """Return the settings for a run in `folder`, with the reference's prepared text."""
    preset = small_preset(folder)
    data = replace(preset.config.data, cache_dir=reference.config.data.cache_dir)
    return but(preset, data=data)


def copied(stopped: Preset, folder: Path) -> Preset:
    """Return a copy of the stopped run, to resume."""
    preset = in_folder(stopped, folder)
    shutil.copytree(stopped.config.run_dir, preset.config.run_dir)
    return preset


@pytest.mark.nightly
def test_a_run_whose_hours_are_over_is_saved_and_goes_on(
    reference: Preset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    preset = in_folder(reference, tmp_path)
    short = but(preset, max_hours=1e-4)  # over before the first step
    assert run(short.config, preset, MODEL) == 4
    assert "--max-hours 0.0001: saving after this step" in capfd.readouterr().err
    assert losses(preset.config.run_dir) == {}
    enough = but(preset, max_hours=1.0)
    assert run(enough.config, preset, MODEL) == 0
    told = capfd.readouterr()
    assert "resumed at step 0" in told.out and "max_hours" not in told.out
    assert losses(preset.config.run_dir) == losses(reference.config.run_dir)


def test_five_steps_a_stop_and_five_more_are_ten_steps_bit_for_bit(
    reference: Preset,
    stopped: Preset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    preset = copied(stopped, tmp_path)
    metrics = preset.config.run_dir / "metrics.jsonl"
    with metrics.open("a") as file:  # as after a crash in step 7
        file.write('{"step": 6, "loss": 99.0, "grad_norm": 1.0}\n{"step": 7, "lo')
    assert run(preset.config, preset, MODEL) == 0
    assert "resumed at step 5 from" in capsys.readouterr().out
    expected = losses(reference.config.run_dir)
    assert list(expected) == list(range(1, 11))
    assert losses(preset.config.run_dir) == expected
    evaluations = [
        [(line["step"], line["val_loss"]) for line in lines(path) if "val_loss" in line]
        for path in (reference.config.run_dir / "metrics.jsonl", metrics)
    ]
    assert evaluations[0] == evaluations[1]
    assert [step for step, _ in evaluations[0]] == [0, 5, 10]
    events = [line["event"] for line in lines(preset.config.run_dir / "events.jsonl")]
    before = ["started", "compared", "saved", "best", "goodput", "preempted"]
    after = ["restored", "compared", "saved", "best", "goodput", "finished"]
    assert events == [*before, *after]


def test_a_run_goes_on_under_another_plan_with_the_same_numbers(
    reference: Preset, stopped: Preset, tmp_path: Path
):
    other = tmp_path / "other.json"
    write_plan(other, ONE_REPLICA)
    moved = but(copied(stopped, tmp_path), plan=other)
    assert run(moved.config, moved, MODEL) == 0
    expected = losses(reference.config.run_dir)
    for step, found in losses(moved.config.run_dir).items():
        assert found == pytest.approx(expected[step], rel=1e-5 * max(1, step - 5))
    events = lines(moved.config.run_dir / "events.jsonl")
    replanned = next(line for line in events if line["event"] == "replanned")
    assert replanned["step"] == 5 and "other.json" in replanned["plan"]


def test_a_flipped_bit_in_the_newest_step_costs_the_steps_since_the_one_before(
    reference: Preset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    preset = in_folder(reference, tmp_path)
    run_dir = preset.config.run_dir
    stopping = but(preset, checkpoint=CheckpointConfig(every=3), stop_after=5)
    assert run(stopping.config, stopping, MODEL) == 4
    assert steps(run_dir / "checkpoints") == [3, 5]
    damaged = [*(run_dir / "checkpoints" / "step_00000005").rglob("c.0.0")][-1]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    going_on = but(preset, checkpoint=CheckpointConfig(every=0))
    assert run(going_on.config, going_on, MODEL) == 0
    told = capsys.readouterr().out
    assert "warning: some saved state here cannot be used: checkpoint" in told
    assert "resumed at step 3 from" in told
    assert losses(run_dir) == losses(reference.config.run_dir)
    events = lines(run_dir / "events.jsonl")
    (restored,) = [line for line in events if line["event"] == "restored"]
    assert (restored["step"], restored["passed_over"]) == (3, [5])
    assert "step_00000003" in restored["checkpoint"]


def test_a_run_without_its_checkpoints_does_not_begin_again(
    stopped: Preset, tmp_path: Path
):
    resumed = copied(stopped, tmp_path)
    run_dir = resumed.config.run_dir
    before = (run_dir / "metrics.jsonl").read_bytes()
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(BadInput, match=r"(?s)has saved step 5.*is its disk mounted"):
        run(resumed.config, resumed, MODEL)
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_is_left_alone(
    reference: Preset, capsys: pytest.CaptureFixture[str]
):
    before = (reference.config.run_dir / "metrics.jsonl").read_bytes()
    assert run(reference.config, reference, MODEL) == 0
    assert "has done all of its 10 steps" in capsys.readouterr().out
    assert (reference.config.run_dir / "metrics.jsonl").read_bytes() == before


def test_steps_may_be_raised_which_is_said_and_recorded(
    stopped: Preset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    longer = but(copied(stopped, tmp_path), steps=20, stop_after=1)
    assert run(longer.config, longer, MODEL) == 4
    out = capsys.readouterr().out
    assert "steps is 20 from here on (was 10)" in out
    assert "step 6 of 20" in out and "same command resumes" in out
    events = lines(longer.config.run_dir / "events.jsonl")
    (changed,) = [line for line in events if line["event"] == "reconfigured"]
    assert {"setting": "steps", "was": 10, "now": 20}.items() <= changed.items()


def test_a_deterministic_start_goes_on_with_the_losses_of_cpus(
    reference: Preset,
    stopped: Preset,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    preset = but(copied(stopped, tmp_path), deterministic=True)
    assert run(preset.config, preset, MODEL) == 0
    assert losses(preset.config.run_dir) == losses(reference.config.run_dir)
    assert "deterministic is True from here on (was False)" in capfd.readouterr().out


def test_sigterm_finishes_the_step_saves_and_gives_exit_code_4(
    reference: Preset, tmp_path: Path
):
    preset = in_folder(reference, tmp_path)
    metrics = preset.config.run_dir / "metrics.jsonl"

    def terminate() -> None:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    sender = threading.Thread(target=terminate)
    sender.start()
    preempted = run(preset.config, preset, MODEL)
    sender.join()
    assert signal.getsignal(signal.SIGTERM) == handler
    if preempted:  # it may have arrived in the last step
        assert preempted == 4
        [saved] = steps(preset.config.run_dir / "checkpoints")
        assert max(losses(preset.config.run_dir)) == saved
        event = lines(preset.config.run_dir / "events.jsonl")[-1]
        assert (event["event"], event["reason"]) == ("preempted", "SIGTERM")
    found, expected = losses(preset.config.run_dir), losses(reference.config.run_dir)
    assert found == {step: expected[step] for step in found}


def test_a_save_cut_off_by_kill_9_is_ignored_and_its_steps_are_done_again(
    reference: Preset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # test the run's default
    killed = subprocess.run(
        [sys.executable, "-m", "tests.training.killed_run", str(tmp_path), "10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = list((tmp_path / "cache" / "compiled").glob("*-cache"))
    assert len(kept) > 5  # all that a second start would compile
    preset = in_folder(reference, tmp_path)
    run_dir = preset.config.run_dir
    before = losses(run_dir)
    assert max(before) == 10
    assert (run_dir / "checkpoints" / "step_00000010").exists()
    saved = steps(run_dir / "checkpoints")[-1]
    assert saved in (4, 8)  # 8 is left out if the save of 4 takes long
    assert run(preset.config, preset, MODEL) == 0
    assert f"resumed at step {saved} from" in capsys.readouterr().out
    expected, found = losses(reference.config.run_dir), losses(run_dir)
    for step in expected:  # the killed process had other devices
        assert found[step] == pytest.approx(expected[step], rel=1e-4)
