# SPDX-License-Identifier: Apache-2.0
"""Passes records to observers: a queue and a thread for each, so no run waits for them.

Owns the handling of an observer that is slow, hangs or raises. Does not own what
observers do, nor which exist (`loading.py`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from hetjax.training.observers.loading import ObserverSource
from hetjax.training.observers.observer import Observer, notify
from hetjax.training.observers.records import (
    EndRecord,
    LostRecord,
    Record,
    RecoveredRecord,
    StartRecord,
    StepRecord,
    record_of_line,
)

MOST_WAITING = 1_000  # records of one observer
MOST_END_S = 10.0  # for all observers together

_THREAD = "observer "  # prefix of a thread's name

Say = Callable[[str], None]


class ObserverThread:
    """One observer, which is made and works on its own thread."""

    def __init__(self, source: ObserverSource, say: Say) -> None:
        self._source, self._say = source, say
        self._queue = SimpleQueue[Record]()  # put never blocks, nor takes a lock
        self._is_left_out, self._num_dropped = False, 0
        name = f"{_THREAD}{source.name}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def hand_over(self, record: Record) -> None:
        """Queue a record, or drop it if too many wait."""
        if self._is_left_out:
            return
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put(record)
            return
        self._num_dropped += 1
        if self._num_dropped == 1:
            self._warn(
                f"does not keep up: it misses records from step {record.step} on"
            )

    def end(self, record: EndRecord) -> None:
        """Queue the last record, however many wait."""
        self._queue.put(record)

    def wait(self, until_s: float) -> None:
        """Wait for the observer's end, and warn of what it has missed."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            self._is_left_out = True
            missed = self._queue.qsize() + self._num_dropped
            self._warn(
                f"is still busy {MOST_END_S:g} s after the end of the run, which stops "
                f"waiting; it has missed {missed} records"
            )
        elif self._num_dropped:
            self._warn(f"has missed {self._num_dropped} records, as it was too slow")

    def _work(self) -> None:
        try:
            self._watch(self._source.observer())
        except BaseException as error:  # no error of an observer may end the run
            if not self._is_left_out:
                self._is_left_out = True
                got = f"{type(error).__name__}: {error}"
                self._warn(f"has raised, and is left out from here on: {got}")

    def _watch(self, observer: Observer) -> None:
        record: Record | None = None
        while not self._is_left_out and not isinstance(record, EndRecord):
            record = self._queue.get()
            notify(observer, record)

    def _warn(self, what: str) -> None:
        self._say(f"warning: observer {self._source.name} {what}")


class Dispatcher:
    """All observers of a run; leaving `with` ends them, if they have started."""

    def __init__(self, sources: Sequence[ObserverSource] = ()) -> None:
        self._sources, self._threads = sources, list[ObserverThread]()
        self._end = EndRecord(step=0, outcome="stopped")

    def begin(self, record: StartRecord, say: Say) -> None:
        """Start the observers; `say` is called from any thread."""
        self._end = EndRecord(step=record.step, outcome="stopped")
        self._threads = [ObserverThread(source, say) for source in self._sources]
        self._hand_over(record)

    def see_line(self, line: Mapping[str, Any]) -> None:
        """Hand over the record of a journal's line, if it has one.

        Keep the end of a call to train: other calls may follow before the run's end.
        """
        if not self._threads or (record := record_of_line(line)) is None:
            return
        if isinstance(record, EndRecord):
            self._end = record
            return
        if isinstance(record, StepRecord | RecoveredRecord):
            self._end = EndRecord(step=record.step, outcome="stopped")
        self._hand_over(record)

    def see_lost(self, step: int, worker: str, reason: str) -> None:
        """Hand over the record of a lost worker."""
        self._hand_over(LostRecord(step=step, worker=worker, reason=reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all observers within one time limit; tell them how the run has ended."""
        record = _with_error(self._end, error)
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.end(record)
        until_s = time.monotonic() + MOST_END_S
        for thread in threads:
            thread.wait(until_s)

    def _hand_over(self, record: Record) -> None:
        for thread in self._threads:
            thread.hand_over(record)


def has_busy_observers() -> bool:
    """Return whether an observer still works in this process, even of an ended run."""
    return any(thread.name.startswith(_THREAD) for thread in threading.enumerate())


def _with_error(end: EndRecord, error: BaseException | None) -> EndRecord:
    """Return the end record of a run, given the error, if any, that has ended it."""
    if isinstance(error, Exception):
        return EndRecord(step=end.step, outcome="failed", reason=str(error))
    if error is None or end.outcome == "finished":
        return end  # a later interrupt can only have cut short a report
    return EndRecord(step=end.step, outcome="stopped", reason="interrupted")
