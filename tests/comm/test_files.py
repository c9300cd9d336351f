# SPDX-License-Identifier: Apache-2.0
"""Files of another machine, piece by piece: whole as they are there, or refused."""

import secrets
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from hetjax.comm.files.giver import FileGiver
from hetjax.comm.files.pieces import PIECE_BYTES, Piece, checked, with_digest
from hetjax.comm.files.taker import FileTaker, GiverPlace, NotGiven

SECRET = secrets.token_bytes(32)
SIZE = 2 * PIECE_BYTES + 12_345  # two whole pieces and a part


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(0).bytes(SIZE)


@pytest.fixture
def giver(tmp_path: Path, content: bytes) -> Iterator[FileGiver]:
    path = tmp_path / "there.bin"
    path.write_bytes(content)
    (tmp_path / "empty").touch()
    files = {"text/a": path, "empty": tmp_path / "empty", "gone": tmp_path / "gone"}
    giver = FileGiver("127.0.0.1:0", SECRET, files)
    yield giver
    giver.close()


def place(giver: FileGiver, own: str = "left") -> GiverPlace:
    return GiverPlace(address=giver.address, own=own, secret=SECRET)


def test_all_bytes_come_in_order_and_any_part_alone(giver: FileGiver, content: bytes):
    with FileTaker(place(giver)) as taker:
        assert taker.size("text/a") == SIZE
        assert taker.read("text/a", 0, SIZE) == content
        start, end = PIECE_BYTES - 7, PIECE_BYTES + 9
        assert taker.read("text/a", start, end) == content[start:end]
        assert taker.read("text/a", SIZE - 5, SIZE + 100) == content[-5:]
        assert (taker.size("empty"), taker.read("empty", 0, 10)) == (0, b"")


def test_what_is_here_and_the_same_does_not_come_again(
    giver: FileGiver, content: bytes
):
    damaged = bytearray(content)
    damaged[PIECE_BYTES + 1] ^= 1
    with FileTaker(place(giver)) as taker:
        have = lambda start, end: bytes(damaged[start:end])  # noqa: E731
        found = b"".join(data for _, data in taker.pieces("text/a", 0, SIZE, have))
    assert sha256(found).digest() == sha256(content).digest()
    assert giver.given_bytes == {"text/a": PIECE_BYTES}


@pytest.mark.parametrize(
    "name, end",
    [
        ("text/b", 10),
        ("/etc/hostname", 10),
        ("../there.bin", 10),
        ("there.bin", 10),
        ("gone", 10),
    ],
)
def test_only_named_files_are_given(giver: FileGiver, name: str, end: int):
    with FileTaker(place(giver)) as taker:
        with pytest.raises(NotGiven):
            taker.read(name, 0, end)
        assert taker.size("text/a") == SIZE  # the connection is still usable


@pytest.mark.parametrize(
    "asked",
    [
        Piece(name="text/a", start=0, end=PIECE_BYTES + 1),
        Piece(name="text/a", start=-1, end=5),
        Piece(name="text/a", start=9, end=5),
    ],
)
def test_more_than_a_piece_is_not_read_at_once(giver: FileGiver, asked: Piece):
    with FileTaker(place(giver)) as taker, pytest.raises(NotGiven):
        taker._answer(taker._ask(asked.name, asked.start, asked.end, ""))


def test_a_taker_is_told_when_nobody_gives_any_more(giver: FileGiver):
    with FileTaker(place(giver)) as taker:
        giver.close()
        with pytest.raises(NotGiven, match="controller"):
            taker.read("text/a", 0, 10)


def test_two_workers_take_at_once(giver: FileGiver, content: bytes):
    with FileTaker(place(giver)) as left, FileTaker(place(giver, "right")) as right:
        assert left.read("text/a", 0, SIZE) == right.read("text/a", 0, SIZE) == content


def test_bytes_that_were_changed_on_the_way_are_not_believed():
    message = np.concatenate(with_digest(b"as it was sent"))
    assert checked(message) == b"as it was sent"
    for at in range(len(message)):
        changed = message.copy()
        changed[at] ^= 4
        with pytest.raises(ValueError, match="received bytes differ"):
            checked(changed)
