# SPDX-License-Identifier: Apache-2.0
"""Attacks listening sockets: names, lengths, replies, starts, frames, descriptors.

Each attack uses the sockets of a controller and of workers, over TCP. Does not own the
relay between two of them (`tests/comm/relay.py`).
"""

import os
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from experiments.attacks.attack import Attack, Outcome, unless
from hetjax.comm.addresses import endpoint
from hetjax.comm.handshake import _HANDSHAKE_S, HandshakeRefused, StaleIncarnation
from hetjax.comm.peers import Peers
from hetjax.runtime.rpc.message import AnyRequest
from hetjax.runtime.rpc.schema import Compile, Done
from hetjax.runtime.rpc.worker_connections import (
    ControllerConnection,
    SocketConnections,
    WorkerLost,
)
from tests.comm.test_forged import NEVER, injected, key, loss_of, relayed

LOCAL = "127.0.0.1:0"
_SLOW, _PAUSE_S, _JOIN_S = 50, 1.0, 20.0
_NAMES = ("..", "../../x", "a\0b", "a" * 65, "")
Hear = Callable[[ControllerConnection, int, AnyRequest], None]


@contextmanager
def controller() -> Iterator[tuple[SocketConnections, bytes]]:
    secret = secrets.token_bytes(32)
    connections = SocketConnections(LOCAL, secret)
    try:
        yield connections, secret
    finally:
        connections.close()


def calling(
    to: SocketConnections, secret: bytes, name: str, hear: Hear, start: int = 0
) -> ControllerConnection:
    """Return a worker that handles requests with `hear`."""
    own: list[ControllerConnection] = []
    found = ControllerConnection(
        to.address,
        name,
        secret,
        lambda number, request: hear(own[0], number, request),
        lambda reason: None,
        incarnation=start,
    )
    own.append(found)
    return found


def honest(own: ControllerConnection, number: int, request: AnyRequest) -> None:
    own.send(number, Done(epoch=request.epoch))


def babbling(own: ControllerConnection, number: int, request: AnyRequest) -> None:
    own._socket.send((0, number, 0, 0, 0, 0), [np.frombuffer(b"{no", np.uint8)])


def is_asked(connections: SocketConnections, worker: str) -> bool:
    """Whether the worker is connected and answers."""
    connections.wait_for([worker])
    return worker in connections.ask({worker: Compile()})


def hostile_names(folder: Path) -> Outcome:
    refused = 0
    with controller() as (connections, secret):
        worker = calling(connections, secret, "honest", honest)
        for name in _NAMES:
            with suppress(HandshakeRefused, OSError, ValueError):
                calling(connections, secret, name, honest).close()
                continue
            refused += 1
        answers = is_asked(connections, "honest")
        names = connections.workers
        worker.close()
    wrong = unless(
        all_are_refused=refused == len(_NAMES),
        nobody_else_is_there=names == ["honest"],
        the_honest_worker_is_asked=answers,
    )
    return Outcome(happened=f"{refused} of {len(_NAMES)} names refused", wrong=wrong)


def impossible_messages(folder: Path) -> Outcome:
    """Send a reply that is no JSON, and a frame of 2^62 bytes."""
    reasons = []
    with controller() as (connections, secret):
        workers = [calling(connections, secret, "babbles", babbling)]
        workers.append(calling(connections, secret, "long", _too_long))
        workers.append(calling(connections, secret, "honest", honest))
        for name in ("babbles", "long"):
            connections.wait_for([name])
            try:
                connections.ask({name: Compile()})
            except WorkerLost as lost:
                reasons.append(str(lost))
        answers = is_asked(connections, "honest")
        for worker in workers:
            worker.close()
    wrong = unless(both_are_lost=len(reasons) == 2, the_other_is_asked=answers)
    return Outcome(happened="; ".join(reasons), wrong=wrong)


def _too_long(own: ControllerConnection, number: int, request: AnyRequest) -> None:
    frame = struct.pack("<6IQ", 0, number, 0, 0, 0, 0, 1 << 62)
    own._socket._socket.sendall(frame)


