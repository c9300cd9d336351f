# SPDX-License-Identifier: Apache-2.0
"""Which files are read, and in which encodings."""

import os
import socket
from pathlib import Path

import pytest

from hetjax.errors import BadInput
from hetjax.files.reading import Unreadable, decoded, opened, read_bytes, read_text

TEXT = '{"name": "größer"}\n'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_utf_8_is_read_with_and_without_a_mark(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "f").write_bytes(TEXT.encode(encoding))
    assert read_text(tmp_path / "f") == TEXT


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", [TEXT, "[]", 'name = "x"\n'])
def test_utf_16_is_named(encoding: str, text: str) -> None:
    with pytest.raises(Unreadable) as refused:
        decoded(text.encode(encoding), "plan 'p'")
    assert refused.value.got.startswith("plan 'p' in UTF-16")
    named = refused.value.fix.split("-f ")[1].split()[0]
    assert text.encode(encoding).decode(named) == text  # the advice works


@pytest.mark.parametrize("encoding", ["utf-32", "utf-32-le", "utf-32-be"])
def test_utf_32_is_named(encoding: str) -> None:
    with pytest.raises(Unreadable, match="in UTF-32"):
        decoded(TEXT.encode(encoding), "plan")


def test_another_encoding_is_refused_at_its_first_byte(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(TEXT.encode("latin-1"))
    with pytest.raises(BadInput, match="not UTF-8 text at byte 12"):
        read_text(tmp_path / "f", what="plan file")


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")  # reading it would wait for a writer
    for _ in range(2):
        with pytest.raises(Unreadable, match="a FIFO"):
            read_text(tmp_path / "f", what="plan file")


def test_folders_and_links_to_themselves_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").symlink_to("f")
    for path, kind in ((tmp_path, "a folder"), (tmp_path / "f", "leads to itself")):
        with pytest.raises(Unreadable, match=kind):
            read_bytes(path)


def test_devices_and_sockets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="a device"):
        read_bytes("/dev/zero")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        with pytest.raises(Unreadable, match="a socket"):
            read_bytes(tmp_path / "s")


def test_a_link_to_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").symlink_to("/dev/zero")
    with pytest.raises(Unreadable, match="a device"):
        read_bytes(tmp_path / "f")


def test_a_file_that_becomes_a_fifo_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_text("[]")
    before = os.stat(tmp_path / "f")
    (tmp_path / "f").unlink()
    os.mkfifo(tmp_path / "f")
    with monkeypatch.context() as then:  # pytest also calls it if this fails
        then.setattr(os, "stat", lambda path: before)
        with pytest.raises(Unreadable, match="a FIFO"), opened(tmp_path / "f"):
            pass


def test_no_more_is_read_than_the_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 11)
    assert len(read_bytes(tmp_path / "f", most_bytes=11)) == 11
    with pytest.raises(Unreadable, match="more than 10 bytes"):
        read_bytes(tmp_path / "f", most_bytes=10)


def test_a_file_without_a_size_is_read() -> None:
    assert read_text("/proc/self/stat").startswith(f"{os.getpid()} ")


@pytest.mark.parametrize("name", ["missing", "nul\0in it"])
def test_what_cannot_be_opened_is_bad_input(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_text(tmp_path / name, what="plan file")
    assert refused.value.fix == "check the path of the plan file"
