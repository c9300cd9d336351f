# SPDX-License-Identifier: Apache-2.0
"""Stores that never answer: every call ends, and says what it waited for."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hetjax.checkpoint.file_records import record_of_bytes, record_of_file
from hetjax.checkpoint.storage import open_store
from hetjax.checkpoint.stores import local
from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.stores.store import (
    CorruptData,
    Store,
    StoreError,
    TimeLimitedStore,
)
from hetjax.checkpoint.uploader import Uploader
from hetjax.checkpoint.writer import CheckpointWriter
from tests.checkpoint.values import state_of

LIMIT_S = 0.5
MOST_S = 20.0  # on a busy machine


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetjax.checkpoint.stores.store.CALL_S", LIMIT_S)
    monkeypatch.setattr("hetjax.checkpoint.writer.LAST_UPLOAD_S", LIMIT_S)


@pytest.fixture(params=["silent", "a byte at a time"])
def deaf(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A server that accepts connections and never completes an answer."""
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()
    callers: list[socket.socket] = []

    def trickle(caller: socket.socket) -> None:
        with suppress(OSError):
            caller.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not over.wait(0.05):
                caller.sendall(b"x")

    def accept() -> None:
        with suppress(OSError):
            while True:
                callers.append(listener.accept()[0])
                if request.param != "silent":
                    threading.Thread(target=trickle, args=callers[-1:]).start()

    threading.Thread(target=accept, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    yield
    over.set()
    for found in (*callers, listener):
        with suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)
        found.close()


def test_a_store_that_takes_connections_and_never_answers_is_told_at_the_start(
    deaf: None,
):
    begin_s = time.monotonic()
    with pytest.raises(StoreError, match="gs://bucket/run: no answer within"):
        open_store("gs://bucket/run")
    assert LIMIT_S <= time.monotonic() - begin_s < MOST_S


CALLS: dict[str, Callable[[Store, Path], object]] = {
    "listing": lambda store, path: store.names("step_"),
    "reading text": lambda store, path: store.get_text("x"),
    "reading": lambda store, path: store.get("x", path / "got", record_of_bytes(b"x")),
    "writing text": lambda store, path: store.put_text("x", "x"),
    "writing": lambda store, path: store.put(
        "x", path / "f", record_of_file(path / "f")
    ),
    "removing": lambda store, path: store.remove(["x"]),
    "looking": lambda store, path: store.written_s("x"),
}


class Hung(FileStore):
    """A store whose calls never end: a file system whose server is gone."""

    def __init__(self) -> None:
        super().__init__(Path("/mnt/gone"))

    def __getattribute__(self, name: str) -> Callable:
        if name in CALLED:
            return lambda *_: threading.Event().wait()
        return super().__getattribute__(name)


CALLED = {"names", "get_text", "get", "put_text", "put", "remove", "written_s"}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_ends_and_says_what_it_waited_for(call: str, tmp_path: Path):
    (tmp_path / "f").write_bytes(b"x")
    begin_s = time.monotonic()
    with pytest.raises(StoreError, match=f"{call.split()[0]} .*/mnt/gone.* within"):
        CALLS[call](TimeLimitedStore(Hung()), tmp_path)
    assert time.monotonic() - begin_s < MOST_S
    public = {name for name in vars(Store) if not name.startswith("_")}
    assert public == CALLED


def test_a_file_that_cannot_be_opened_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a dead mount, opening a file blocks."""
    let_go = threading.Event()
    monkeypatch.setattr(local, "read_bytes", lambda *_, **__: let_go.wait() and b"")
    with pytest.raises(StoreError, match="reading x of"):
        TimeLimitedStore(FileStore(tmp_path)).get_text("x")
    let_go.set()


def test_a_fifo_in_a_store_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "x")
    with pytest.raises(CorruptData, match="a FIFO"):
        FileStore(tmp_path).get_text("x")
    with pytest.raises(StoreError, match="a FIFO"):
        FileStore(tmp_path).get("x", tmp_path / "y", record_of_bytes(b""))


def test_what_a_store_says_itself_is_passed_on(tmp_path: Path):
    store = TimeLimitedStore(FileStore(tmp_path))
    assert store.get_text("none") is None
    with pytest.raises(FileNotFoundError):
        store.put("x", tmp_path / "none", record_of_bytes(b""))


def test_the_end_of_a_run_does_not_wait_for_ever_for_the_last_upload(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    uploader = Uploader(Hung(), tmp_path / "local", "a")
    begin_s = time.monotonic()
    with CheckpointWriter(tmp_path / "local", "a", uploader=uploader) as writer:
        writer.save(7, state_of(7), host={})
    assert time.monotonic() - begin_s < MOST_S
    told = [str(warning.message) for warning in recwarn]
    assert any("step 7 was not uploaded to /mnt/gone" in text for text in told), told
