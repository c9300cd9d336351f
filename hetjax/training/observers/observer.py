# SPDX-License-Identifier: Apache-2.0
"""Defines the protocol of observers, which get the records of a run one at a time.

Owns `Observer` and which record goes to which of its methods. Does not own the records
(`records.py`), nor the thread that an observer works on (`dispatch.py`).
"""

from typing import Protocol, runtime_checkable

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


@runtime_checkable
class Observer(Protocol):
    """Observes a run; subclass it, and override the methods that you need.

    `Trainer(observers=[...])` and `--observer package.module:name` take observers. An
    observer works in the process that controls the run, on its own thread, and does not
    affect the run: a slow observer misses records, and one that raises gets no more.
    The first record is that of the start, the last one that of the end.

    >>> class Losses(Observer):
    ...     def on_step(self, record):
    ...         print(record.step, record.metrics["loss"])
    >>> Losses().on_step(StepRecord(step=3, metrics={"loss": 2.5}))
    3 2.5
    """

    def on_start(self, record: StartRecord) -> None:
        """The run begins, or resumes."""

    def on_step(self, record: StepRecord) -> None:
        """A step is done, and its loss is known."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """The validation loss after a step is known."""

    def on_saved(self, record: SavedRecord) -> None:
        """A checkpoint is complete."""

    def on_lost(self, record: LostRecord) -> None:
        """A worker is lost."""

    def on_recovered(self, record: RecoveredRecord) -> None:
        """Training continues after a loss, or with other nodes.

        It may continue from an earlier step, so that steps come again.
        """

    def on_slow(self, record: SlowRecord) -> None:
        """A device, a link or a kind of batch has become slow, or is as before."""

    def on_end(self, record: EndRecord) -> None:
        """The run ends; observers have ten seconds to finish their work."""


_METHODS: dict[type[Record], str] = {
    StartRecord: "on_start",
    StepRecord: "on_step",
    EvaluationRecord: "on_evaluation",
    SavedRecord: "on_saved",
    LostRecord: "on_lost",
    RecoveredRecord: "on_recovered",
    SlowRecord: "on_slow",
    EndRecord: "on_end",
}


def notify(observer: Observer, record: Record) -> None:
    """Pass a record to the observer's method for it."""
    getattr(observer, _METHODS[type(record)])(record)
