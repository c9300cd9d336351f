# SPDX-License-Identifier: Apache-2.0
"""How a controller and its workers talk: requests and their answers.

Owns matching answers with requests, refusing what does not follow from a request, and
noticing at once that one side is gone. A side that sends what is no message, or none
that it may send now, is lost like one that has ended. Does not own the messages
(`schema.py`), nor what they mean (`runtime/worker/`, `runtime/control/`).
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from hetjax.comm.connections import SILENCE_S, Connection
from hetjax.comm.door import Listener
from hetjax.comm.frames import Key
from hetjax.comm.handshake import Ends, dial
from hetjax.comm.tls import Tls
from hetjax.errors import BadInput
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.encoding import BadMessage, decode, encode

CONTROLLER = "controller"
Answer = TypeVar("Answer", bound=schema.Message)
Progress = Callable[[str, schema.Compiling], None]  # from whom, and how far it is

_LOOK_S = 0.5  # whether a limit has passed, or somebody interrupts


class WorkerLost(ConnectionError):
    """A worker is gone, or failed; the others have left the step and wait.

    `reports` has by worker what the survivors said.
    """

    def __init__(
        self,
        worker: str,
        reason: str,
        reports: Mapping[str, schema.Message] | None = None,
    ) -> None:
        super().__init__(f"worker {worker!r} {reason}")
        self.worker, self.reason, self.reports = worker, reason, dict(reports or {})


class WorkerConnections(Protocol):
    """A controller's connections to its workers, by name: sockets, or in this process.

    Requests are sent as of `epoch`, which whoever connects workers counts up. `noticed`
    is called, from any thread, when a worker tells that its machine is about to go.
    """

    epoch: int
    noticed: Callable[[str, schema.Noticed], None]

    @property
    def only(self) -> str | None:
        """The one worker that has all nodes, if it is in this process."""
        ...

    @property
    def workers(self) -> Sequence[str]:
        """Those who can be asked."""
        ...

    def ask(
        self,
        requests: Mapping[str, schema.Request[Answer]],
        progress: Progress | None = None,
    ) -> dict[str, Answer]:
        """Ask several workers the same kind of thing and return their answers.

        Raises WorkerLost once no other worker is busy with it, or the BadInput that a
        worker found.
        """
        ...

    def lose(self, worker: str, reason: str) -> None:
        """Take a worker for lost, whatever its connection says."""
        ...

    def interrupted_by(
        self, interrupt: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Let waits in here end with what this may raise."""
        ...


class ControllerConnection:
    """A worker's connection to its controller, which is `heard` with every request."""

    def __init__(
        self,
        address: str,
        own: str,
        secret: bytes,
        heard: Callable[[int, schema.AnyRequest], None],
        gone: Callable[[str], None],
        silence_s: float = SILENCE_S,
        incarnation: int = 0,
        tls: Tls | None = None,
    ) -> None:
        def deliver(peer: str, key: Key, data: np.ndarray) -> None:
            request = decode(data, schema.Request)
            if request.epoch < self._epoch:
                raise BadMessage(f"epoch {request.epoch} after epoch {self._epoch}")
            self._epoch = request.epoch
            heard(key[1], request)

        self._epoch = 0
        found = dial(address, own, CONTROLLER, secret, incarnation, tls=tls)
        lost = lambda peer, reason: gone(reason)  # noqa: E731
        self._socket = Connection(found, CONTROLLER, deliver, lost, silence_s)

    def send(self, number: int, message: schema.Message) -> None:
        """Answer the request of this number, or say how far it is; 0: unasked."""
        self._socket.send(_key(number), [encode(message)])

    def close(self) -> None:
        self._socket.close()


