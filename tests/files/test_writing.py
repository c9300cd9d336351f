# SPDX-License-Identifier: Apache-2.0
"""What happens to what is already at a path when a file is written there."""

import os
import stat
import threading
from pathlib import Path

import pytest

from hetjax.files.writing import write_whole

SECRET = 0o600


def test_a_file_is_replaced_and_never_changed_in_place(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text("before")
    with path.open() as reader:
        write_whole(path, "after")
        assert reader.read() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_terminal_stays_one_and_gets_the_text(tmp_path: Path):
    ours, theirs = os.openpty()
    path = tmp_path / "stdout"
    path.symlink_to(os.ttyname(theirs))
    before = os.stat(path)
    write_whole(path, "a plan")
    assert os.read(ours, 100) == b"a plan"
    assert path.is_symlink()
    after = os.stat(path)
    assert stat.S_ISCHR(after.st_mode)
    assert (after.st_rdev, after.st_ino) == (before.st_rdev, before.st_ino)
    os.close(ours)
    os.close(theirs)


def test_a_pipe_gets_all_of_a_long_text():
    reader, writer = os.pipe()  # as the shell gives for `--output >(jq .)`
    text, got = "long " * 100_000, list[str]()
    thread = threading.Thread(target=lambda: got.append(os.fdopen(reader).read()))
    thread.start()
    write_whole(f"/dev/fd/{writer}", text)
    os.close(writer)
    thread.join(20.0)
    assert got == [text]


def test_a_fifo_that_nobody_reads_is_an_error_and_no_wait(tmp_path: Path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device") as caught:
        write_whole(path, "a plan")
    assert caught.value.filename == str(path)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_link_keeps_pointing_at_the_file_that_is_written(tmp_path: Path):
    (tmp_path / "target.json").write_text("before")
    link = tmp_path / "latest.json"
    link.symlink_to("target.json")
    write_whole(link, "after")
    assert link.is_symlink()
    assert (tmp_path / "target.json").read_text() == "after"


def test_a_secret_goes_neither_through_a_link_nor_into_a_pipe(tmp_path: Path):
    seen = tmp_path / "seen"
    seen.write_text("")
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(seen)
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for path in (link, fifo):
        write_whole(path, "key", SECRET)
        assert stat.S_IMODE(path.lstat().st_mode) == SECRET
        assert stat.S_ISREG(path.lstat().st_mode)
    assert seen.read_text() == ""
    assert os.read(reader, 10) == b""
    os.close(reader)


def test_a_folder_is_an_error(tmp_path: Path):
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path, "a plan")
    assert list(tmp_path.iterdir()) == []
