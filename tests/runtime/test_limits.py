# SPDX-License-Identifier: Apache-2.0
"""Hanging workers: every wait of the controller has a limit and names its subject."""

import os
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetjax.comm.handshake import StaleIncarnation
from hetjax.runtime.rpc.encoding import kinds
from hetjax.runtime.rpc.message import LIMITS, START, AnyRequest, Limit
from hetjax.runtime.rpc.rounds import Action, Send
from hetjax.runtime.rpc.schema import (
    Abort,
    Address,
    AwaitSaved,
    ClockTime,
    Compile,
    Compiling,
    Done,
    Leave,
    Listen,
    Lost,
    Message,
    Request,
    Train,
)
from hetjax.runtime.rpc.worker_connections import (
    ControllerConnection,
    SocketConnections,
    WorkerLost,
)

SECRET = secrets.token_bytes(32)
LIMIT_S = 0.4
Hear = Callable[[ControllerConnection, int, AnyRequest], None]
TRAIN = Train(step=0, turn=0, traced=False)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in LIMITS.items():
        monkeypatch.setitem(LIMITS, name, Limit(LIMIT_S, limit.what))


@contextmanager
def connections_of(
    workers: Mapping[str, Hear], timeout_scale: float = 1.0
) -> Iterator[SocketConnections]:
    """Yield the connections to workers in this process with these request handlers."""
    connections = SocketConnections("127.0.0.1:0", SECRET, timeout_scale=timeout_scale)
    workers_: dict[str, ControllerConnection] = {}
    try:
        for name, hear in workers.items():
            heard = lambda n, message, w=name, h=hear: h(workers_[w], n, message)  # noqa: E731
            workers_[name] = ControllerConnection(
                connections.address, name, SECRET, heard, lambda reason: None
            )
        connections.wait_for(list(workers))
        yield connections
    finally:
        for connection in workers_.values():
            with suppress(OSError):
                connection.close()
        connections.close()


def waits(connection: ControllerConnection, number: int, message: AnyRequest) -> None:
    """Wait for a peer, as in a step; answer once the request is aborted."""
    if isinstance(message, Abort):
        lost = Lost(worker=message.worker, reason=message.reason, epoch=message.epoch)
        connection.send(number, lost)


def answers(connection: ControllerConnection, number: int, message: AnyRequest) -> None:
    connection.send(number, Done(epoch=message.epoch))


def hangs(connection: ControllerConnection, number: int, message: AnyRequest) -> None:
    """Send heartbeats and do nothing else."""


def test_there_is_a_limit_for_all_that_is_asked_and_for_nothing_else():
    requests = {kind for kind in kinds().values() if issubclass(kind, Request)}
    assert requests | {START} == LIMITS.keys()
    assert all(limit.seconds >= 60 for limit in TABLE.values())


TABLE = dict(LIMITS)  # before tests change it


@pytest.mark.parametrize("request_", [Compile(), TRAIN, AwaitSaved(), Leave()])
def test_who_does_not_answer_is_lost_and_those_that_wait_for_it_are_not(
    request_: AnyRequest,
):
    with connections_of({"a": waits, "b": hangs, "c": waits}) as connections:
        begin_s = time.monotonic()
        with pytest.raises(WorkerLost) as told:
            connections.ask(dict.fromkeys("abc", request_))
        assert time.monotonic() - begin_s < 2 * LIMIT_S + 1.5
        assert told.value.worker == "b"
        reason = f"took more than {LIMIT_S:g} s to {LIMITS[type(request_)].what}"
        assert told.value.reason.startswith(reason)
        assert sorted(told.value.reports) == ["a", "c"] == sorted(connections.workers)


def test_who_answers_before_the_others_are_asked_has_answered(
    monkeypatch: pytest.MonkeyPatch,
):
    heard, done = threading.Event(), SocketConnections._do

    def slowly(connections: SocketConnections, action: Action):
        done(connections, action)
        is_first = isinstance(action, Send) and action.worker == "a"
        assert not is_first or heard.wait(10)

    def deliver(connections: SocketConnections, *message: Any):
        delivered(connections, *message)
        heard.set()

    delivered = SocketConnections._deliver
    monkeypatch.setattr(SocketConnections, "_do", slowly)
    monkeypatch.setattr(SocketConnections, "_deliver", deliver)
    with connections_of(dict.fromkeys("abc", answers)) as connections:
        told = connections.ask(dict.fromkeys("abc", Compile()))
        assert told == dict.fromkeys("abc", Done(epoch=connections.epoch))


def test_where_all_wait_for_each_other_one_is_named_and_none_is_cut_off():
    with connections_of({"a": waits, "b": waits}) as connections:
        with pytest.raises(WorkerLost, match="'a' took more than 0.4 s to train a"):
            connections.ask(dict.fromkeys("ab", TRAIN))
        assert sorted(connections.workers) == ["a", "b"]


def test_patience_multiplies_the_limits():
    with connections_of({"a": answers, "b": hangs}, timeout_scale=4.0) as connections:
        begin_s = time.monotonic()
        with pytest.raises(WorkerLost, match="took more than 1.6 s .*--timeout-scale"):
            connections.ask(dict.fromkeys("ab", Compile()))
        assert time.monotonic() - begin_s > 4 * LIMIT_S


def test_who_never_calls_is_named_with_the_time():
    with connections_of({"a": answers}) as connections:
        with pytest.raises(WorkerLost, match="'b' took more than 0.4 s to start and"):
            connections.wait_for(["a", "b"])