class SocketConnections:
    """A controller's sockets to its workers, by name.

    Every wait has its limit (`schema.py`) times `patience`.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        silence_s: float = SILENCE_S,
        patience: float = 1.0,
        tls: Tls | None = None,
    ) -> None:
        self._silence_s, self._patience = silence_s, patience
        self._interrupt: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._sockets: dict[str, Connection] = {}
        self._admitted: dict[str, int] = {}  # how many connections, by worker
        self._lost: dict[str, str] = {}
        self.only, self.epoch = None, 0
        self._number = 0  # of what was asked last
        self._asked: dict[str, schema.AnyRequest] = {}
        self._replies: dict[str, schema.Message] = {}
        self._progress: Progress | None = None
        self.noticed: Callable[[str, schema.Noticed], None] = _nobody_listens
        self._listener = Listener(CONTROLLER, address, secret, self._admit, tls)
        self.address = self._listener.address

    @property
    def workers(self) -> list[str]:
        with self._changed:
            return [name for name in self._sockets if self._is_there(name)]

    def wait_for(
        self,
        workers: Sequence[str],
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until they have called; `alive` may raise if they never will."""
        end_s = self._end_s(schema.START)
        with self._changed:
            while missing := [name for name in workers if not self._is_there(name)]:
                alive()
                self._interrupt()
                if time.monotonic() > end_s:
                    reason = schema.LIMITS[schema.START].passed(self._patience)
                    raise WorkerLost(missing[0], reason)
                self._changed.wait(0.1)

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
        """If one is lost or fails, the others are told to break off."""
        if not requests:
            return {}
        (what,) = {type(request) for request in requests.values()}
        asked = {w: replace(r, epoch=self.epoch) for w, r in requests.items()}
        with self._changed:
            self._number += 1
            # a copy, from which answers are taken while the others are still asked
            self._asked, self._replies = dict(asked), {}
            self._progress = progress
        for worker, request in asked.items():
            self._send(worker, request)
        return self._answers(list(asked), what)

    def lose(self, worker: str, reason: str) -> None:
        self._gone(worker, reason)
        found = self._sockets.get(worker)
        if found is not None:
            threading.Thread(target=found.close, daemon=True).start()

    def close(self) -> None:
        """End all connections; workers end themselves then."""
        self._listener.close()
        for found in self._sockets.values():
            found.close()

    def _is_there(self, worker: str) -> bool:
        return worker in self._sockets and worker not in self._lost

    def _answers(
        self, workers: Sequence[str], what: type[schema.Request[Answer]]
    ) -> dict[str, Answer]:
        there, trouble = self._waited(workers, what)
        kind = schema.answer_of(what)
        answers = {w: m for w, m in there.items() if isinstance(m, kind)}
        if trouble is None:
            return answers
        for message in there.values():
            if isinstance(message, schema.RequestRefused):
                raise BadInput(
                    got=message.got, allowed=message.allowed, fix=message.fix
                )
        raise WorkerLost(*trouble, {w: m for w, m in there.items() if m is not None})

    def _waited(
        self, workers: Sequence[str], what: type[schema.AnyRequest]
    ) -> tuple[dict[str, schema.Message | None], tuple[str, str] | None]:
        """The answers of all, once they are there, and the trouble if there was any.

        Past the limit all that have not answered are told to break off. Those that do
        have waited for another: who does not even do that is lost.
        """
        end_s, told = self._end_s(what), None
        with self._changed:
            while len(there := self._there(workers)) < len(workers):
                late = [worker for worker in workers if worker not in there]
                is_late = time.monotonic() > end_s
                if is_late and told is not None:
                    for worker in late:
                        self.lose(worker, schema.LIMITS[what].passed(self._patience))
                    continue
                trouble = _trouble(there, self._lost)
                if is_late and trouble is None:
                    trouble = late[0], schema.LIMITS[what].passed(self._patience)
                if trouble is not None and told is None:
                    told, end_s = trouble, max(end_s, self._end_s(schema.BreakOff))
                    lost, reason = trouble
                    for worker in late:
                        request = schema.BreakOff(
                            worker=lost, reason=reason, epoch=self.epoch
                        )
                        self._send(worker, request)
                self._interrupt()
                self._changed.wait(_LOOK_S)
        return there, _trouble(there, self._lost) or told

    def _end_s(self, what: type[schema.AnyRequest] | str) -> float:
        return time.monotonic() + self._patience * schema.LIMITS[what].seconds

    def _there(self, workers: Sequence[str]) -> dict[str, schema.Message | None]:
        """Answers by worker; None of one that is lost."""
        return {
            worker: self._replies.get(worker)
            for worker in workers
            if worker in self._lost or worker in self._replies
        }

    def _send(self, worker: str, request: schema.AnyRequest) -> None:
        found = self._sockets.get(worker)
        if found is not None:
            found.send(_key(self._number), [encode(request)])

    def _deliver(self, worker: str, key: Key, data: np.ndarray) -> None:
        """Called by the connection's thread; what this raises loses the worker."""
        message, number = decode(data, schema.Message), key[1]
        if isinstance(message, schema.Warned):
            return warnings.warn(f"worker {worker}: {message.text}", stacklevel=1)
        if isinstance(message, schema.Noticed):
            return self.noticed(worker, message)
        with self._changed:
            if number < self._number:
                return  # nobody waits for it any more
            _check_answers(message, number == self._number, self._asked.get(worker))
            if isinstance(message, schema.Compiling):
                return self._progress and self._progress(worker, message)
            self._replies[worker] = message
            del self._asked[worker]
            self._changed.notify_all()

    def _gone(self, worker: str, reason: str) -> None:
        with self._changed:
            self._lost.setdefault(worker, reason)
            self._changed.notify_all()

    def _admit(self, found: Ends, worker: str, incarnation: int) -> None:
        """Let a start of a worker in; the later end of the one before is no loss."""
        with self._changed:
            number = self._admitted[worker] = self._admitted.get(worker, 0) + 1
            self._lost.pop(worker, None)
            earlier, asked = self._sockets.get(worker), self._asked.pop(worker, None)
            if asked is not None:
                self._replies[worker] = schema.RequestFailed(
                    error="it was started again meanwhile", epoch=asked.epoch
                )

            def deliver(worker: str, key: Key, data: np.ndarray) -> None:
                if self._admitted[worker] == number:
                    self._deliver(worker, key, data)

            def gone(worker: str, reason: str) -> None:
                if self._admitted[worker] == number:
                    self._gone(worker, reason)

            self._sockets[worker] = Connection(
                found, worker, deliver, gone, self._silence_s
            )
            self._changed.notify_all()
        if earlier is not None:
            earlier.close()


