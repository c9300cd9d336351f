# SPDX-License-Identifier: Apache-2.0
"""The directory of a run is removed while it trains."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from errno import EACCES, EIO, ENOTCONN, ESTALE
from pathlib import Path

import pytest

from hetjax.checkpoint.leases.lease import Lease, LeaseLost, acquire
from hetjax.checkpoint.leases.lease_holder import HeldFor
from hetjax.checkpoint.reader import steps
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import lease_folder
from hetjax.errors import RunFailed
from hetjax.training.directory.journal import Journal
from hetjax.training.directory.removed import rewriting, was_removed
from hetjax.training.directory.rundir import CONFIG, LEASE, read_identity
from hetjax.training.recovery.driver import Driver
from hetjax.training.session import run
from hetjax.training.settings.presets import Preset
from tests.training.pair import wait_until
from tests.training.small import (
    MODEL,
    ONE_STAGE,
    but,
    events,
    lines,
    losses,
    small_preset,
)

pytestmark = pytest.mark.usefixtures("quickly")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    preset = trains(tmp_path_factory.mktemp("whole"))
    assert run(preset.config, preset, MODEL) == 0
    return preset


def trains(folder: Path, every: int = 2) -> Preset:
    preset = but(small_preset(folder, ONE_STAGE), steps=5)
    return but(preset, checkpoint=replace(preset.config.checkpoint, every=every))


def remove(run_dir: Path, saved: int) -> None:
    """Remove the directory at once, while nothing is being written.

    Otherwise the pending save would fail and warn.
    """
    wait_until(lambda: max(steps(run_dir / "checkpoints"), default=0) == saved)
    gone = run_dir.rename(run_dir.with_name("gone"))
    shutil.rmtree(gone, ignore_errors=True)


def after_step(
    patched: pytest.MonkeyPatch, step: int, act: Callable[[], object]
) -> None:
    """Act once the line of this step is written."""
    append = Journal.append

    def append_and_act(journal: Journal, line: dict) -> None:
        append(journal, line)
        if line["step"] == step and "loss" in line:
            act()

    patched.setattr(Journal, "append", append_and_act)


def test_all_is_written_again_and_the_next_start_goes_on(
    whole: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    preset = trains(tmp_path)
    run_dir = preset.config.run_dir
    stopping = but(preset, stop_after=4)
    with monkeypatch.context() as patched:
        after_step(patched, 3, lambda: remove(run_dir, saved=2))
        assert run(stopping.config, stopping, MODEL) == 4
    assert [line["step"] for line in events(run_dir, "rewritten")] == [4]
    there = {path.name for path in run_dir.iterdir()}
    assert there >= {path.name for path in whole.config.run_dir.iterdir()} - {".lock"}
    assert steps(run_dir / "checkpoints") == [4]
    assert run(preset.config, preset, MODEL) == 0
    assert losses(run_dir) == losses(whole.config.run_dir)
    assert events(run_dir, "restored")[-1]["step"] == 4


def test_it_is_noticed_after_the_last_save_as_well(
    whole: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    preset = trains(tmp_path)
    run_dir, wait = preset.config.run_dir, Driver.wait_saved
    removed: list[int] = []

    def wait_and_remove(driver: Driver) -> None:
        wait(driver)
        if driver.saved == 5 and not removed:
            removed.append(driver.at)
            remove(run_dir, saved=5)

    monkeypatch.setattr(Driver, "wait_saved", wait_and_remove)
    assert run(preset.config, preset, MODEL) == 0
    assert removed == [5] and steps(run_dir / "checkpoints") == [5]
    assert losses(run_dir) == losses(whole.config.run_dir)


def test_a_run_that_finds_another_in_its_place_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    preset = trains(tmp_path)
    config = preset.config.run_dir / CONFIG

    def replaced() -> None:
        values = json.loads(config.read_text())
        values["run"]["id"] = "another"
        config.write_text(json.dumps(values))

    after_step(monkeypatch, 3, replaced)
    with pytest.raises(
        RunFailed, match="holds run another, but run .* still running"
    ) as failed:
        run(preset.config, preset, MODEL)
    assert failed.value.exit_code == 1 and "another --run-dir" in failed.value.fix
    found = read_identity(preset.config.run_dir)
    assert found is not None and found.id == "another"
    assert steps(preset.config.run_dir / "checkpoints") == [2]


def test_where_it_cannot_be_written_again_the_run_ends_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    preset = trains(tmp_path)

    def in_the_way() -> None:
        remove(preset.config.run_dir, saved=2)
        preset.config.run_dir.write_text("a file")

    after_step(monkeypatch, 3, in_the_way)
    with pytest.raises(RunFailed, match="was removed, and cannot be") as failed:
        run(preset.config, preset, MODEL)
    assert "run the same command again" in failed.value.fix


def test_of_two_first_starts_the_later_one_keeps_the_directory(tmp_path: Path):
    """The first directory was removed: both starts hold lease 1 on one of that name."""
    run_dir, first, second = tmp_path / "run", RunIdentity(id="1"), RunIdentity(id="2")
    store = lease_folder(run_dir / LEASE)
    with acquire(store, "it", held_for=HeldFor(run=first.id), renew_s=0.05) as before:
        shutil.rmtree(run_dir)
        now = acquire(store, "it", held_for=HeldFor(run=second.id), renew_s=1e6)
        assert before.number == now.number
        there = store.names("")
        with (
            pytest.raises(RunFailed, match="a run that has just started") as failed,
            rewriting(run_dir, first),
        ):
            before.assert_again()
        assert "another --run-dir" in failed.value.fix
        wait_until(lambda: is_seen_lost(before))
    before.forget()
    assert store.names("") == there  # neither released nor removed
    now.release()
    assert not is_seen_lost(now)


def is_seen_lost(lease: Lease) -> bool:
    try:
        lease.check_seen()
    except LeaseLost:
        return True
    return False


@pytest.mark.parametrize("code", [ESTALE, EIO, ENOTCONN, EACCES])
def test_a_directory_that_cannot_be_looked_at_was_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    def away(*_: object, **named: object) -> None:
        raise OSError(code, "away")

    monkeypatch.setattr(Path, "stat", away)
    assert not was_removed(tmp_path, RunIdentity(id="1"))


def test_lines_of_a_journal_outlive_its_file(tmp_path: Path):
    path = tmp_path / "folder/journal.jsonl"
    path.parent.mkdir()
    journal = Journal(path, last_step=9)
    for step in (1, 2):
        journal.append({"step": step})
    shutil.rmtree(path.parent)
    journal.append({"step": 3})
    path.parent.mkdir()
    journal.write_again()
    journal.append({"step": 4})
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    path.unlink()
    assert [line["step"] for line in journal.rewind(2)] == [3, 4]
    journal.close()
    assert [line["step"] for line in lines(path)] == [1, 2]