def test_a_wait_ends_with_what_an_interruption_raises():
    def interrupt() -> None:
        raise KeyboardInterrupt

    with connections_of({"a": hangs}) as connections:
        with pytest.raises(KeyboardInterrupt), connections.interrupted_by(interrupt):
            connections.ask({"a": TRAIN})
        with pytest.raises(WorkerLost):
            connections.ask({"a": TRAIN})


def test_a_signal_that_is_handled_for_long_leaves_the_wait_its_end():
    def handle(number: int, frame: object) -> None:
        time.sleep(0.3)  # longer than what is left of any poll

    before, begin_s = signal.signal(signal.SIGUSR1, handle), time.monotonic()
    try:
        with connections_of({"a": answers}) as connections:
            tell = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
            wake = threading.Timer(8.0, connections.lose, ("a", "it has waited"))
            tell.start()
            wake.start()
            with pytest.raises(WorkerLost, match="'b' took more than 0.4 s to start"):
                connections.wait_for(["a", "b"])
            wake.cancel()
            assert time.monotonic() - begin_s < 8.0
            tell.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_reply_that_is_no_json_loses_the_worker():
    def babbles(
        connection: ControllerConnection, number: int, message: AnyRequest
    ) -> None:
        connection._socket.send(
            (0, number, 0, 0, 0, 0), [np.frombuffer(b"{no", np.uint8)]
        )

    with connections_of({"a": babbles}) as connections:
        with pytest.raises(
            WorkerLost, match="'a' sent an unreadable message .*not JSON"
        ):
            connections.ask({"a": TRAIN})


@pytest.mark.parametrize(
    ("request_", "answer", "why"),
    [
        (Listen(), ClockTime(now_s=1.0, epoch=1), "ClockTime does not answer Listen"),
        (Listen(), Train(step=0, turn=0, traced=False, epoch=1), "Train does not"),
        (Listen(), Compiling(num_done=1, num_all=2, epoch=1), "Compiling does not"),
        (Listen(), Address(address="a:1", epoch=0), "Address has epoch 0, not 1"),
        (Compile(), Done(epoch=2), "Done has epoch 2, not 1"),
    ],
)
def test_an_answer_that_does_not_follow_from_what_was_asked_loses_the_worker(
    request_: AnyRequest, answer: Message, why: str
):
    def answers_so(
        connection: ControllerConnection, number: int, message: AnyRequest
    ) -> None:
        connection.send(number, answer)

    def answers_well(
        connection: ControllerConnection, number: int, message: AnyRequest
    ) -> None:
        told = Address(address="b:1") if isinstance(message, Listen) else Done()
        if not isinstance(message, Abort):
            connection.send(number, replace(told, epoch=message.epoch))

    with connections_of({"a": answers_so, "b": answers_well}) as connections:
        connections.epoch = 1
        with pytest.raises(WorkerLost, match=f"'a' sent an unreadable message .*{why}"):
            connections.ask(dict.fromkeys("ab", request_))
        assert connections.workers == ["b"]
        connections.ask({"b": request_})


@pytest.mark.parametrize("later", [0, 1])
def test_an_answer_that_nobody_asked_for_loses_the_worker(later: int):
    def answers_twice(
        connection: ControllerConnection, number: int, message: AnyRequest
    ) -> None:
        connection.send(number, Done())
        connection.send(number + later, Done())

    with connections_of({"a": answers_twice}) as connections:
        connections.ask({"a": Compile()})
        with pytest.raises(WorkerLost, match="Done answers no open request"):
            while True:
                connections.ask({"a": Leave()})


def test_an_answer_to_what_was_given_up_is_passed_over():
    first: list[int] = []

    def answers_late(
        connection: ControllerConnection, number: int, message: AnyRequest
    ) -> None:
        if not first:
            return first.append(number)
        connection.send(first[0], Address(address="late:1"))
        connection.send(number, Address(address="now:1"))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with connections_of({"a": answers_late}) as connections:
        with pytest.raises(KeyboardInterrupt), connections.interrupted_by(interrupt):
            connections.ask({"a": Listen()})
        assert connections.ask({"a": Listen()})["a"].address == "now:1"


@pytest.mark.parametrize("is_late", [False, True])
def test_the_end_of_an_older_start_of_a_worker_is_no_loss_of_the_newer(is_late: bool):
    """A new start comes during a request to the first one, and then the first one ends.

    If `is_late`, the first one ends by itself before the controller closes it.
    """
    ended: queue.Queue[str] = queue.Queue()
    connections = SocketConnections("127.0.0.1:0", SECRET)

    def worker(incarnation: int, heard: Callable) -> ControllerConnection:
        return ControllerConnection(
            connections.address, "a", SECRET, heard, ended.put, 10.0, incarnation
        )

    first = worker(1, lambda number, message: None)
    connections.wait_for(["a"])
    second: list[ControllerConnection] = []
    ((_, old),) = connections._sockets.items()
    cut_off = old.close
    if is_late:
        old.close = lambda: None

    def replace_it() -> None:
        heard = lambda number, message: answers(second[0], number, message)  # noqa: E731
        second.append(worker(2, heard))

    timer = threading.Timer(0.05, replace_it)
    timer.start()
    with pytest.raises(WorkerLost, match="'a' was started again"):
        connections.ask({"a": Compile()})
    timer.join()
    if not is_late:
        assert ended.get(timeout=5) == "left"  # told that it was replaced
    first.close()
    assert old._closing.wait(5)
    cut_off()
    assert connections.workers == ["a"]
    assert connections.ask({"a": Compile()}) == {"a": Done(epoch=connections.epoch)}
    with pytest.raises(StaleIncarnation):
        worker(1, lambda number, message: None)
    assert connections.ask({"a": Compile()}) == {"a": Done(epoch=connections.epoch)}
    second[0].close()
    connections.close()