def _check_answers(
    message: schema.Message, is_now: bool, asked: schema.AnyRequest | None
) -> None:
    """Raise BadMessage unless it follows from what the worker was asked."""
    told = type(message).__name__
    if not is_now or asked is None:
        raise BadMessage(f"{told} answers what was not asked")
    if message.epoch != asked.epoch:
        raise BadMessage(f"{told} is of epoch {message.epoch}, not {asked.epoch}")
    kinds = (
        schema.answer_of(type(asked)),
        schema.Lost,
        schema.RequestRefused,
        schema.RequestFailed,
    )
    if not isinstance(message, kinds):
        if not isinstance(message, schema.Compiling) or not isinstance(
            asked, schema.Compile
        ):
            raise BadMessage(f"{told} does not answer {type(asked).__name__}")


def _nobody_listens(worker: str, notice: schema.Noticed) -> None:
    warnings.warn(f"worker {worker}: {notice}, and nobody listens", stacklevel=1)


def _trouble(
    there: Mapping[str, schema.Message | None], lost: Mapping[str, str]
) -> tuple[str, str] | None:
    """Who is lost or failed, and how: first-hand news before hearsay.

    One that is lost may have made others fail.
    """
    for worker, message in there.items():
        if message is None:
            return worker, lost[worker]
    for worker, message in there.items():
        if isinstance(message, schema.RequestFailed):
            return worker, f"failed: {message.error}"
        if isinstance(message, schema.RequestRefused):
            return worker, "failed: bad input"
    for message in there.values():
        if isinstance(message, schema.Lost):
            return message.worker, message.reason
    return None


def _key(number: int) -> Key:
    return 0, number, 0, 0, 0, 0
