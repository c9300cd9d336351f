# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import orbax.checkpoint as ocp
import pytest

from hetjax.checkpoint.format import AttemptNames
from hetjax.checkpoint.reader import Checkpoint, partial_checkpoints, steps
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stored_steps import committed_steps
from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.writer import CheckpointWriter
from hetjax.errors import BadInput
from tests.checkpoint.values import State, state_of


def assert_holds(directory: Path, step: int, state: State) -> None:
    checkpoint = Checkpoint.open(directory, step)
    for entry, value in state:
        np.testing.assert_array_equal(checkpoint.read(entry), value)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that blocks every write until the event is set."""
    gate, write = threading.Event(), ocp.Checkpointer.save

    def held_back(*args: object, **kwargs: object) -> None:
        assert gate.wait(timeout=30)
        write(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(ocp.Checkpointer, "save", held_back)
    yield gate
    gate.set()


def test_a_save_during_another_is_refused_and_asks_for_no_state(
    tmp_path: Path, disk: threading.Event
) -> None:
    def never_asked() -> Iterator:
        raise AssertionError("state was copied for a save that is skipped")
        yield

    with CheckpointWriter(tmp_path, "embedded") as writer:
        assert writer.save(1, state_of(1), host={})
        assert not writer.save(2, never_asked(), host={})
        assert steps(tmp_path) == []
        disk.set()
        writer.wait()
        assert writer.save(3, state_of(3), host={})
    assert steps(tmp_path) == [1, 3]


def test_save_returns_before_anything_is_on_disk_and_keeps_the_host_of_then(
    tmp_path: Path, disk: threading.Event
) -> None:
    host = {"tokens": 1}
    with CheckpointWriter(tmp_path, "embedded") as writer:
        started_s = time.monotonic()
        writer.save(1, state_of(1), host=host)
        assert time.monotonic() - started_s < 1
        assert list(tmp_path.rglob("zarr.json")) == []
        host["tokens"] = 2
        disk.set()
    assert Checkpoint.open(tmp_path).host == {"tokens": 1}


def test_a_process_that_is_not_the_first_of_its_world_saves_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.process_index", lambda *_: 1)
    with CheckpointWriter(tmp_path, "slice@1") as writer:
        writer.save(1, state_of(1), host={})
    assert_holds(tmp_path, 1, state_of(1))


def test_only_the_newest_steps_stay(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, "embedded", keep=2) as writer:
        for step in (2, 4, 6, 8):
            writer.save(step, state_of(step), host={})
            writer.wait()
            assert steps(tmp_path) == [s for s in (step - 2, step) if s]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_00000006",
        "step_00000008",
    ]


def test_a_save_in_flight_removes_nothing_that_others_were_told_of(
    tmp_path: Path, disk: threading.Event
) -> None:
    disk.set()
    with CheckpointWriter(tmp_path, "embedded", keep=1) as writer:
        writer.save(2, state_of(2), host={})
        writer.wait()
        disk.clear()
        writer.save(4, state_of(4), host={})
        writer.keep_all()
        disk.set()
        writer.wait()
        assert steps(tmp_path) == [2, 4]
        writer.save(6, state_of(6), host={})
    assert steps(tmp_path) == [6]


class SlowCopies:
    """Copies a save to other machines; blocks until the event is set."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def replicate(self, part: Path, step: int, also: frozenset[int]) -> None:
        assert self.done.wait(timeout=30)


