# SPDX-License-Identifier: Apache-2.0
"""Workers that keep checkpoints on disks of their own, of which one is replaced."""

import shutil
from pathlib import Path

import pytest

from hetjax.train import main
from tests.training.small import events
from tests.training.test_workers import (
    command,
    environment,
    losses,
    set_environment,
)

__all__ = ["environment"]

SIX_STEPS = ["--launcher", "processes", "--steps", "6"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped at step 3, its disks and its store; and one that did not."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        assert main(command(folder / "whole", folder / "cache", *SIX_STEPS)) == 0
        assert main([*options(folder), "--stop-after", "3"]) == 4
    return folder


def options(folder: Path, *, store: Path | None = None) -> list[str]:
    found = command(folder / "run", folder / "cache", *SIX_STEPS)
    found += ["--checkpoint.local", f"{folder}/disks/{{worker}}"]
    return [*found, "--checkpoint.cloud", (store or folder / "store").as_uri()]


def copied(stopped: Path, folder: Path) -> Path:
    shutil.copytree(stopped, folder, dirs_exist_ok=True)
    return folder


def wipe(folder: Path) -> int:
    """Take a disk away that holds something; the bytes of its newest step."""
    disks = [disk for disk in (folder / "disks").iterdir() if [*disk.glob("step_*")]]
    step = max(disks[0].glob("step_*"))
    num_bytes = sum(f.stat().st_size for f in step.glob("*/state*/*/c*"))
    shutil.rmtree(disks[0])
    return num_bytes


@pytest.mark.usefixtures("environment")
def test_each_worker_reads_its_own_disk_and_others_give_the_rest(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = copied(stopped, tmp_path)
    assert not (folder / "run/checkpoints").exists()
    assert main(options(folder)) == 0
    assert losses(folder / "run") == losses(folder / "whole")
    (restored,) = events(folder / "run", "restored")
    assert restored["bytes"].keys() == {"disk", "peer"}
    assert "resumed at step 3 (" in capsys.readouterr().out
    assert [line["step"] for line in events(folder / "run", "saved")][-1] == 6


@pytest.mark.usefixtures("environment")
def test_the_cloud_is_read_only_for_what_no_disk_holds(stopped: Path, tmp_path: Path):
    folder = copied(stopped, tmp_path)
    lost_bytes = wipe(folder)
    assert main(options(folder)) == 0
    assert losses(folder / "run") == losses(folder / "whole")
    (restored,) = events(folder / "run", "restored")
    assert restored["bytes"]["cloud"] >= lost_bytes > 0  # replicas need it each
    assert restored["bytes"]["disk"] > 0


@pytest.mark.usefixtures("environment")
def test_with_two_copies_any_one_disk_may_be_lost(tmp_path: Path):
    whole = command(tmp_path / "whole", tmp_path / "cache", *SIX_STEPS)
    mirrored = command(tmp_path / "run", tmp_path / "cache", *SIX_STEPS)
    mirrored += ["--checkpoint.local", f"{tmp_path}/disks/{{worker}}"]
    mirrored += ["--checkpoint.copies", "2"]
    assert main(whole) == 0
    assert main([*mirrored, "--stop-after", "3"]) == 4
    wipe(tmp_path)
    assert main(mirrored) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    (restored,) = events(tmp_path / "run", "restored")
    assert restored["bytes"].keys() == {"disk", "peer"}


@pytest.mark.usefixtures("environment")
def test_without_a_copy_of_a_lost_disk_the_run_does_not_begin_anew(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = copied(stopped, tmp_path)
    for _ in range(2):
        wipe(folder)
    metrics = (folder / "run/metrics.jsonl").read_bytes()
    assert main(options(folder, store=tmp_path / "empty")) == 2
    assert "a run that has saved step 3" in capsys.readouterr().err
    assert (folder / "run/metrics.jsonl").read_bytes() == metrics


@pytest.mark.usefixtures("environment")
def test_what_all_have_stays_while_one_disk_takes_nothing(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = copied(stopped, tmp_path)
    broken = folder / "disks/a100-0"
    obstacles = [broken / f"step_0000000{step}" for step in (4, 5, 6)]
    for path in obstacles:
        path.write_text("no folder can be made here")
    every = ["--checkpoint.every", "1", "--checkpoint.keep", "1"]
    assert main([*options(folder), *every]) == 1
    told = capsys.readouterr()
    assert "checkpoint of step 6 was not saved" in told.out
    assert "no complete checkpoint of step 6" in told.err
    for path in obstacles:
        path.unlink()
    assert main(options(folder)) == 0
    assert "resumed at step 3 (" in capsys.readouterr().out
    assert losses(folder / "run") == losses(folder / "whole")


@pytest.mark.usefixtures("environment")
def test_disks_of_another_run_are_refused_and_stay_as_they_are(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = copied(stopped, tmp_path)
    disks = contents(folder / "disks")
    another = [*options(folder), "--run-dir", str(folder / "another")]
    assert main([*another, "--seed", "7"]) == 2
    assert "is of another run: seed = 0 (here 7)" in capsys.readouterr().err
    assert contents(folder / "disks") == disks
    assert main(another) == 0  # with the settings that it was saved with
    assert losses(folder / "another") == losses(folder / "whole")[-4:]


@pytest.mark.usefixtures("environment")
def test_a_store_slower_than_checkpoints_come_gets_the_same_steps_of_all(
    tmp_path: Path,
):
    store = tmp_path / "store"
    slow = command(tmp_path / "run", tmp_path / "cache", "--launcher", "processes")
    slow += ["--steps", "24", "--checkpoint.every", "1", "--checkpoint.keep", "50"]
    slow += ["--checkpoint.cloud", store.as_uri()]
    slow += ["--checkpoint.upload-mbit-per-s", "100"]
    assert main(slow) == 0
    there = sorted(store.glob("step_*"))
    assert all((step / "COMMIT").exists() for step in there)
    assert there[-1].name == "step_00000024"
    assert 2 <= len(there) < 24  # some were left out, by all of them


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
