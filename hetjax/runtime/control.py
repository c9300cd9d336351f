# SPDX-License-Identifier: Apache-2.0
"""What a controller and its workers say to each other: JSON requests and replies.

Owns the framing on a `Link`, matching replies with requests, and noticing at once that
one side is gone. Does not own what the requests mean (`serving.py`, `fleet.py`).
"""

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hetjax.comm.links import SILENCE_S, Door, Ends, Key, Link, dial
from hetjax.errors import BadInput
from hetjax.runtime.limits import BREAK_OFF, LIMITS, START

CONTROLLER = "controller"
Message = dict[str, Any]
Progress = Callable[[str, Message], None]  # from whom, and how far it is
Noticed = Callable[[str, Message], None]  # by whom, and what of its machine

_REQUEST, _REPLY, _NEWS = range(3)
_LOST = {"lost": True}
_LOOK_S = 0.5  # whether a limit has passed, or somebody interrupts


class WorkerLost(ConnectionError):
    """A worker is gone, or failed; the others have left the step and wait.

    `reports` has by worker what the survivors said.
    """

    def __init__(
        self, worker: str, reason: str, reports: Mapping[str, Message] | None = None
    ) -> None:
        super().__init__(f"worker {worker!r} {reason}")
        self.worker, self.reason, self.reports = worker, reason, dict(reports or {})


