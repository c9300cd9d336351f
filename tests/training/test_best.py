# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of the lowest validation loss is kept beside the newest one.

The oracle for its contents is a run that was stopped at that step. Validation losses
are made up where a test needs an early best.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.api.run_checkpoints import AskedStep, open_checkpoint
from hetjax.checkpoint.reader import steps
from hetjax.errors import BadInput
from hetjax.export import main as export
from hetjax.train import main
from hetjax.training.directory.best import BestCheckpoint
from hetjax.training.recovery.driver import Driver
from hetjax.training.session import run
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset
from tests.training.pair import kill, training
from tests.training.small import MODEL, ONE_STAGE, but, events, small_preset

pytestmark = pytest.mark.usefixtures("quickly")

ROOT = Path(__file__).parents[2]
LOSSES = {0: 1.0, 2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 6.0}  # by step


def made_up(patched: pytest.MonkeyPatch, losses: Mapping[int, float]) -> None:
    def validate(driver: Driver, number: int) -> float:
        driver.wait_saved()  # no checkpoint is left out
        return losses[driver.at]

    patched.setattr(Driver, "validate", validate)


def saving(preset: Preset, **changes: Any) -> Preset:
    """Return the preset with a save every two steps and one kept checkpoint."""
    config = preset.config
    checkpoint = replace(config.checkpoint, every=2, keep=1, **changes)
    evaluation = replace(config.evaluation, every=2, sample_tokens=0)
    return but(preset, checkpoint=checkpoint, evaluation=evaluation)


def trained(preset: Preset, **changes: Any) -> int:
    changed = but(preset, **changes)
    return run(changed.config, changed, MODEL)


def kept(run_dir: Path) -> list[int]:
    return steps(run_dir / "checkpoints")


def told(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["val_loss"]) for line in events(run_dir, "best")]


def weights(config: RunConfig, step: AskedStep = None) -> dict[str, np.ndarray]:
    with open_checkpoint(config, step) as found:
        return {name: found.read(entry) for name, entry in found.entries.items()}


