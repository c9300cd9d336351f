# SPDX-License-Identifier: Apache-2.0
"""Connects a controller and its workers by sockets, for requests and answers.

Owns the connections, and waiting for the end of a round. A side that sends an invalid
message, or one that it may not send now, counts as lost, like one that has ended.
Does not own the conclusions from messages (`rounds.py`), the messages (`schema.py`),
nor their meaning (`runtime/worker/`, `runtime/control/`).
"""

import itertools
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from hetjax.comm.connections import SILENCE_S, Connection
from hetjax.comm.door import Listener
from hetjax.comm.frames import Key
from hetjax.comm.handshake import Ends, dial
from hetjax.comm.tls import Tls
from hetjax.errors import BadInput
from hetjax.runtime.rpc import rounds, schema
from hetjax.runtime.rpc.encoding import decode, encode
from hetjax.runtime.rpc.limits import WATCHDOG_FACTOR
from hetjax.runtime.rpc.message import LIMITS, START, AnyRequest, answer_of
from hetjax.runtime.rpc.rounds import Rounds

CONTROLLER = "controller"
Answer = TypeVar("Answer", bound=schema.Message)
Progress = Callable[[str, schema.Compiling], None]  # worker, its progress

Record = Callable[[rounds.Event, float, Sequence[rounds.Action]], None]

_LOOK_S = 0.5  # interval of the checks for a passed limit or an interrupt
_CALL_S = 0.1  # the same while workers start, which may end silently


class WorkerLost(ConnectionError):
    """A worker is gone, or failed; the others have left the step and wait.

    `reports` has the answers of the survivors, by worker. A worker that `has_failed`
    had an error itself.
    """

    def __init__(
        self,
        worker: str,
        reason: str,
        reports: Mapping[str, schema.Message] | None = None,
        has_failed: bool = False,
    ) -> None:
        super().__init__(f"worker {worker!r} {reason}")
        self.worker, self.reason, self.reports = worker, reason, dict(reports or {})
        report = self.reports.get(worker)
        self.has_failed = has_failed or isinstance(report, schema.RequestFailed)


