# SPDX-License-Identifier: Apache-2.0
"""Connections: messages arrive whole, strangers are refused, losses are noticed."""

import os
import queue
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hetjax.comm.callers import _MOST_WAITING
from hetjax.comm.connections import Connection
from hetjax.comm.frames import Key
from hetjax.comm.handshake import (
    _GREETING,
    _HANDSHAKE_S,
    _NAME_BYTES,
    Ends,
    HandshakeRefused,
    dial,
)
from hetjax.comm.peers import PeerLost, Peers

SECRET = secrets.token_bytes(32)
KEY: Key = (1, 2, 3, 4, 5, 6)


@pytest.fixture(params=["127.0.0.1:0", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'peer'}" if request.param == "unix" else request.param


@pytest.fixture
def pair(address: str) -> Iterator[tuple[Peers, Peers]]:
    one = Peers("one", address, SECRET, silence_s=1.0)
    second = f"{address}-2" if address.startswith("unix:") else address
    other = Peers("two", second, SECRET, silence_s=1.0)
    joining = threading.Thread(target=other.connect, args=({"one": one.address}, 5.0))
    joining.start()
    one.connect({"two": other.address}, 5.0)
    joining.join()
    yield one, other
    one.close()
    other.close()


def test_messages_of_all_sizes_and_dtypes_arrive_whole(pair: tuple[Peers, Peers]):
    one, two = pair
    rng = np.random.default_rng(0)
    sizes = [0, 1, 7, 4096, 5_000_000]
    sent: list[np.ndarray] = [
        rng.standard_normal(size).astype(np.float32) for size in sizes
    ]
    sent.append(sent[3].astype(ml_dtypes.bfloat16))
    for number, array in enumerate(sent):
        half = len(array) // 2
        one.send("two", (0, 0, 0, 0, 0, number), [array[:half], array[half:]])
    for number in reversed(range(len(sent))):
        found = two.mailbox.receive("one", (0, 0, 0, 0, 0, number))
        np.testing.assert_array_equal(found.view(sent[number].dtype), sent[number])
        assert not len(found) or found.ctypes.data % 64 == 0


def test_both_send_at_once_without_waiting_for_each_other(pair: tuple[Peers, Peers]):
    one, two = pair
    large = np.ones(30_000_000, np.uint8)
    for _ in range(3):
        one.send("two", KEY, [large])
        two.send("one", KEY, [large])
        assert one.mailbox.receive("two", KEY).sum() == len(large)
        assert two.mailbox.receive("one", KEY).sum() == len(large)


def test_an_idle_peer_is_not_taken_for_lost(pair: tuple[Peers, Peers]):
    one, two = pair
    time.sleep(2.5)  # the silence limit is a second here
    one.send("two", KEY, [np.arange(3)])
    assert two.mailbox.receive("one", KEY).view(np.int64).tolist() == [0, 1, 2]


def test_all_who_wait_are_told_of_a_peer_that_leaves(pair: tuple[Peers, Peers]):
    one, two = pair
    told: queue.Queue[str] = queue.Queue()

    def wait(key: Key) -> None:
        try:
            two.mailbox.receive("one", key)
        except PeerLost as lost:
            told.put(lost.peer)

    for number in range(3):
        threading.Thread(target=wait, args=((0, 0, 0, 0, 0, number),)).start()
    one.close()
    assert [told.get(timeout=2) for _ in range(3)] == ["one"] * 3
    with pytest.raises(PeerLost, match="left"):
        two.mailbox.wait(two.mailbox.version)


def test_a_peer_that_never_beats_is_lost_in_the_end():
    here, there = socket.socketpair()
    ours, theirs = socket.socketpair()
    told: queue.Queue[str] = queue.Queue()
    link = Connection(
        Ends(here, ours),
        "mute",
        lambda peer, key, data: None,
        lambda peer, reason: told.put(reason),
        silence_s=0.1,
    )
    begin_s = time.monotonic()
    theirs.sendall(b"beat")
    assert told.get(timeout=5) == "gave no sign of life"
    assert time.monotonic() - begin_s < 1.0
    link.close()
    there.close()
    theirs.close()


@pytest.mark.parametrize("size", [2**62, 2**40])
def test_what_cannot_be_taken_in_loses_who_sends_it(size: int):
    """It must not end the reading thread without a report."""
    here, there = socket.socketpair()
    ours, theirs = socket.socketpair()
    told: queue.Queue[str] = queue.Queue()

    def deliver(peer: str, key: Key, data: np.ndarray) -> None:
        raise ValueError("no JSON")

    link = Connection(
        Ends(here, ours), "raw", deliver, lambda _, reason: told.put(reason)
    )
    there.sendall(struct.pack("<6IQ", *KEY, size))
    there.shutdown(socket.SHUT_WR)
    assert told.get(timeout=5)
    link.close()
    there.close()
    theirs.close()


@pytest.mark.parametrize("rest", [0, 13, 32, 40])
def test_what_has_arrived_is_delivered_whatever_comes_of_the_next(rest: int):
    """The next message: none of it, half of its header, all of that, or more."""
    here, there = socket.socketpair()
    ours, theirs = socket.socketpair()
    came: queue.Queue[tuple[str, bytes]] = queue.Queue()
    link = Connection(
        Ends(here, ours),
        "raw",
        lambda peer, key, data: came.put(("message", data.tobytes())),
        lambda peer, reason: came.put(("lost", b"")),
    )
    header = struct.pack("<6IQ", *KEY, 100)
    there.sendall(struct.pack("<6IQ", *KEY, 5) + b"whole" + header[:rest])
    assert came.get(timeout=5) == ("message", b"whole")
    there.sendall(header[rest:] + bytes(max(0, rest - len(header))))
    there.close()
    assert came.get(timeout=5) == ("lost", b"")
    link.close()
    theirs.close()


@pytest.mark.parametrize(
    "greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(_GREETING.size)]
)
def test_a_stranger_gets_nothing_and_holds_nobody_up(
    pair: tuple[Peers, Peers], greeting: bytes
):
    one, two = pair
    unix = one.address.startswith("unix:")
    stranger = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    host, _, port = one.address.rpartition(":")
    stranger.connect(port if unix else (host, int(port)))
    stranger.sendall(greeting)
    two.send("one", KEY, [np.arange(3)])
    assert len(one.mailbox.receive("two", KEY)) == 24
    if len(greeting) >= _GREETING.size:
        stranger.recv(1000)  # the challenge
        stranger.sendall(bytes(1000))
        with pytest.raises(ConnectionError):
            while True:
                if not stranger.recv(1000):
                    raise ConnectionError
    stranger.close()
    assert set(one.links) == {"two"}


def test_two_runs_with_other_secrets_do_not_talk():
    one = Peers("one", "127.0.0.1:0", SECRET)
    with pytest.raises(HandshakeRefused, match="does not know this run's secret"):
        dial(one.address, "two", "one", secrets.token_bytes(32))
    two = Peers("two", "127.0.0.1:0", secrets.token_bytes(32))
    with pytest.raises(PeerLost, match="'two' cannot be reached"):
        one.connect({"two": two.address}, 1.0)
    assert not one.links and not two.links
    one.close()
    two.close()


@pytest.mark.parametrize("name", ["a" * 63, "a" * 63 + "/65535", "n@0"])
def test_a_name_as_long_as_any_arrives_whole(name: str):
    one, other = Peers("one", "127.0.0.1:0", SECRET), Peers(name, "127.0.0.1:0", SECRET)
    joining = threading.Thread(target=other.connect, args=({"one": one.address}, 5.0))
    joining.start()
    one.connect({name: other.address}, 5.0)
    joining.join()
    assert set(one.links) == {name}
    one.close()
    other.close()


@pytest.mark.parametrize("name", ["..", "", "a/b", "a" * 64, "a\0b"])
def test_a_caller_with_a_name_that_no_worker_has_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    one = Peers("one", "127.0.0.1:0", SECRET)
    with pytest.raises(HandshakeRefused, match="not a worker name"):
        dial(one.address, name, "one", SECRET)
    sent = lambda name: name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")  # noqa: E731
    monkeypatch.setattr("hetjax.comm.handshake._name_bytes", sent)
    with pytest.raises(ConnectionError, match="end of stream"):  # the door is shut
        dial(one.address, name, "one", SECRET)
    assert not one.links
    one.close()


def test_a_door_without_descriptors_opens_again_once_there_are_some():
    one, two = Peers("one", "127.0.0.1:0", SECRET), Peers("two", "127.0.0.1:0", SECRET)
    early = socket.socket()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    most = max(map(int, os.listdir("/proc/self/fd"))) + 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        host, _, port = two.address.rpartition(":")
        early.connect((host, int(port)))  # wakes the door, which cannot accept it
        time.sleep(0.3)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    joining = threading.Thread(target=two.connect, args=({"one": one.address}, 5.0))
    joining.start()
    one.connect({"two": two.address}, 5.0)
    joining.join()
    assert set(one.links) == {"two"}
    early.close()
    one.close()
    two.close()


@pytest.mark.parametrize("pause_s", [0.05, 9.0])
def test_a_handshake_has_one_limit_however_slowly_it_comes(
    pause_s: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hetjax.comm.handshake._HANDSHAKE_S", 0.5)
    one = Peers("one", "127.0.0.1:0", SECRET)
    host, _, port = one.address.rpartition(":")
    slow = socket.create_connection((host, int(port)))
    ended, begin_s = threading.Event(), time.monotonic()

    def trickle() -> None:
        with suppress(OSError):
            while not ended.wait(pause_s):
                slow.sendall(b"x")

    threading.Thread(target=trickle, daemon=True).start()
    slow.settimeout(5.0)
    with suppress(ConnectionResetError):  # it closes with bytes unread
        assert slow.recv(1) == b""
    assert 0.4 < time.monotonic() - begin_s < 4.0
    ended.set()
    slow.close()
    one.close()


def test_strangers_that_say_nothing_leave_room_for_honest_callers():
    one, two = Peers("one", "127.0.0.1:0", SECRET), Peers("two", "127.0.0.1:0", SECRET)
    host, _, port = two.address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(150)]
    begin_s = time.monotonic()
    joining = threading.Thread(target=two.connect, args=({"one": one.address}, 5.0))
    joining.start()
    one.connect({"two": two.address}, 5.0)
    joining.join()
    assert time.monotonic() - begin_s < _HANDSHAKE_S / 2  # no timeout had to pass
    time.sleep(0.2)
    for stranger in strangers:
        stranger.setblocking(False)
    assert sum(map(_is_open, strangers)) <= _MOST_WAITING
    for stranger in strangers:
        stranger.close()
    one.close()
    two.close()


def _is_open(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_peer_that_never_comes_is_named():
    two = Peers("two", "127.0.0.1:0", SECRET)
    with pytest.raises(PeerLost, match="'one' did not connect within 0.2 s"):
        two.connect({"one": "127.0.0.1:1"}, 0.2)
    two.close()


def test_it_listens_on_the_given_address_alone():
    one = Peers("one", "127.0.0.1:0", SECRET)
    port = int(one.address.rpartition(":")[2])
    with Path("/proc/self/net/tcp").open() as table:
        rows = [line.split() for line in table][1:]
    listening = [row[1] for row in rows if row[3] == "0A"]
    assert [a for a in listening if a.endswith(f":{port:04X}")] == [
        f"0100007F:{port:04X}"
    ]
    one.close()
