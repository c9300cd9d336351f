# SPDX-License-Identifier: Apache-2.0
"""Of several starts of a worker the newest counts, in whatever order they arrive."""

import queue
import secrets
import time
from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest

from hetjax.comm.door import Listener
from hetjax.comm.frames import Key
from hetjax.comm.handshake import PULSES, Ends, StaleIncarnation, _dialled, dial
from hetjax.comm.peers import PeerLost, Peers

SECRET = secrets.token_bytes(32)
KEY: Key = (1, 2, 3, 4, 5, 6)
Admitted = queue.Queue[tuple[Ends, str, int]]


@pytest.fixture
def door() -> Iterator[tuple[Listener, Admitted]]:
    admitted: Admitted = queue.Queue()
    found = Listener("two", "127.0.0.1:0", SECRET, lambda *caller: admitted.put(caller))
    yield found, admitted
    found.close()


def test_an_older_start_is_told_that_a_newer_one_has_its_place(
    door: tuple[Listener, Admitted],
):
    listener, admitted = door
    newer = dial(listener.address, "one", "two", SECRET, 2)
    theirs, name, incarnation = admitted.get(timeout=5)
    assert (name, incarnation) == ("one", 2)
    with pytest.raises(StaleIncarnation, match="a newer start of 'one'"):
        dial(listener.address, "one", "two", SECRET, 1)
    assert admitted.empty()
    other = dial(listener.address, "three", "two", SECRET, 0)  # the rule is per worker
    assert admitted.get(timeout=5)[1:] == ("three", 0)
    newer.messages.sendall(b"x")
    theirs.messages.settimeout(5)
    assert theirs.messages.recv(1) == b"x"  # and the newer one is intact
    for ends in (newer, theirs, other):
        ends.close()


@pytest.mark.parametrize("order", [*permutations((1, 2, 3))])
def test_whatever_the_order_the_newest_is_let_in_last(
    door: tuple[Listener, Admitted], order: tuple[int, ...]
):
    listener, admitted = door
    for incarnation in order:
        try:
            dial(listener.address, "one", "two", SECRET, incarnation).close()
        except StaleIncarnation:
            assert incarnation < max(order[: order.index(incarnation)])
            continue
        ends, _, number = admitted.get(timeout=5)
        assert number == incarnation
        ends.close()
    assert number == 3


@pytest.mark.parametrize("is_late", [False, True])
def test_the_end_of_an_older_start_is_no_loss_of_the_newer(is_late: bool):
    """Late: the old link ends itself, once the newer exists, before it is cut off."""
    two = Peers("two", "127.0.0.1:0", SECRET)
    first = Peers("one", "127.0.0.1:0", SECRET, incarnation=1)
    second = Peers("one", "127.0.0.1:0", SECRET, incarnation=2)
    first.connect({"two": two.address}, 5.0)
    two.connect({"one": ""}, 5.0)
    old = two.links["one"]
    cut_off = old.close
    if is_late:
        old.close = lambda: None
    second.connect({"two": two.address}, 5.0)
    end_s = time.monotonic() + 5
    while two.links["one"] is old:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    if not is_late:
        with pytest.raises(PeerLost):  # it hears that it was replaced
            first.mailbox.receive("two", KEY)
    first.close()
    if is_late:
        assert old._closing.wait(5)
        cut_off()
    second.send("two", KEY, [np.arange(3)])
    assert two.mailbox.receive("one", KEY).view(np.int64).tolist() == [0, 1, 2]
    two.mailbox.check()
    second.close()
    with pytest.raises(PeerLost, match="'one' left"):
        two.mailbox.receive("one", (0, 0, 0, 0, 0, 0))
    two.close()


def test_half_a_link_of_an_older_start_joins_with_nothing(
    door: tuple[Listener, Admitted],
):
    """It passed the door just before the newer start."""
    listener, admitted = door
    about = "one", "two", 1, PULSES, bytes(16)
    half, _ = _dialled(listener.address, SECRET, about, None)
    newer = dial(listener.address, "one", "two", SECRET, 2)
    theirs, _, incarnation = admitted.get(timeout=5)
    assert incarnation == 2
    half.settimeout(5)
    assert half.recv(1) == b""
    for found in (newer, theirs, half):
        found.close()
