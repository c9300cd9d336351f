# SPDX-License-Identifier: Apache-2.0
"""Two runs with one folder or one store, and one run in other directories.

This process plays all processes: tests put in place what other processes hold.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetjax.api.run_checkpoints import open_checkpoint, run_config
from hetjax.checkpoint.file_records import record_of_bytes
from hetjax.checkpoint.format import MANIFEST, from_text, to_text
from hetjax.checkpoint.leases.lease import LeaseHeld
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import LEASES, lease_folder, open_store
from hetjax.checkpoint.stored_steps import COMMIT, committed_run
from hetjax.errors import BadInput
from hetjax.training.directory.identity import OtherRun
from hetjax.training.directory.leases import IsCopy
from hetjax.training.directory.progress import checkpoint_storage
from hetjax.training.directory.rundir import CONFIG, JOINS, LEASE, read_identity
from hetjax.training.session import run
from hetjax.training.settings.config import JoinConfig, OptimizerConfig
from hetjax.training.settings.presets import Preset
from tests.training.small import MODEL, ONE_STAGE, but, losses, small_preset

pytestmark = pytest.mark.usefixtures("quickly")
STOPPED_AT = 3


def trains(folder: Path, name: str, *, places: tuple[str, ...], **changes: Any):
    """Return the preset of a run in `folder`/`name` that saves in these `places`."""
    preset = but(small_preset(folder, ONE_STAGE), run_dir=folder / name, steps=5)
    kept = preset.config.checkpoint
    if "local" in places:
        kept = replace(kept, local=folder / "local/{worker}")
    if "store" in places:
        kept = replace(kept, cloud=(folder / "store").as_uri())
    return but(preset, checkpoint=kept, **changes)


def begin(preset: Preset) -> int:
    return run(preset.config, preset, MODEL)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped run with a local folder and a store."""
    folder = tmp_path_factory.mktemp("stopped")
    first = trains(folder, "first", places=("local", "store"), stop_after=STOPPED_AT)
    assert begin(first) == 4
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    preset = trains(tmp_path_factory.mktemp("whole"), "run", places=())
    assert begin(preset) == 0
    return losses(preset.config.run_dir)


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    """The files of that run, with its directory moved here."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    for lease in tmp_path.rglob("holder"):  # as if the first run's process were gone
        lease.write_text(lease.read_text().replace(str(stopped), "/moved"))
    return tmp_path


def saved(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {p: p.read_bytes() for p in files if "lease" not in str(p)}


def identity(folder: Path, name: str = "first") -> str:
    found = read_identity(folder / name)
    assert found is not None
    return found.id


def places_of(folder: Path) -> list[Path]:
    return [folder / "local", folder / "store"]


def test_the_identity_is_in_all_that_a_run_writes(stopped: Path):
    own = identity(stopped)
    assert len(own) == 16
    manifests = [*stopped.rglob(f"step_*/*/{MANIFEST}")]
    commits = [*stopped.rglob(COMMIT)]
    holders = [*stopped.rglob("holder")]
    assert (len(manifests), len(commits), len(holders)) == (2, 1, 3)
    for path in (*manifests, *commits, *holders):
        assert json.loads(path.read_text())["run"] == own


@pytest.mark.parametrize("place", ["local", "store"])
def test_another_run_is_refused_and_touches_nothing(folder: Path, place: str):
    before = [saved(path) for path in places_of(folder)]
    rate = OptimizerConfig(learning_rate=1e-5, warmup_steps=2)
    second = trains(folder, "second", places=(place,), optimizer=rate)
    with pytest.raises(OtherRun) as refused:
        begin(second)
    assert refused.value.exit_code == 2
    text = str(refused.value)
    for named in (identity(folder), "second", "optimizer.learning_rate = 0.01"):
        assert named in text
    assert f"--adopt {identity(folder)}" in text
    assert f"in {folder / 'local/embedded' if place == 'local' else 'file:'}" in text
    assert not (second.config.run_dir / CONFIG).exists()
    assert [saved(path) for path in places_of(folder)] == before
    assert "remove the step_* folders of the other run there" in refused.value.fix
    for path in places_of(folder):
        for step in [*path.rglob("step_*")]:
            shutil.rmtree(step)
    assert begin(but(second, stop_after=1)) == 4
    assert identity(folder, "second") != identity(folder)


def test_the_store_of_another_run_is_refused_before_machines_are_asked_to_join(
    folder: Path,
):
    second = but(
        trains(folder, "second", places=("store",), seed=7),
        launcher="join",
        join=JoinConfig(address="127.0.0.1:0", wait_s=1.0),
    )
    with pytest.raises(OtherRun, match=f"resume run {identity(folder)}"):
        begin(second)
    assert not (second.config.run_dir / JOINS).exists()


@pytest.mark.parametrize("places", [("local",), ("store",), ("local", "store")])
def test_an_empty_directory_goes_on_with_the_one_run_and_says_so(
    folder: Path,
    places: tuple[str, ...],
    whole: dict[int, tuple[float, float]],
    capsys: pytest.CaptureFixture[str],
):
    second = trains(folder, "second", places=places)
    assert begin(second) == 0
    assert f"resuming run {identity(folder)} (step 3" in capsys.readouterr().out
    assert losses(second.config.run_dir) == {4: whole[4], 5: whole[5]}
    assert identity(folder, "second") == identity(folder)
    first = trains(folder, "first", places=places)
    with pytest.raises(OtherRun, match="a copy of the directory in which the run"):
        begin(first)


def test_one_that_is_adopted_goes_on_under_other_settings(folder: Path):
    own = identity(folder)
    rate = OptimizerConfig(learning_rate=1e-5, warmup_steps=2)
    second = trains(folder, "second", places=("local", "store"), optimizer=rate)
    adopting = but(second, adopt=own, stop_after=1)
    assert begin(adopting) == 4
    assert [*losses(second.config.run_dir)] == [4]
    assert begin(but(adopting, stop_after=None)) == 0  # the same command again
    assert identity(folder, "second") == own


def test_a_run_with_a_directory_does_not_take_the_place_of_another(folder: Path):
    other = trains(folder, "other", places=())
    assert begin(but(other, stop_after=1)) == 4
    for place in ("local", "store"):
        with pytest.raises(OtherRun, match=identity(folder, "other")):
            begin(trains(folder, "other", places=(place,)))


def test_a_moved_directory_goes_on(folder: Path, whole: dict[int, tuple[float, float]]):
    (folder / "first").rename(folder / "elsewhere")
    moved = trains(folder, "elsewhere", places=("local", "store"))
    assert begin(moved) == 0
    assert losses(moved.config.run_dir) == whole


def test_a_directory_that_was_moved_without_its_hidden_files_goes_on(tmp_path: Path):
    alone = trains(tmp_path, "alone", places=(), stop_after=1)
    assert begin(alone) == 4
    (tmp_path / "moved").mkdir()
    for path in (tmp_path / "alone").glob("[!.]*"):  # as `mv alone/* moved/` does
        path.rename(tmp_path / "moved" / path.name)
    shutil.rmtree(tmp_path / "alone")
    moved = but(alone, run_dir=tmp_path / "moved")
    for _ in range(2):
        assert begin(moved) == 4
    assert [*losses(moved.config.run_dir)] == [1, 2, 3]


def test_a_copy_of_a_directory_in_which_the_run_went_on_is_refused(folder: Path):
    """The two commands share nothing but the directory itself."""
    alone = trains(folder, "alone", places=(), stop_after=1)
    assert begin(alone) == 4
    shutil.copytree(folder / "alone", folder / "copy")
    assert begin(alone) == 4
    copy = but(alone, run_dir=folder / "copy")
    with pytest.raises(IsCopy) as refused:
        begin(copy)
    assert refused.value.exit_code == 2
    for typed in ("--run-dir", f"--adopt {identity(folder, 'alone')}"):
        assert typed in refused.value.fix
    assert begin(but(copy, adopt=identity(folder, "alone"))) == 4
    assert begin(copy) == 4
    assert [*losses(folder / "copy")] == [1, 2, 3]
    # a moved original resumes, as the copy has not changed it
    (folder / "alone").rename(folder / "there")
    assert begin(but(alone, run_dir=folder / "there")) == 4


def live(preset: Preset, home: Path) -> Callable[[], None]:
    """Hold what a run with another directory holds; return its release function."""
    from contextlib import ExitStack

    from hetjax.training.directory.leases import Leases

    stack = ExitStack()
    home.mkdir(exist_ok=True)
    (home / CONFIG).touch()
    storage = checkpoint_storage(preset.config, RunIdentity(id="another"))
    leases = Leases(home, storage, stack, lambda text: None, "another")
    held = leases.protecting(storage).hold("embedded")
    if held is not None:
        stack.callback(held.release)
    return stack.close


@pytest.mark.parametrize("place", ["local", "store"])
def test_of_two_runs_at_once_the_later_is_refused(tmp_path: Path, place: str):
    preset = trains(tmp_path, "second", places=(place,), stop_after=1)
    end = live(preset, tmp_path / "first")
    try:
        with pytest.raises(LeaseHeld, match=r"is in use by process .*\(run another\)"):
            begin(preset)
        assert not (preset.config.run_dir / CONFIG).exists()
    finally:
        end()
    assert begin(preset) == 4


def test_a_copy_of_a_directory_whose_run_is_live_is_refused(tmp_path: Path):
    preset = trains(tmp_path, "copy", places=())
    end = live(preset, tmp_path / "first")
    try:
        shutil.copytree(tmp_path / "first" / LEASE, tmp_path / "copy" / LEASE)
        with pytest.raises(LeaseHeld) as refused:
            begin(preset)
        assert "(run another)" in refused.value.got
    finally:
        end()


def without_identity(folder: Path) -> None:
    """Undo what identities changed on disk, and keep the saved settings."""
    config = folder / "first" / CONFIG
    values = json.loads(config.read_text())
    del values["run"], values["config"]["adopt"]
    config.write_text(json.dumps(values))
    for path in folder.rglob(f"step_*/*/{MANIFEST}"):
        found = from_text(path.read_text())
        path.write_text(to_text(replace(found, run="")))
    for path in folder.rglob(COMMIT):
        body = json.loads(path.read_text())
        del body["run"]
        text = next(path.parent.glob(f"*/{MANIFEST}")).read_bytes()
        body["manifests"] = {"embedded": record_of_bytes(text).crc32c}
        path.write_text(json.dumps(body))
    shutil.rmtree(folder / "local/embedded" / LEASES)


def test_a_run_from_before_gets_an_identity_at_its_next_start(
    folder: Path, whole: dict[int, tuple[float, float]]
):
    without_identity(folder)
    first = trains(folder, "first", places=("local", "store"))
    kept = first.config.checkpoint
    config = replace(run_config(folder / "first"), checkpoint=kept)
    with open_checkpoint(config, None) as found:  # as sample, eval and export do
        assert (found.step, found.run) == (STOPPED_AT, "")
    empty = trains(folder, "second", places=("local", "store"))
    with pytest.raises(OtherRun, match="--adopt before"):
        begin(empty)
    assert begin(but(first, stop_after=1)) == 4
    own = identity(folder)
    assert own.startswith("before-")
    store = open_store(str(first.config.checkpoint.cloud))
    assert committed_run(store, STOPPED_AT + 1) == own
    # its saves from before its identity stay its own
    shutil.rmtree(folder / "local/embedded/step_00000004")
    store.remove(store.names("step_00000004/"))
    assert begin(but(first, stop_after=1)) == 4
    shutil.rmtree(folder / "first")
    assert begin(empty) == 0  # now it has an identity
    assert losses(empty.config.run_dir) == {5: whole[5]}
    assert identity(folder, "second") == own


def test_what_is_from_before_is_adopted_if_that_is_asked_for(folder: Path):
    without_identity(folder)
    second = trains(folder, "second", places=("local", "store"), stop_after=1)
    assert begin(but(second, adopt="before")) == 4
    assert [*losses(folder / "second")] == [4]
    assert begin(second) == 0
    assert identity(folder, "second").startswith("before-")


def test_what_cannot_be_adopted_is_named(tmp_path: Path):
    preset = trains(tmp_path, "run", places=("store",), adopt="0123456789abcdef")
    with pytest.raises(BadInput, match="but no checkpoint of that run was found"):
        begin(preset)
    assert not lease_folder(tmp_path / "store").names("lease/")