class WorkerConnections(Protocol):
    """A controller's connections to its workers, by name: sockets, or in this process.

    Requests are sent with `epoch`, which the code that connects workers increments.
    `noticed` is called, from any thread, when a worker reports that its machine is
    about to be taken away.
    """

    epoch: int
    noticed: Callable[[str, schema.Noticed], None]

    @property
    def only(self) -> str | None:
        """The one worker that has all nodes, if it is in this process."""
        ...

    @property
    def workers(self) -> Sequence[str]:
        """The workers that can receive requests."""
        ...

    def ask(
        self,
        requests: Mapping[str, schema.Request[Answer]],
        progress: Progress | None = None,
    ) -> dict[str, Answer]:
        """Send several workers the same kind of request and return their answers.

        Raises WorkerLost once no other worker is busy with it, or the BadInput that a
        worker found.
        """
        ...

    def lose(self, worker: str, reason: str) -> None:
        """Count a worker as lost, whatever its connection says."""
        ...

    def interrupted_by(
        self, interrupt: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Let `interrupt` end waits in here by raising an error."""
        ...


class ControllerConnection:
    """A worker's connection to its controller; passes all requests to `on_request`."""

    def __init__(
        self,
        address: str,
        own: str,
        secret: bytes,
        on_request: Callable[[int, AnyRequest], None],
        gone: Callable[[str], None],
        silence_s: float = SILENCE_S,
        incarnation: int = 0,
        tls: Tls | None = None,
    ) -> None:
        def deliver(peer: str, key: Key, data: np.ndarray) -> None:
            on_request(key[1], decode(data, schema.Request))

        found = dial(address, own, CONTROLLER, secret, incarnation, tls=tls)
        lost = lambda peer, reason: gone(reason)  # noqa: E731
        self._socket = Connection(found, CONTROLLER, deliver, lost, silence_s)

    def send(self, number: int, message: schema.Message) -> None:
        """Answer the request of this number, or report its progress; 0: unsolicited."""
        self._socket.send(_key(number), [encode(message)])

    def close(self) -> None:
        self._socket.close()


class SocketConnections:
    """A controller's sockets to its workers, by name.

    The controller's own thread handles incoming events, one after the other. `record`
    is called with each event, the time and the resulting actions.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        silence_s: float = SILENCE_S,
        timeout_scale: float = 1.0,
        watchdog_factor: float = WATCHDOG_FACTOR,
        tls: Tls | None = None,
        record: Record = lambda event, now_s, actions: None,
    ) -> None:
        self._silence_s, self._record = silence_s, record
        self._state = Rounds(
            timeout_scale=timeout_scale, watchdog_factor=watchdog_factor
        )
        # no SimpleQueue: its get waits for ever if a signal comes as the time is up
        self._events = queue.Queue[rounds.Event | _Arrival]()
        self._sockets: dict[tuple[str, int], Connection] = {}
        self._admitted = itertools.count()
        self.only, self.epoch = None, 0
        self._interrupt: Callable[[], None] = lambda: None
        self._progress: Progress | None = None
        self._finished: rounds.Finish | None = None
        self.noticed: Callable[[str, schema.Noticed], None] = _nobody_listens
        self._listener = Listener(CONTROLLER, address, secret, self._admit, tls)
        self.address = self._listener.address

    @property
    def workers(self) -> list[str]:
        self._catch_up()
        return [*self._state.there]

    def expect(self, worker: str, incarnation: int) -> None:
        """Admit no earlier start of the worker any more: this one is on its way."""
        self._events.put(rounds.Spawned(worker, incarnation))

    def wait_for(
        self,
        workers: Sequence[str],
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until the workers have called; `alive` may raise if they never will."""
        begun_s = time.monotonic()
        while not self.have_called(workers, begun_s, alive):
            self._interrupt()
            self._handle_next(_CALL_S)

    def have_called(
        self, workers: Sequence[str], begun_s: float, alive: Callable[[], None]
    ) -> bool:
        """Return whether the workers have called; `alive` may raise if they never will.

        Raises WorkerLost if one takes too long.
        """
        limit_s = self._state.limit_s(START)
        there = self.workers
        missing = [name for name in workers if name not in there]
        if not missing:
            return True
        alive()
        if time.monotonic() > begun_s + limit_s:
            raise WorkerLost(missing[0], LIMITS[START].passed(limit_s))
        return False

    @contextmanager
    def interrupted_by(self, interrupt: Callable[[], None]) -> Iterator[None]:
        before, self._interrupt = self._interrupt, interrupt
        try:
            yield
        finally:
            self._interrupt = before

    def ask(
        self,
        requests: Mapping[str, schema.Request[Answer]],
        progress: Progress | None = None,
    ) -> dict[str, Answer]:
        """Send the requests; if a worker is lost or fails, tell the others to abort."""
        if not requests:
            return {}
        (what,) = {type(request) for request in requests.values()}
        asked = {w: replace(r, epoch=self.epoch) for w, r in requests.items()}
        self._catch_up()
        self._finished, self._progress = None, progress
        self._handle(rounds.Asked(asked))
        while self._finished is None:
            self._interrupt()
            self._handle_next(_LOOK_S)
            self._handle(rounds.TimePassed())
        return answers_of(self._finished, what)

    def lose(self, worker: str, reason: str) -> None:
        """Count a worker as lost; may be called from any thread."""
        self._events.put(rounds.TakenForLost(worker, reason))

    def close(self) -> None:
        """End all connections; workers then end themselves."""
        self._listener.close()
        self._catch_up()  # also end those that have just called
        for found in [*self._sockets.values()]:
            found.close()

    def _catch_up(self) -> None:
        """Handle all events that have arrived."""
        while not self._events.empty():
            self._handle(self._events.get())

    def _handle_next(self, limit_s: float) -> None:
        """Handle the next event, unless none arrives within the limit."""
        with suppress(queue.Empty):
            self._handle(self._events.get(timeout=limit_s))

    def _handle(self, event: "rounds.Event | _Arrival") -> None:
        if isinstance(event, _Arrival):
            self._connect(event.ends, event.called.worker, event.called.connection)
            event = event.called
        elif isinstance(event, rounds.Ended):
            self._sockets.pop((event.worker, event.connection), None)
        now_s = time.monotonic()
        self._state, actions = rounds.react(event, self._state, now_s)
        self._record(event, now_s, actions)
        for action in actions:
            self._do(action)

    def _do(self, action: rounds.Action) -> None:
        if isinstance(action, rounds.Send):
            found = self._sockets.get((action.worker, action.connection))
            if found is not None:
                found.send(_key(action.number), [encode(action.request)])
        elif isinstance(action, rounds.Close):
            found = self._sockets.pop((action.worker, action.connection), None)
            if found is not None:  # saying goodbye may take long
                threading.Thread(target=found.close, daemon=True).start()
        elif isinstance(action, rounds.ReportProgress):
            if self._progress is not None:
                self._progress(action.worker, action.message)
        else:
            self._finished = action

    def _deliver(
        self, connection: int, worker: str, key: Key, data: np.ndarray
    ) -> None:
        """Handle a message on the connection's thread; an error loses the worker."""
        message, number = decode(data, schema.Message), key[1]
        if isinstance(message, schema.Warned):
            return warnings.warn(f"worker {worker}: {message.text}", stacklevel=1)
        if isinstance(message, schema.Noticed):
            return self.noticed(worker, message)
        self._events.put(rounds.Heard(worker, connection, number, message))

    def _admit(self, found: Ends, worker: str, incarnation: int) -> None:
        """Pass on a caller; the listener's threads admit no older start after a newer.

        So the order of these calls distinguishes starts, even those of the same number.
        """
        called = rounds.Called(worker, next(self._admitted), incarnation)
        self._events.put(_Arrival(found, called))

    def _connect(self, found: Ends, worker: str, connection: int) -> None:
        self._sockets[worker, connection] = Connection(
            found,
            worker,
            partial(self._deliver, connection),
            lambda _, reason: self._events.put(
                rounds.Ended(worker, connection, reason)
            ),
            self._silence_s,
        )


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A worker that has called, and whose messages are not read yet."""

    ends: Ends
    called: rounds.Called


def answers_of(
    finished: rounds.Finish, what: type[schema.Request[Answer]]
) -> dict[str, Answer]:
    """Return the answers of a round; raise what `WorkerConnections.ask` says."""
    kind, replies = answer_of(what), finished.replies
    if finished.trouble is None:
        return {w: m for w, m in replies.items() if isinstance(m, kind)}
    for worker, message in replies.items():
        if isinstance(message, schema.RequestRefused):
            got = f"{message.got} (worker {worker})"
            raise BadInput(got=got, allowed=message.allowed, fix=message.fix)
    raise WorkerLost(*finished.trouble, replies)


def _nobody_listens(worker: str, notice: schema.Noticed) -> None:
    when = f"takes its machine away in {notice.grace_s:g} s"
    text = f"worker {worker}: {notice.source} {when}, but nothing handles this notice"
    warnings.warn(text, stacklevel=1)


def _key(number: int) -> Key:
    return 0, number, 0, 0, 0, 0
