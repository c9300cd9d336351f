# SPDX-License-Identifier: Apache-2.0
"""Workers that keep checkpoints on their own disks, one of which is replaced."""

import json
import shutil
from pathlib import Path

import pytest

from hetjax.checkpoint.storage import LEASES
from hetjax.train import main
from tests.training.pair import NODES, training
from tests.training.small import events
from tests.training.test_workers import losses, set_environment

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run that stopped at step 3, with its disks and its store."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        assert main([*options(folder, cache), "--stop-after", "3"]) == 4
    return folder


def options(folder: Path, cache: Path, *, store: Path | None = None) -> list[str]:
    cloud = ["--checkpoint.cloud", (store or folder / "store").as_uri()]
    return [*on_disks(folder, cache), *cloud]


def on_disks(folder: Path, cache: Path) -> list[str]:
    local = ["--checkpoint.local", f"{folder}/disks/{{worker}}"]
    return training(folder / "run", cache, *local)


def copied(stopped: Path, folder: Path) -> Path:
    shutil.copytree(stopped, folder, dirs_exist_ok=True)
    return folder


def wipe(folder: Path) -> int:
    """Remove a disk that holds checkpoints; return the bytes of its newest step."""
    disks = [disk for disk in (folder / "disks").iterdir() if [*disk.glob("step_*")]]
    step = max(disks[0].glob("step_*"))
    num_bytes = sum(f.stat().st_size for f in step.glob("*/state*/*/c*"))
    shutil.rmtree(disks[0])
    return num_bytes


def test_without_a_copy_of_a_lost_disk_the_run_does_not_begin_anew(
    stopped: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = copied(stopped, tmp_path)
    wipe(folder)
    metrics = (folder / "run/metrics.jsonl").read_bytes()
    assert main(options(folder, cache, store=tmp_path / "empty")) == 2
    assert "a run that has saved step 3" in capsys.readouterr().err
    assert (folder / "run/metrics.jsonl").read_bytes() == metrics


@pytest.mark.nightly
def test_a_run_outlives_a_full_disk_a_lost_one_and_with_two_copies_another(
    stopped: Path,
    cache: Path,
    whole: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    folder = copied(stopped, tmp_path)
    obstacles = [folder / f"disks/left/step_0000000{step}" for step in (4, 5, 6)]
    for path in obstacles:
        path.write_text("no folder can be made here")
    every = ["--checkpoint.every", "1", "--checkpoint.keep", "1"]
    assert main([*options(folder, cache), *every]) == 1
    told = capsys.readouterr()
    assert "checkpoint of step 6 was not saved" in told.out
    assert "no complete checkpoint of step 6" in told.err
    for path in obstacles:
        path.unlink()
    lost_bytes = wipe(folder)
    mirrored = [*options(folder, cache), "--checkpoint.copies", "2"]
    assert main([*mirrored, "--stop-after", "1"]) == 4
    assert "resumed at step 3 (" in capsys.readouterr().out
    wipe(folder)
    assert main(mirrored) == 0
    assert losses(folder / "run") == whole
    _, from_store, from_disk = events(folder / "run", "restored")
    # each replica needs the lost leaves; the remaining disk has all others
    found = from_store["bytes"]
    assert found["cloud"] >= lost_bytes > 0 < found["disk"]
    assert (from_disk["step"], from_disk["bytes"].keys()) == (4, {"disk", "peer"})


def test_each_worker_reads_its_own_disk_and_others_give_the_rest_but_not_another_run(
    stopped: Path,
    cache: Path,
    whole: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    folder = copied(stopped, tmp_path)
    disks = contents(folder / "disks")
    assert not (folder / "run/checkpoints").exists()
    another = [*options(folder, cache), "--run-dir", str(folder / "another")]
    assert main([*another, "--optimizer.learning-rate", "1e-5"]) == 2
    told = capsys.readouterr().err
    assert "differs from this run: optimizer.learning_rate = 0.003 (here 1e-05)" in told
    own = json.loads((folder / "run/config.json").read_text())["run"]["id"]
    assert f"checkpoints of run {own} (step 3 in" in told and "--adopt" in told
    assert contents(folder / "disks") == disks
    assert main(another) == 0  # the settings of the saved run
    assert f"resuming run {own} (step 3 in" in capsys.readouterr().out
    assert losses(folder / "another") == whole[-4:]
    (restored,) = events(folder / "another", "restored")
    assert restored["bytes"].keys() == {"disk", "peer"}
    assert [line["step"] for line in events(folder / "another", "saved")][-1] == 6


@pytest.mark.nightly
def test_a_store_slower_than_checkpoints_come_gets_the_same_steps_of_all(
    cache: Path, tmp_path: Path
):
    store = tmp_path / "store"
    slow = training(tmp_path / "run", cache, "--steps", "8")
    slow += ["--checkpoint.every", "1", "--checkpoint.keep", "50"]
    slow += ["--checkpoint.cloud", store.as_uri()]
    slow += ["--checkpoint.upload-mbit-per-s", "100"]
    assert main(slow) == 0
    there = sorted(store.glob("step_*"))
    assert all({path.name for path in step.iterdir()} > {*NODES} for step in there)
    assert all((step / "COMMIT").exists() for step in there)
    assert there[-1].name == "step_00000008"
    assert 2 <= len(there) < 8  # all workers left out some steps, the same ones


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the content of all files but the leases."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {p: p.read_bytes() for p in files if LEASES not in p.parts}