def test_who_hung_neither_removes_nor_replaces_what_a_later_start_has_saved(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    names, copies = AttemptNames(), SlowCopies()
    hung = CheckpointWriter(tmp_path, "a", keep=1, copies=cast(Any, copies))
    hung.save(4, state_of(4), host={"attempt": names.new()})
    while steps(tmp_path) != [4]:
        time.sleep(0.01)
    of_hung = names.new()
    with CheckpointWriter(tmp_path, "a", keep=3) as writer:
        for step in (6, 8):
            writer.save(step, state_of(step), host={"attempt": names.new()})
            writer.wait()
    copies.done.set()
    hung.wait()
    assert steps(tmp_path) == [4, 6, 8]
    hung.save(6, state_of(4), host={"attempt": of_hung})
    hung.close()
    assert "a later start" in str(recwarn.pop(UserWarning).message)
    assert_holds(tmp_path, 6, state_of(6))


def test_resuming_earlier_gives_up_the_later_steps_once_a_save_is_committed(
    tmp_path: Path,
) -> None:
    with CheckpointWriter(tmp_path, "embedded", keep=3) as writer:
        for step in (10, 20, 30):
            writer.save(step, state_of(step), host={})
            writer.wait()
        writer.save(15, state_of(15), host={})
    assert steps(tmp_path) == [10, 15]


def test_what_is_given_up_is_there_no_more_also_of_others(tmp_path: Path) -> None:
    for worker in ("west", "east"):
        with CheckpointWriter(tmp_path, worker, keep=3) as writer:
            for step in (10, 20, 30):
                writer.save(step, state_of(step), host={}, workers=["west", "east"])
                writer.wait()
    with CheckpointWriter(tmp_path, "east", keep=3) as writer:
        writer.discard_after(20)
    assert steps(tmp_path) == [10, 20]


def test_what_is_given_up_is_not_copied_to_the_store_as_the_run_ends(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    cloud = tmp_path / "store"
    storage = CheckpointStorage(directory=str(tmp_path / "saves"), cloud=str(cloud))
    with storage.writer("a") as writer:
        writer.save(10, state_of(10), host={})
        writer.wait()
        writer.save(20, state_of(20), host={}, uploads_now=False)
        writer.discard_after(10)
    assert committed_steps(FileStore(cloud)) == [10] and not recwarn.list


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, "embedded") as writer:
        for seed in (1, 2, 3):
            writer.save(7, state_of(seed), host={"seed": seed})
            writer.wait()
            assert_holds(tmp_path, 7, state_of(seed))
    own = tmp_path / "step_00000007/embedded"
    assert len(list(own.iterdir())) == 2  # the manifest and one state


def test_a_step_saved_again_stays_as_it_was_until_all_have_it_anew(
    tmp_path: Path,
) -> None:
    both, first, again = ["west", "east"], {"attempt": "1"}, {"attempt": "2"}
    with (
        CheckpointWriter(tmp_path, "west") as west,
        CheckpointWriter(tmp_path, "east") as east,
    ):
        for writer in (west, east):
            writer.save(7, state_of(1), host=first, workers=both)
            writer.wait()
        west.save(7, state_of(2), host=again, workers=both, safe=(7, "1"))
        west.wait()
        assert_holds(tmp_path, 7, state_of(1))
        east.save(7, state_of(2), host=again, workers=both, safe=(7, "1"))
        east.wait()
        assert_holds(tmp_path, 7, state_of(2))
        for writer in (west, east):
            writer.save(
                8, state_of(3), host={"attempt": "3"}, workers=both, safe=(7, "2")
            )
    for worker in both:  # the manifest and one state
        assert len(list((tmp_path / "step_00000007" / worker).iterdir())) == 2


def test_a_failed_save_over_a_step_leaves_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with CheckpointWriter(tmp_path, "embedded") as writer:
        writer.save(7, state_of(1), host={})
        writer.wait()
        monkeypatch.setattr(ocp.Checkpointer, "save", fails)
        with pytest.warns(match="step 7 was not saved .*No space left"):
            writer.save(7, state_of(2), host={})
            writer.wait()
    assert_holds(tmp_path, 7, state_of(1))


def test_a_healthy_save_says_nothing(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    with CheckpointWriter(tmp_path, "embedded") as writer:
        writer.save(1, state_of(1), host={})
    assert list(recwarn) == [] and "".join(capfd.readouterr()) == ""
    assert [entry.getMessage() for entry in caplog.records] == []


def test_opening_removes_unfinished_steps_and_nothing_else(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, "embedded") as writer:
        writer.save(1, state_of(1), host={})
    unfinished = tmp_path / "step_00000002/embedded/state.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "zarr.json").write_text("{}")
    half_removed = tmp_path / "step_00000001/embedded/state_2"
    half_removed.mkdir()
    others = tmp_path / "step_00000003/another/state"
    others.mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    CheckpointWriter(tmp_path, "embedded").close()
    assert not unfinished.parent.parent.exists() and not half_removed.exists()
    assert others.exists() and (tmp_path / "notes.txt").exists()
    assert steps(tmp_path) == [1]


def test_a_directory_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="(?s)cannot be used.*--run-dir"):
        CheckpointWriter(tmp_path / "file/checkpoints", "embedded")


_FULL_DISK = """
import resource, sys, warnings
from pathlib import Path
import numpy as np
from hetjax.checkpoint.format import Entry
from hetjax.checkpoint.reader import steps
from hetjax.checkpoint.writer import CheckpointWriter

def state(fill):
    value = np.full((64, 1024), fill, np.float32)
    return [(Entry("params.head.w", value.shape, value.dtype, (0, 4)), value)]

def limit_file_size(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

directory = Path(sys.argv[1])
with CheckpointWriter(directory, "embedded") as writer:
    writer.save(1, state(1), host={})
    writer.wait()
    limit_file_size(32 * 1024)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer.save(2, state(2), host={})
        writer.wait()
    print(len(caught), caught[0].message)
    print([p.name for p in directory.iterdir()], steps(directory))
    limit_file_size(resource.RLIM_INFINITY)
    writer.save(3, state(3), host={})
print(steps(directory))
"""


def test_when_the_disk_refuses_training_goes_on_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    warned, left, after = ran.stdout.splitlines()
    assert warned.startswith("1 checkpoint of step 2 was not saved (")
    assert "File too large" in warned
    assert left == "['step_00000001'] [1]"
    assert after == "[1, 3]"


def test_a_part_says_who_took_part_and_is_not_there(tmp_path: Path) -> None:
    took_part = "a", "b", "c"
    for worker in ("a", "b"):
        with CheckpointWriter(tmp_path, worker) as writer:
            writer.save(7, state_of(1), host={}, workers=took_part)
    (found,) = partial_checkpoints(tmp_path)
    assert found.absent == {"c"}