class Line:
    """A worker's line to its controller: `heard` is called with every request."""

    def __init__(
        self,
        address: str,
        own: str,
        secret: bytes,
        heard: Callable[[int, Message], None],
        gone: Callable[[str], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        def deliver(peer: str, key: Key, data: np.ndarray) -> None:
            heard(key[1], json.loads(data.tobytes()))

        found = dial(address, own, CONTROLLER, secret)
        lost = lambda peer, reason: gone(reason)  # noqa: E731
        self._link = Link(found, CONTROLLER, deliver, lost, silence_s)

    def reply(self, number: int, message: Message) -> None:
        self._link.send(_key(_REPLY, number), [_encoded(message)])

    def tell(self, number: int, message: Message) -> None:
        """Say how far the work on a request is; 0: something that nobody asked."""
        self._link.send(_key(_NEWS, number), [_encoded(message)])

    def close(self) -> None:
        self._link.close()


class Crew:
    """A controller's lines to its workers, by name.

    `noticed` is called at once, from a line's thread, when a worker tells that its
    machine is about to go. Every wait has its limit (`limits.py`) times `patience`.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        silence_s: float = SILENCE_S,
        patience: float = 1.0,
    ) -> None:
        self._silence_s, self._patience = silence_s, patience
        self._interrupt: Callable[[], None] = _nobody_interrupts
        self._changed = threading.Condition()
        self._links: dict[str, Link] = {}
        self._lost: dict[str, str] = {}
        self._replies: dict[tuple[str, int], Message] = {}
        self._number = 0
        self._progress: Progress = lambda worker, news: None
        self.noticed: Noticed = _nobody_listens
        self._door = Door(CONTROLLER, address, secret, self._admit)
        self.address = self._door.address

    @property
    def workers(self) -> list[str]:
        """Those who can be asked."""
        with self._changed:
            return [name for name in self._links if self._is_there(name)]

    def wait_for(
        self,
        workers: Sequence[str],
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until they have called; `alive` may raise if they never will."""
        end_s = self._end_s(START)
        with self._changed:
            while missing := [name for name in workers if not self._is_there(name)]:
                alive()
                self._interrupt()
                if time.monotonic() > end_s:
                    reason = LIMITS[START].passed(self._patience)
                    raise WorkerLost(missing[0], reason)
                self._changed.wait(0.1)

    @contextmanager
    def interrupted_by(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Let waits in here end with what this may raise."""
        self._interrupt = interrupt
        try:
            yield
        finally:
            self._interrupt = _nobody_interrupts

    def ask(
        self, requests: Mapping[str, Message], progress: Progress | None = None
    ) -> dict[str, Message]:
        """Ask several workers the same kind of thing and return their answers.

        If one is lost or fails, the others are told to break off; once all have
        answered, WorkerLost is raised, or the BadInput that a worker found.
        """
        if not requests:
            return {}
        (what,) = {message["do"] for message in requests.values()}
        with self._changed:
            self._number += 1
            number = self._number
            self._progress = progress or (lambda worker, news: None)
        for worker, message in requests.items():
            self._send(worker, number, message)
        return self._answers(list(requests), number, what)

    def lose(self, worker: str, reason: str) -> None:
        """Take a worker for lost, whatever its line says."""
        self._gone(worker, reason)
        link = self._links.get(worker)
        if link is not None:
            threading.Thread(target=link.close, daemon=True).start()

    def close(self) -> None:
        """End all lines; workers end themselves then."""
        self._door.close()
        for link in self._links.values():
            link.close()

    def _is_there(self, worker: str) -> bool:
        return worker in self._links and worker not in self._lost

    def _answers(
        self, workers: Sequence[str], number: int, what: str
    ) -> dict[str, Message]:
        there, trouble = self._waited(workers, number, what)
        if trouble is None:
            return there
        for message in there.values():
            if "refused" in message:
                raise BadInput(**message["refused"])
        raise WorkerLost(*trouble, {w: m for w, m in there.items() if m is not _LOST})

    def _waited(
        self, workers: Sequence[str], number: int, what: str
    ) -> tuple[dict[str, Message], tuple[str, str] | None]:
        """The answers of all, once they are there, and the trouble if there was any.

        Past the limit all that have not answered are told to break off. Those that do
        have waited for another: who does not even do that is lost.
        """
        end_s, told = self._end_s(what), None
        with self._changed:
            while len(there := self._there(workers, number)) < len(workers):
                late = [worker for worker in workers if worker not in there]
                is_late = time.monotonic() > end_s
                if is_late and told is not None:
                    for worker in late:
                        self.lose(worker, LIMITS[what].passed(self._patience))
                    continue
                trouble = _trouble(there, self._lost)
                if is_late and trouble is None:
                    trouble = late[0], LIMITS[what].passed(self._patience)
                if trouble is not None and told is None:
                    told, end_s = trouble, max(end_s, self._end_s(BREAK_OFF))
                    for worker in late:
                        self._send(worker, 0, {"do": "abort", "lost": [*trouble]})
                self._interrupt()
                self._changed.wait(_LOOK_S)
            for worker in workers:
                self._replies.pop((worker, number), None)
        return there, _trouble(there, self._lost) or told

    def _end_s(self, what: str) -> float:
        return time.monotonic() + self._patience * LIMITS[what].seconds

    def _there(self, workers: Sequence[str], number: int) -> dict[str, Message]:
        """Answers by worker; lost ones answer, too."""
        return {
            worker: self._replies.get((worker, number), _LOST)
            for worker in workers
            if worker in self._lost or (worker, number) in self._replies
        }

    def _send(self, worker: str, number: int, message: Message) -> None:
        link = self._links.get(worker)
        if link is not None:
            link.send(_key(_REQUEST, number), [_encoded(message)])

    def _deliver(self, worker: str, key: Key, data: np.ndarray) -> None:
        message = json.loads(data.tobytes())
        if "warning" in message:
            return warnings.warn(f"worker {worker}: {message['warning']}", stacklevel=1)
        if "notice" in message:
            return self.noticed(worker, message["notice"])
        with self._changed:
            if key[2] == _NEWS:
                return self._progress(worker, message)
            self._replies[worker, key[1]] = message
            self._changed.notify_all()

    def _gone(self, worker: str, reason: str) -> None:
        with self._changed:
            self._lost.setdefault(worker, reason)
            self._changed.notify_all()

    def _admit(self, found: Ends, worker: str) -> None:
        with self._changed:
            self._lost.pop(worker, None)
            self._links[worker] = Link(
                found, worker, self._deliver, self._gone, self._silence_s
            )
            self._changed.notify_all()


def _nobody_interrupts() -> None:
    pass


def _nobody_listens(worker: str, notice: Message) -> None:
    warnings.warn(f"worker {worker}: {notice}, and nobody listens", stacklevel=1)


def _trouble(
    there: Mapping[str, Message], lost: Mapping[str, str]
) -> tuple[str, str] | None:
    """Who is lost or failed, and how: first-hand news before hearsay.

    One that is lost may have made others fail.
    """
    for worker, message in there.items():
        if message is _LOST:
            return worker, lost[worker]
    for worker, message in there.items():
        if "failed" in message or "refused" in message:
            return worker, f"failed: {message.get('failed', 'bad input')}"
    for message in there.values():
        if "lost" in message:
            name, reason = message["lost"]
            return name, reason
    return None


def _key(kind: int, number: int) -> Key:
    return 0, number, kind, 0, 0, 0


def _encoded(message: Message) -> np.ndarray:
    return np.frombuffer(json.dumps(message).encode(), np.uint8)
