# SPDX-License-Identifier: Apache-2.0
"""Whether a machine sees the run's directory, and where else it keeps checkpoints."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.training.directory.leases import Leases

RUN = RunIdentity(id="0123456789abcdef")


def storage(run_dir: Path, stack: ExitStack) -> CheckpointStorage:
    """Return the storage of a run started there, whose workers may be elsewhere."""
    run_dir.mkdir(exist_ok=True)
    kept = CheckpointStorage(directory=str(run_dir / "checkpoints"), run=RUN)
    leases = Leases(run_dir, kept, stack, lambda text: None, RUN.id)
    return leases.protecting(kept, is_far=True)


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_who_sees_the_lease_keeps_checkpoints_in_the_run_directory(tmp_path: Path):
    with ExitStack() as stack:
        found = storage(tmp_path / "run", stack)
        assert found.here() == found


def test_who_does_not_see_it_keeps_them_in_a_folder_of_the_run(
    tmp_path: Path, state_home: Path
):
    with ExitStack() as stack:
        found = storage(tmp_path / "run", stack)
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        here = found.here()
        (tmp_path / "elsewhere").rename(tmp_path / "run")
        assert found.here() == here  # a worker does not switch while it writes
    assert here.at("left") == state_home / "hetjax" / RUN.id
    assert (here.is_local, here.lease) == (True, "")


@pytest.mark.parametrize("starts", [1, 2])
def test_another_run_under_the_same_path_is_not_taken_for_it(
    starts: int, tmp_path: Path
):
    """Even if that run started as often or more often: its lease identifies it."""
    run_dir, other = tmp_path / "run", tmp_path / "other"
    with ExitStack() as stack:
        for _ in range(starts):
            with ExitStack() as start:
                storage(other, start)
                (other / "config.json").touch()  # otherwise it leaves no trace
        found = storage(run_dir, stack)
        run_dir.rename(tmp_path / "elsewhere")
        shutil.copytree(other, run_dir)
        here = found.here()
        assert here.is_local
        shutil.rmtree(run_dir)
        (tmp_path / "elsewhere").rename(run_dir)
    # nor does the other run's newer lease prevent saving
    here.writer("left").close()


def test_a_folder_that_was_given_stays_where_it_is(tmp_path: Path):
    with ExitStack() as stack:
        found = storage(tmp_path / "run", stack)
        given = CheckpointStorage(
            directory="/disk/{worker}",
            is_local=True,
            lease=str(tmp_path / "nowhere"),
            number=found.number,
            token=found.token,
        )
        assert given.here().at("left") == Path("/disk/left")
