# SPDX-License-Identifier: Apache-2.0
"""Workers that wait for each other's calls, and for workers that never call."""

import secrets
import threading
from collections.abc import Callable, Iterator

import pytest

from hetjax.comm.peers import PeerLost, Peers

SECRET = secrets.token_bytes(32)
_LONG_S = 60.0  # no wait may take this long


@pytest.fixture
def waiting() -> Iterator[tuple[Peers, Peers]]:
    """Two peers: "one" calls "two", which also waits for a call from "absent"."""
    found = tuple(Peers(name, "127.0.0.1:0", SECRET) for name in ("one", "two"))
    yield found[0], found[1]
    for peers in found:
        peers.close()


def connecting(two: Peers, one: Peers) -> Callable[[], Exception]:
    """Let "two" wait; return a function that returns the error that ends the wait."""
    ended = list[Exception]()

    def connect() -> None:
        addresses = {"one": one.address, "absent": "127.0.0.1:1"}
        try:
            two.connect(addresses, _LONG_S)
        except PeerLost as lost:
            ended.append(lost)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()

    def awaited() -> Exception:
        thread.join(_LONG_S / 4)
        assert not thread.is_alive(), "it waits for somebody who never calls"
        return ended[0]

    return awaited


def test_a_loss_that_others_report_ends_the_wait_for_calls(
    waiting: tuple[Peers, Peers],
):
    one, two = waiting
    awaited = connecting(two, one)
    one.connect({"two": two.address}, _LONG_S)
    two.lose("absent", "was killed")
    lost = awaited()
    assert isinstance(lost, PeerLost) and lost.peer == "absent"
    assert lost.reason == "was killed"


def test_a_peer_that_goes_again_ends_the_wait_for_calls(waiting: tuple[Peers, Peers]):
    one, two = waiting
    awaited = connecting(two, one)
    one.connect({"two": two.address}, _LONG_S)
    one.close()
    lost = awaited()
    assert isinstance(lost, PeerLost) and lost.peer == "one"
