# SPDX-License-Identifier: Apache-2.0
"""Observers that are slow, hang or raise miss records, and only they do."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from hetjax.errors import RunFailed
from hetjax.training.observers import dispatch
from hetjax.training.observers.dispatch import Dispatcher, has_busy_observers
from hetjax.training.observers.loading import GivenObserver, observer_sources
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
    record_of_line,
)
from tests.training.observers.seen import MODULE, Held, NotMade, Raising, Seen

START = StartRecord(run="ab", run_dir=Path("run"), step=0, steps=9, settings={"a": 1})
SLOW: dict[str, Any] = {"what": "node", "who": "b", "factor": 1.9, "since": 1}
SLOW |= {"evidence": "others as before"}
LINES: list[dict[str, Any]] = [
    {"event": "started", "step": 0, "time": "now", "plan": "preset"},
    {"step": 0, "val_loss": 6.5, "val_bits_per_byte": 3.5},
    {"step": 1, "loss": 6.0, "tokens": 64, "mfu": 0.25},
    {"step": 2, "skipped": True, "reason": "a spike", "tokens": 64},
    {"event": "spiked", "step": 2, "time": "now", "loss": 9.0},
    {"event": "saved", "step": 2, "time": "now"},
    {"event": "best", "step": 2, "time": "now", "val_loss": 6.5},
    {
        "event": "recovered",
        "step": 2,
        "time": "now",
        "reason": "worker 'b' is gone",
        "seconds": {"move": 1.5, "compile": 0.5},
    },
    {"event": "rerouted", "step": 2, "time": "now", "reason": "x", "seconds": 0.25},
    {"event": "goodput", "step": 2, "time": "now", "goodput": 0.5},
    SLOW | {"event": "slow", "step": 2, "time": "now"},
    SLOW | {"event": "as_before", "step": 2, "time": "now"},
]
RECORDS: list[Record] = [
    EvaluationRecord(step=0, metrics={"val_loss": 6.5, "val_bits_per_byte": 3.5}),
    StepRecord(step=1, metrics={"loss": 6.0, "tokens": 64, "mfu": 0.25}),
    StepRecord(step=2, metrics={"tokens": 64}, skipped="a spike"),
    SavedRecord(step=2),
    RecoveredRecord(step=2, reason="worker 'b' is gone", seconds=2.0),
    RecoveredRecord(step=2, reason="x", seconds=0.25),
    SlowRecord(step=2, **SLOW),
    SlowRecord(step=2, **SLOW, is_over=True),
]


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 1.0 / number}


def steps_of(observer: Seen) -> list[int]:
    return [each.step for each in observer.records if isinstance(each, StepRecord)]


@contextmanager
def watching(
    said: list[str], *given: GivenObserver, error: BaseException | None = None
) -> Iterator[Dispatcher]:
    """Yield the dispatcher of a run with these observers; the run may raise `error`."""
    dispatcher = Dispatcher(observer_sources(given))
    dispatcher.begin(START, said.append)
    yield dispatcher
    dispatcher.__exit__(type(error) if error else None, error, None)


@pytest.fixture
def short_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_END_S", 0.05)


@pytest.fixture
def held() -> Iterator[Held]:
    observer = Held()
    yield observer
    observer.may_go.set()


def test_each_record_comes_once_in_order_by_its_method_on_a_thread_apart():
    first, second, said = Seen(), Seen(), list[str]()
    with watching(said, first, second) as run:
        for line in LINES:
            run.see_line(line)
        run.see_lost(2, "b", "is gone")
    end = EndRecord(step=2, outcome="stopped")
    lost = LostRecord(step=2, worker="b", reason="is gone")
    assert first.records == second.records == [START, *RECORDS, lost, end]
    assert first.methods == [
        *("on_start", "on_evaluation", "on_step", "on_step", "on_saved"),
        *("on_recovered", "on_recovered", "on_slow", "on_slow", "on_lost", "on_end"),
    ]
    assert len(first.threads) == len(second.threads) == 1
    assert len(first.threads | second.threads | {threading.main_thread()}) == 3
    assert said == [] and not has_busy_observers()


def test_a_record_cannot_be_changed():
    record = record_of_line(LINES[2])
    assert isinstance(record, StepRecord) and record.loss == 6.0
    with pytest.raises(FrozenInstanceError):
        record.step = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        record.metrics["loss"] = 0.0  # pyright: ignore[reportIndexIssue]
    skipped = record_of_line(LINES[3])
    assert isinstance(skipped, StepRecord) and skipped.loss is None


def test_a_slow_observer_misses_what_does_not_fit_and_is_said_to(
    held: Held, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "MOST_WAITING", 3)
    other, said = Seen(), list[str]()
    with watching(said, held) as run:
        run.see_line(step(1))
        held.is_in_step.wait()
        for number in range(2, 8):  # 2, 3 and 4 are queued
            run.see_line(step(number))
        (told,) = said
        assert "observer tests.training.observers.seen:Held does not keep" in told
        assert "misses records from step 5 on" in told
        held.may_go.set()
    assert steps_of(held) == [1, 2, 3, 4]
    assert isinstance(held.records[-1], EndRecord)  # this record always fits
    assert said[1:] == [
        f"warning: observer {MODULE}:Held has missed 3 records, as it was too slow"
    ]
    with watching(said, other) as run:
        run.see_line(step(1))
    assert steps_of(other) == [1]


@pytest.mark.usefixtures("short_end")
def test_a_run_ends_without_an_observer_that_hangs(held: Held):
    other, said = Seen(), list[str]()
    with watching(said, held, other) as run:
        for number in range(1, 5):
            run.see_line(step(number))
        held.is_in_step.wait()
    assert steps_of(other) == [1, 2, 3, 4]
    assert isinstance(other.records[-1], EndRecord)
    (told,) = said
    assert f"observer {MODULE}:Held is still busy" in told
    assert "missed 4 records" in told  # three steps and the end
    assert has_busy_observers()
    (thread,) = (t for t in threading.enumerate() if t.name.endswith(":Held"))
    held.may_go.set()
    thread.join()
    assert steps_of(held) == [1] and not has_busy_observers()
    assert said == [told]


@pytest.mark.parametrize(
    ("given", "name", "why"),
    [
        (Raising(), "Raising", "OSError: no space left"),
        (Raising(SystemExit(3)), "Raising", "SystemExit: 3"),
        (NotMade, "NotMade", "ConnectionError: the server is down"),
        (f"{MODULE}:no_observer", "no_observer", "TypeError: a int is not a"),
    ],
)
def test_one_that_raises_is_said_once_by_name_and_left_out(
    given: GivenObserver, name: str, why: str
):
    other, said = Seen(), list[str]()
    with watching(said, given, other) as run:
        for number in range(1, 6):
            run.see_line(step(number))
    (told,) = said
    assert (
        told.startswith(f"warning: observer {MODULE}:{name} has raised") and why in told
    )
    assert steps_of(other) == [1, 2, 3, 4, 5] and len(other.records) == 7
    if isinstance(given, Raising):
        assert steps_of(given) == [1] and len(given.records) == 2  # no end record


def test_one_that_is_left_out_is_not_called_slow_besides():
    observer, said = Raising(), list[str]()
    with watching(said, observer) as run:
        (thread,) = (t for t in threading.enumerate() if t.name.endswith(":Raising"))
        run.see_line(step(2))
        thread.join()
        for number in range(3, dispatch.MOST_WAITING + 10):
            run.see_line(step(number))
    assert len(said) == 1 and "has raised" in said[0]


@pytest.mark.parametrize(
    ("last", "error", "end"),
    [
        ({"event": "finished"}, None, EndRecord(step=5, outcome="finished")),
        (
            {"event": "preempted", "reason": "SIGTERM"},
            None,
            EndRecord(step=5, outcome="stopped", reason="SIGTERM"),
        ),
        (
            None,
            RunFailed(got="a full disk", allowed="room", fix="make room"),
            EndRecord(
                step=4,
                outcome="failed",
                reason="got: a full disk\nallowed: room\nfix: make room",
            ),
        ),
        (
            None,
            KeyboardInterrupt(),
            EndRecord(step=4, outcome="stopped", reason="interrupted"),
        ),
        (
            {"event": "finished"},
            KeyboardInterrupt(),
            EndRecord(step=5, outcome="finished"),
        ),
        (None, None, EndRecord(step=4, outcome="stopped")),
    ],
)
def test_the_end_says_how_the_run_has_ended(
    last: dict[str, Any] | None, error: BaseException | None, end: EndRecord
):
    observer = Seen()
    with watching([], observer, error=error) as run:
        run.see_line(step(4))
        if last is not None:
            run.see_line({"step": 5, "time": "now", **last})
    assert observer.records[-1] == end


def test_a_class_is_made_anew_for_each_run_and_a_value_is_itself():
    made: list[Seen] = []

    def factory() -> Seen:
        made.append(Seen())
        return made[-1]

    sources = observer_sources([factory])
    for _ in range(2):
        with Dispatcher(sources) as dispatcher:
            dispatcher.begin(START, lambda line: None)
    assert [len(each.records) for each in made] == [2, 2]


def test_a_run_that_never_began_starts_no_observer():
    made: list[int] = []
    never: Callable[[], Seen] = lambda: made.append(1) or Seen()  # noqa: E731
    with Dispatcher(observer_sources([never])) as dispatcher:
        dispatcher.see_line(step(1))
    assert made == []
