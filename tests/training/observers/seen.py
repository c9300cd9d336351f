# SPDX-License-Identifier: Apache-2.0
"""Observers for tests: one keeps all that it gets, others misbehave."""

import threading

from hetjax.training.observers.observer import Observer
from hetjax.training.observers.records import (
    EndRecord,
    EvaluationRecord,
    LostRecord,
    Record,
    RecoveredRecord,
    SavedRecord,
    SlowRecord,
    StartRecord,
    StepRecord,
)


class Seen(Observer):
    """An observer that keeps all records, their methods and the calling threads."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.methods: list[str] = []
        self.threads: set[threading.Thread] = set()

    def on_start(self, record: StartRecord) -> None:
        self._keep("on_start", record)

    def on_step(self, record: StepRecord) -> None:
        self._keep("on_step", record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._keep("on_evaluation", record)

    def on_saved(self, record: SavedRecord) -> None:
        self._keep("on_saved", record)

    def on_lost(self, record: LostRecord) -> None:
        self._keep("on_lost", record)

    def on_recovered(self, record: RecoveredRecord) -> None:
        self._keep("on_recovered", record)

    def on_slow(self, record: SlowRecord) -> None:
        self._keep("on_slow", record)

    def on_end(self, record: EndRecord) -> None:
        self._keep("on_end", record)

    def _keep(self, method: str, record: Record) -> None:
        self.methods.append(method)
        self.records.append(record)
        self.threads.add(threading.current_thread())


class Held(Seen):
    """An observer whose first step returns only once `may_go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in_step, self.may_go = threading.Event(), threading.Event()

    def on_step(self, record: StepRecord) -> None:
        self.is_in_step.set()
        self.may_go.wait()
        super().on_step(record)


class Raising(Seen):
    """An observer that raises `error` in its second step."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error or OSError("no space left")

    def on_step(self, record: StepRecord) -> None:
        if record.step == 2:
            raise self.error
        super().on_step(record)


class NotMade(Observer):
    """An observer whose constructor raises."""

    def __init__(self) -> None:
        raise ConnectionError("the server is down")


def no_observer() -> int:
    return 7


SEEN = Seen()
MODULE = "tests.training.observers.seen"
