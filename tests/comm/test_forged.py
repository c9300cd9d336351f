# SPDX-License-Identifier: Apache-2.0
"""An attacker on the path of a link can end it, and nothing else."""

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from hetjax.comm.addresses import endpoint, listen, socket_for, stays_here
from hetjax.comm.door import Listener
from hetjax.comm.frames import Key
from hetjax.comm.handshake import (
    _NAME_BYTES,
    _NONCE_BYTES,
    Ends,
    HandshakeRefused,
    dial,
)
from hetjax.comm.peers import PeerLost, Peers
from tests.comm.relay import CODE_BYTES, HEADER, Attack, Relay, honest

SECRET = secrets.token_bytes(32)
NEVER: Key = (9, 9, 9, 9, 9, 9)
SIZES = (0, 5, 1000, (3 << 20) + 7)


def key(number: int) -> Key:
    return (0, 0, 0, 0, 0, number)


@contextmanager
def relayed(
    frames: Attack = honest, beats: Attack = honest, silence_s: float = 1.0
) -> Iterator[tuple[Peers, Peers]]:
    """Yield two peers; what the first sends passes through the relay."""
    one, two = (
        Peers(name, "127.0.0.1:0", SECRET, silence_s=silence_s, coded=True)
        for name in ("one", "two")
    )
    relay = Relay(two.address, frames, beats)
    try:
        one.connect({"two": relay.address}, 5.0)
        two.connect({"one": ""}, 5.0)
        yield one, two
    finally:
        one.close()
        two.close()
        relay.close()


def content(number: int) -> np.ndarray:
    size = SIZES[number % len(SIZES)]
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def test_what_is_sent_with_codes_arrives_as_it_was():
    with relayed() as (one, two):
        for number in range(2 * len(SIZES)):
            one.send("two", key(number), np.array_split(content(number), 3))
            two.send("one", key(number), [content(number)])
        for number in range(2 * len(SIZES)):
            found = two.mailbox.receive("one", key(number))
            np.testing.assert_array_equal(found, content(number))
            np.testing.assert_array_equal(
                one.mailbox.receive("two", key(number)), found
            )


def loss_of(peers: Peers) -> str:
    """Return who is lost, and why; fail if that takes long."""
    end_s = time.monotonic() + 25.0
    while time.monotonic() < end_s:
        try:
            peers.mailbox.check()
        except PeerLost as lost:
            return str(lost)
        time.sleep(0.02)
    pytest.fail("nobody is lost")


def changed(at: int) -> Attack:
    def attack(number: int, frames: Sequence[bytes]) -> Sequence[bytes]:
        frame = bytearray(frames[-1])
        if number == 1:
            frame[at] ^= 1
        return [bytes(frame)]

    return attack


def injected(number: int, frames: Sequence[bytes]) -> Sequence[bytes]:
    """Add a forged frame after the first one, with a made-up code."""
    if number != 1:
        return frames[-1:]
    header = HEADER.pack(*NEVER, 3) + secrets.token_bytes(CODE_BYTES)
    return [header + b"abc" + secrets.token_bytes(CODE_BYTES), frames[-1]]


def of_another_length(number: int, frames: Sequence[bytes]) -> Sequence[bytes]:
    """Send a length that would make the other side wait for everything that follows."""
    if number != 1:
        return frames[-1:]
    *numbers, _ = HEADER.unpack(frames[-1][: HEADER.size])
    return [HEADER.pack(*numbers, 1 << 40) + frames[-1][HEADER.size :]]


ATTACKS: dict[str, Attack] = {
    "changed key": changed(0),
    "changed code of the header": changed(HEADER.size),
    "changed first byte": changed(HEADER.size + CODE_BYTES),
    "changed last byte": changed(-CODE_BYTES - 1),
    "changed code": changed(-1),
    "injected": injected,
    "length": of_another_length,
    "dropped": lambda number, frames: [] if number == 1 else frames[-1:],
    "replayed": lambda number, frames: [frames[-1]] * (2 if number == 1 else 1),
    "replayed later": lambda number, frames: (
        [frames[0], frames[-1]] if number == 2 else frames[-1:]
    ),
    "swapped": lambda number, frames: (
        [] if number == 1 else frames[:0:-1] if number == 2 else frames[-1:]
    ),
}