def assert_same(found: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]):
    assert found.keys() == other.keys() and found
    for name, value in found.items():
        np.testing.assert_array_equal(value, other[name])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared text for all tests."""
    return tmp_path_factory.mktemp("text") / "cache"


@pytest.fixture
def preset(tmp_path: Path, text: Path) -> Preset:
    return in_folder(tmp_path, text)


@pytest.fixture(scope="module")
def at_four(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Preset:
    """A run that ended at step 4."""
    stopped = in_folder(tmp_path_factory.mktemp("four"), text)
    assert trained(stopped, stop_after=4) == 4
    return stopped


def in_folder(folder: Path, text: Path) -> Preset:
    found = small_preset(folder, ONE_STAGE)
    data = replace(found.config.data, cache_dir=text)
    return saving(but(found, data=data))


def test_the_best_stays_and_is_what_the_run_was_at_that_step(
    preset: Preset, at_four: Preset, monkeypatch: pytest.MonkeyPatch
):
    made_up(monkeypatch, LOSSES)
    config = preset.config
    assert trained(preset) == 0
    assert kept(config.run_dir) == [4, 8, 10]  # 8 was the fallback
    assert told(config.run_dir) == [(2, 5.0), (4, 3.0)]
    assert_same(weights(config, "best"), weights(at_four.config))
    newest = weights(config)
    assert any((newest[n] != v).any() for n, v in weights(config, "best").items())


def test_it_stays_when_the_run_is_stopped_and_goes_on(
    preset: Preset, at_four: Preset, monkeypatch: pytest.MonkeyPatch
):
    made_up(monkeypatch, LOSSES)
    assert trained(preset, stop_after=7) == 4
    assert kept(preset.config.run_dir) == [4, 6, 7]  # 6 was the newest that all had
    assert trained(preset) == 0
    assert kept(preset.config.run_dir) == [4, 8, 10]  # 8 was the fallback
    assert told(preset.config.run_dir) == [(2, 5.0), (4, 3.0)]
    assert_same(weights(preset.config, "best"), weights(at_four.config))


@pytest.mark.nightly
def test_it_stays_when_the_run_is_killed(
    preset: Preset, monkeypatch: pytest.MonkeyPatch
):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    folder = preset.config.run_dir.parent
    killed = subprocess.run(
        [sys.executable, "-m", "tests.training.test_best", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert 4 in kept(preset.config.run_dir)
    was = weights(preset.config, 4)
    made_up(monkeypatch, LOSSES)
    assert trained(preset) == 0
    assert kept(preset.config.run_dir)[0] == 4
    assert_same(weights(preset.config, "best"), was)


def test_what_a_run_has_gone_back_on_is_the_best_no_more(
    preset: Preset, at_four: Preset, monkeypatch: pytest.MonkeyPatch
):
    run_dir = preset.config.run_dir
    made_up(monkeypatch, {**LOSSES, 6: 2.0})
    checkpoint = replace(preset.config.checkpoint, keep=3)
    assert trained(preset, stop_after=6, checkpoint=checkpoint) == 4
    assert trained(preset, stop_after=1, checkpoint=checkpoint) == 4
    assert told(run_dir)[-1] == (6, 2.0)
    for step in (6, 7):
        shutil.rmtree(run_dir / f"checkpoints/step_0000000{step}")
    made_up(monkeypatch, LOSSES)
    assert trained(preset) == 0
    restored = [line["step"] for line in events(run_dir, "restored")]
    assert restored == [6, 4]
    assert kept(run_dir) == [4, 8, 10]  # 8 was the fallback
    assert_same(weights(preset.config, "best"), weights(at_four.config))


def test_the_store_keeps_it_too(
    preset: Preset, at_four: Preset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    made_up(monkeypatch, LOSSES)
    storing = saving(preset, cloud=(tmp_path / "store").as_uri())
    assert trained(storing, stop_after=4) == 4  # the run ends after the upload
    assert trained(storing) == 0
    found = {step.name for step in (tmp_path / "store").glob("step_*")}
    best_and_last = {"step_00000004", "step_00000010"}
    assert found >= best_and_last
    # As on disks, the store keeps the newest before the last, to fall back to if the
    # last one is bad.
    assert len(found - best_and_last) <= 1
    assert found - best_and_last <= {"step_00000006", "step_00000008"}
    shutil.rmtree(storing.config.run_dir / "checkpoints")
    for asked in ("best", 4):
        assert_same(weights(storing.config, asked), weights(at_four.config))
    with pytest.raises(BadInput, match="step 5 here or in the run's store"):
        weights(storing.config, 5)
    with pytest.raises(BadInput, match="step '4'"):
        weights(storing.config, cast("int", "4"))


@pytest.mark.nightly
def test_each_worker_keeps_its_part_over_a_loss_and_it_is_exported(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: None,
    capsys: pytest.CaptureFixture[str],
):
    made_up(monkeypatch, LOSSES)
    run_dir, step = tmp_path / "run", Driver.step

    def step_and_kill(driver: Driver, number: int, *, traced: bool = False):
        if number == 4 and not events(run_dir, "recovered"):
            kill(run_dir, "right")
        return step(driver, number, traced=traced)

    monkeypatch.setattr(Driver, "step", step_and_kill)
    every = ["--checkpoint.every", "2", "--evaluation.every", "2"]
    keep = ["--checkpoint.keep", "1", "--checkpoint.local"]
    local = f"{tmp_path}/disks/{{worker}}"
    assert main(training(run_dir, cache, *every, *keep, local)) == 0
    assert events(run_dir, "recovered")
    assert told(run_dir)[-1] == (4, 3.0)
    for worker in ("left", "right"):
        disk = tmp_path / "disks" / worker
        assert [path.name[-1] for path in sorted(disk.glob("step_*"))] == ["4", "6"]
    capsys.readouterr()
    to = tmp_path / "exported"
    assert export([str(run_dir), "--to", str(to), "--step", "best"]) == 0
    assert "step 4 in float32" in capsys.readouterr().out


def test_where_nothing_was_evaluated_there_is_no_best(preset: Preset):
    assert trained(preset, stop_after=1) == 4
    with pytest.raises(BadInput, match="no checkpoint of the run in .* was evaluated"):
        weights(preset.config, "best")
    assert told(preset.config.run_dir) == []


class Disk:
    """What `retain` keeps, with all losses; the best is the lowest on disk."""

    def __init__(self, keep: int) -> None:
        self.keep, self.steps = keep, set[int]()
        self.losses, self.events = dict[int, float](), list[dict[str, Any]]()

    def save(self, step: int, best: int | None) -> None:
        newest = sorted({*self.steps, step})[-self.keep :]
        self.steps = {*newest, *({best} & self.steps)}
        self.events.append({"event": "saved", "step": step})

    def go_back(self, step: int) -> None:
        self.steps = {s for s in self.steps if s <= step}
        self.losses = {s: x for s, x in self.losses.items() if s <= step}
        self.events.append({"event": "restored", "step": step})

    @property
    def best(self) -> int | None:
        there = sorted(self.steps & self.losses.keys())
        return min(there, key=lambda step: self.losses[step], default=None)


_DOINGS = st.lists(
    st.tuples(
        st.booleans(),  # whether a save happens
        st.none() | st.integers(0, 9).map(float),  # the validation loss, if any
        st.integers(0, 9),  # a rollback if 0
    ),
    max_size=30,
)


@given(_DOINGS, st.integers(1, 3))
def test_it_is_the_lowest_of_all_that_are_there_and_stays(
    doings: list[tuple[bool, float | None, int]], keep: int
):
    disk, best, at = Disk(keep), BestCheckpoint({}, keep), 0
    for is_saved, loss, chance in doings:
        at += 1
        if is_saved:
            disk.save(at, best.step)
            best.on_saved(at)
        if loss is not None:
            disk.losses[at] = loss
            best.on_evaluated(at, loss)
        if chance == 0 and disk.steps:
            at = max(disk.steps)
            disk.go_back(at)
            best.forget_after(at)
        assert best.step == disk.best
        metrics = [{"step": s, "val_loss": x} for s, x in disk.losses.items()]
        assert BestCheckpoint.before(metrics, disk.events, keep).step in disk.steps | {
            None
        }


def _killed(folder: Path) -> None:
    """Train in `folder`, and kill the process before step 8 is saved."""
    save = Driver.save

    def save_or_die(driver: Driver, step: int, best: Any) -> bool:
        if step == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(driver, step, best)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Driver, "save", save_or_die)
        made_up(patched, LOSSES)
        trained(saving(small_preset(folder, ONE_STAGE)))


if __name__ == "__main__":
    _killed(Path(sys.argv[1]))
