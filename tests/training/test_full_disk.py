# SPDX-License-Identifier: Apache-2.0
"""A full disk ends a run clearly, and the run resumes once there is room.

The system really refuses: a small file system if mounting is allowed, else a limit on
the size of files.
"""

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hetjax.checkpoint.orbax_leaves import SaveTree, checkpointer_alone
from hetjax.data.array_file import ArrayFile
from hetjax.errors import BadInput, RunFailed
from hetjax.files.writing import write_whole
from hetjax.training.directory.journal import Journal, read_journal
from hetjax.training.session import run
from tests.training.small import MODEL, ONE_STAGE, but, losses, small_preset

NO_ROOM = "No space left|File too large"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@contextmanager
def no_file_over(num_bytes: int) -> Iterator[None]:
    """Let the system refuse to extend any file beyond `num_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(disk: Path) -> Path:
    with (disk / "ballast").open("wb", buffering=0) as file:
        for size in (4096, 1):
            with pytest.raises(OSError, match=NO_ROOM):
                while True:
                    file.write(bytes(size))
    return disk / "ballast"


def test_a_journal_on_a_full_disk_keeps_whole_lines_and_goes_on_with_room(
    small_disk: Path,
):
    path = small_disk / "metrics.jsonl"
    journal, step = Journal(path, last_step=0), 0
    ballast = fill(small_disk)
    with pytest.raises(OSError, match=NO_ROOM) as caught:
        for step in range(1000):
            journal.append({"step": step, "text": "x" * 100})
    assert caught.value.filename == str(path)
    assert [line["step"] for line in read_journal(path)] == list(range(step))
    assert path.read_bytes()[-1:] in (b"", b"\n")
    ballast.unlink()
    journal.append({"step": step})
    journal.close()
    assert [line["step"] for line in read_journal(path)] == list(range(step + 1))


def test_a_line_that_fits_in_part_is_taken_back(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, last_step=0)
    journal.append({"step": 1})
    with no_file_over(40), pytest.raises(OSError, match="File too large"):
        journal.append({"step": 2, "text": "x" * 100})
    journal.append({"step": 3})
    journal.close()
    assert [line["step"] for line in read_journal(path)] == [1, 3]


def test_a_file_that_is_written_whole_stays_as_it_was(small_disk: Path):
    path = small_disk / "plan.json"
    write_whole(path, "before")
    fill(small_disk)
    with pytest.raises(OSError, match=NO_ROOM) as caught:
        write_whole(path, "after" * 10_000)
    assert caught.value.filename == str(path)
    assert path.read_text() == "before"
    assert {p.name for p in small_disk.iterdir()} == {"plan.json", "ballast"}


def test_tokens_that_do_not_fit_are_told_by_the_systems_word(tmp_path: Path):
    with no_file_over(4096), pytest.raises(OSError) as caught:
        with ArrayFile(tmp_path / "train.npy", np.uint16) as file:
            file.append(np.zeros(10_000, np.uint16))
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.filename == str(tmp_path / "train.npy")


def test_a_run_whose_metrics_do_not_fit_ends_clearly_and_goes_on_with_room(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],  # in memory, as other captures are files
):
    preset = small_preset(tmp_path, ONE_STAGE)
    run_dir = preset.config.run_dir
    metrics, over = run_dir / "metrics.jsonl", threading.Event()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_up() -> None:
        while not over.is_set():
            if metrics.exists() and metrics.stat().st_size > 900:
                size = metrics.stat().st_size + 100
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
                return
            time.sleep(0.001)

    filling = threading.Thread(target=fill_up)
    filling.start()
    try:
        with pytest.raises(RunFailed) as caught:
            run(preset.config, preset, MODEL)
    finally:
        over.set()
        filling.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    text = str(caught.value)
    assert f"got: {metrics}: File too large" in text and "make room" in text
    before = losses(run_dir)
    assert before and max(before) < 10
    assert run(preset.config, preset, MODEL) == 0
    after = losses(run_dir)
    assert list(after) == list(range(1, 11))
    assert {step: after[step] for step in before} == before


def test_a_run_that_has_no_room_to_begin_says_so(small_disk: Path, tmp_path: Path):
    preset = but(small_preset(tmp_path), run_dir=small_disk / "run" / "x")
    fill(small_disk)
    with pytest.raises((BadInput, RunFailed), match="No space left.*(\\n.*)+make room"):
        run(preset.config, preset, MODEL)


def test_a_worker_ends_though_it_cannot_say_why():
    """Its controller is gone, and the disk of its log is full."""
    code = "from hetjax.runtime.worker.host_group import _stop\n_stop('stuck')\n"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stderr=full, timeout=120)
    assert done.returncode == 1


def test_leaves_that_do_not_fit_are_one_error_and_no_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    leaves = {f"leaf{n}": np.zeros(10_000, np.float32) for n in range(64)}
    orbax = checkpointer_alone("alone")
    with no_file_over(4096), pytest.raises(ValueError, match="File too large"):
        orbax.save(tmp_path / "state", SaveTree(leaves))
    time.sleep(0.5)  # for writes that are still under way
    assert not printed