def second_caller(folder: Path) -> tuple[str, tuple[str, ...]]:
    """Call with a newer start of a worker while the first is there; then an older."""
    with controller() as (connections, secret):
        first = calling(connections, secret, "a", honest, start=1)
        before = is_asked(connections, "a")
        second = calling(connections, secret, "a", honest, start=2)
        first.close()
        after = is_asked(connections, "a")
        is_stale = False
        try:
            calling(connections, secret, "a", honest, start=1)
        except StaleIncarnation:
            is_stale = True
        still = is_asked(connections, "a")
        second.close()
    wrong = unless(
        the_first_start_is_asked=before,
        the_newer_one_is_asked=after,
        the_older_one_is_turned_away=is_stale,
        the_newer_one_stays=still,
    )
    return "the newer start counts, the older one is turned away", wrong


def injecting_relay(folder: Path) -> Outcome:
    """Inject a frame between two workers that use codes as between machines."""
    with relayed(injected) as (one, two):
        for number in range(4):
            one.send("two", key(number), [np.full(5, number, np.uint8)])
        reason = loss_of(two)
        took = two.mailbox.has("one", NEVER)
    wrong = unless(
        the_peer_is_lost="failed authentication" in reason, it_is_not_taken=not took
    )
    return Outcome(happened=reason, wrong=wrong)


def _joined(name: str, secret: bytes, two: Peers) -> bool:
    one = Peers(name, LOCAL, secret)
    joining = threading.Thread(target=two.connect, args=({name: one.address}, _JOIN_S))
    joining.start()
    try:
        one.connect({"two": two.address}, _JOIN_S)
        joining.join()
        return set(one.links) == {"two"}
    finally:
        one.close()


def full_door(folder: Path) -> Outcome:
    """Call while no descriptors are left; then make fifty slow handshakes."""
    secret = secrets.token_bytes(32)
    two, early = Peers("two", LOCAL, secret), socket.socket()
    with no_descriptors():
        early.connect(endpoint(two.address))  # the listener cannot accept it
        time.sleep(0.5)
    joins_later = _joined("late", secret, two)
    early.close()
    two.close()
    two = Peers("two", LOCAL, secret)
    slow = [_calling(two.address) for _ in range(_SLOW)]
    over, begin_s = threading.Event(), time.monotonic()
    threading.Thread(target=_trickle, args=(slow, over), daemon=True).start()
    joins_beside = _joined("honest", secret, two)
    num_open = _open_until(slow, begin_s + 2 * _HANDSHAKE_S)
    took_s = time.monotonic() - begin_s
    over.set()
    for found in slow:
        found.close()
    two.close()
    wrong = unless(
        an_honest_worker_joins_once_there_are_descriptors=joins_later,
        one_joins_beside_fifty_slow_ones=joins_beside,
        all_slow_ones_are_cut_off=num_open == 0,
    )
    happened = f"{_SLOW - num_open} of {_SLOW} cut off within {took_s:.0f} s"
    return Outcome(happened=happened, wrong=wrong, seconds=round(took_s, 1))


def _calling(address: str) -> socket.socket:
    found = socket.socket()
    found.connect(endpoint(address))
    return found


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more in this context."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    most = max(map(int, os.listdir("/proc/self/fd"))) + 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _trickle(slow: list[socket.socket], over: threading.Event) -> None:
    while not over.wait(_PAUSE_S):
        for found in slow:
            with suppress(OSError):
                found.sendall(b"x")


def _open_until(slow: list[socket.socket], end_s: float) -> int:
    """Return how many are still open at `end_s`; return earlier once none is."""
    waiting = list(slow)
    for found in waiting:
        found.setblocking(False)
    while waiting and time.monotonic() < end_s:
        waiting = [found for found in waiting if _is_open(found)]
        time.sleep(0.1)
    return len(waiting)


def _is_open(found: socket.socket) -> bool:
    try:
        return found.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


LISTENING = (
    Attack(
        finding="F4",
        done="a worker answers what is no JSON, another with a frame of 2^62 bytes",
        expected="both are lost with the reason, a third is asked on",
        act=impossible_messages,
    ),
    Attack(
        finding="F8",
        done="a relay on a live TCP link between two workers adds a frame of its own",
        expected="the frame is not taken, the peer is lost",
        act=injecting_relay,
    ),
    Attack(
        finding="F10",
        done="a caller comes when no descriptor is left; then fifty shake hands slowly",
        expected="honest workers join, slow ones are cut off after 30 s, none is left",
        act=full_door,
    ),
)