@pytest.mark.parametrize("size", [5, (2 << 20) + 1])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_frame_that_was_not_sent_so_loses_the_peer(name: str, size: int):
    with relayed(ATTACKS[name]) as (one, two):
        for number in range(4):
            one.send("two", key(number), [np.full(size, number, np.uint8)])
        assert "'one' sent a message that failed authentication" in loss_of(two)
        for number in range(4):  # only what was sent, if anything
            if two.mailbox.has("one", key(number)):
                assert set(two.mailbox.pop("one", key(number))) == {number}
        assert not two.mailbox.has("one", NEVER)


@pytest.mark.parametrize(
    "attack",
    [
        lambda number, beats: [beats[0]],  # the first again and again
        lambda number, beats: [] if number == 1 else beats[-1:],
        lambda number, beats: [secrets.token_bytes(24)],
        lambda number, beats: [bytes(24 * 40)],
    ],
)
def test_beats_that_were_not_sent_so_keep_nobody_alive(attack: Attack):
    begin_s = time.monotonic()
    with relayed(beats=attack, silence_s=0.3) as (_, two):
        assert "'one' gave no sign of life" in loss_of(two)
    assert time.monotonic() - begin_s < 30.0


def test_beats_with_codes_are_heard():
    with relayed() as (one, two):
        time.sleep(3.0)  # the silence limit is a second here
        one.mailbox.check()
        two.mailbox.check()


def test_a_recorded_handshake_lets_nobody_in():
    """A relay that recorded all of it calls again with the same bytes."""
    heard: list[bytes] = []

    class Recording(Relay):
        def _there(self, caller: socket.socket, called: socket.socket) -> None:
            heard.append(caller.recv(1 << 16))
            called.sendall(heard[-1])
            heard.append(caller.recv(1 << 16))
            called.sendall(heard[-1])

    admitted: list[str] = []
    door = Listener(
        "two", "127.0.0.1:0", SECRET, lambda ends, name, number: admitted.append(name)
    )
    relay = Recording(door.address)
    dial(relay.address, "one", "two", SECRET).close()
    assert wait_for(lambda: admitted == ["one"])
    for greeting, proof in (heard[:2], heard[2:4]):
        found = connected(door.address)
        found.sendall(greeting)
        assert found.recv(1 << 16)
        found.sendall(proof)
        assert found.recv(1) == b""
        found.close()
    assert admitted == ["one"]
    relay.close()
    door.close()


def connected(address: str) -> socket.socket:
    found = socket_for(address)
    found.settimeout(5.0)
    found.connect(endpoint(address))
    return found


def wait_for(is_so: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 5.0
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.01)
    return is_so()


NAMES, NONCE = 2 * _NAME_BYTES, _NONCE_BYTES
PLACES = (0, _NAME_BYTES, NAMES, NAMES + NONCE, NAMES + NONCE + 7)
PLACES += tuple(NAMES + NONCE + after for after in (8, 9, 10, 25))  # the last one


@pytest.mark.parametrize("at", PLACES)
def test_no_word_of_a_greeting_can_be_changed(at: int):
    """Names, nonce, incarnation, purpose, codes or not, pair: all are authenticated."""

    class Changing(Relay):
        def _there(self, caller: socket.socket, called: socket.socket) -> None:
            greeting = bytearray(caller.recv(1 << 16))
            greeting[at] ^= 1
            called.sendall(greeting)
            with suppress(OSError):
                called.sendall(caller.recv(1 << 16))

    admitted: list[str] = []
    door = Listener(
        "two", "127.0.0.1:0", SECRET, lambda ends, name, number: admitted.append(name)
    )
    relay = Changing(door.address)
    with pytest.raises(HandshakeRefused):
        dial(relay.address, "one", "two", SECRET)
    assert not admitted
    relay.close()
    door.close()


def test_only_what_leaves_the_machine_needs_codes():
    door, address = listen("127.0.0.1:0")
    found = connected(address)
    assert stays_here(found)
    found.close()
    door.close()
    admitted: list[tuple[Ends, str, int]] = []
    listener = Listener("two", "127.0.0.1:0", SECRET, lambda *one: admitted.append(one))
    for coded in (None, True, False):
        ends = dial(listener.address, "one", "two", SECRET, 0, coded)
        assert wait_for(lambda: len(admitted) == 1)
        theirs, *_ = admitted.pop()
        for mine, other in (
            (ends.message_keys, theirs.message_keys),
            (ends.pulse_keys, theirs.pulse_keys),
        ):
            if coded:
                assert mine is not None and other is not None
                assert (mine.sends, mine.takes) == (other.takes, other.sends)
                assert mine.sends != mine.takes
            else:
                assert mine is None and other is None
        ends.close()
        theirs.close()
    listener.close()
