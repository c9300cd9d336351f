# SPDX-License-Identifier: Apache-2.0
"""A worker that hangs: every wait of its controller has a limit that says for what."""

import ast
import inspect
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from hetjax.runtime import limits, serving
from hetjax.runtime.control import Crew, Line, Message, WorkerLost
from hetjax.runtime.limits import BREAK_OFF, LIMITS, START, Limit

SECRET = secrets.token_bytes(32)
LIMIT_S = 0.4
Hear = Callable[[Line, int, Message], None]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in LIMITS.items():
        monkeypatch.setitem(LIMITS, name, Limit(LIMIT_S, limit.what))


@contextmanager
def crew_of(workers: Mapping[str, Hear], patience: float = 1.0) -> Iterator[Crew]:
    """A controller whose workers, here, do this with each request."""
    crew = Crew("127.0.0.1:0", SECRET, patience=patience)
    lines: dict[str, Line] = {}
    try:
        for name, hear in workers.items():
            heard = lambda n, message, w=name, h=hear: h(lines[w], n, message)  # noqa: E731
            lines[name] = Line(crew.address, name, SECRET, heard, lambda reason: None)
        crew.wait_for(list(workers))
        yield crew
    finally:
        for line in lines.values():
            with suppress(OSError):
                line.close()
        crew.close()


def waits(line: Line, number: int, message: Message) -> None:
    """Wait for a peer, as in a step: answer once that is broken off."""
    if message["do"] == "abort":
        line.reply(1, {"lost": message["lost"]})


def answers(line: Line, number: int, message: Message) -> None:
    line.reply(number, {"well": True})


def hangs(line: Line, number: int, message: Message) -> None:
    """Beat, and do nothing else."""


def requests() -> set[str]:
    """All that a controller may ask of a worker: the keys of the worker's table."""
    tree = ast.parse(inspect.getsource(serving))
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = max((t.keys for t in tables), key=len)
    return {key.value for key in keys if isinstance(key, ast.Constant)}  # pyright: ignore


def test_there_is_a_limit_for_all_that_is_asked_and_for_nothing_else():
    assert requests() | {"end", START, BREAK_OFF} == LIMITS.keys()
    assert all(limit.seconds >= 60 for limit in TABLE.values())


TABLE = dict(limits.LIMITS)  # before it is changed


@pytest.mark.parametrize("what", ["build", "compile", "step", "save", "saved", "end"])
def test_who_does_not_answer_is_lost_and_those_that_wait_for_it_are_not(what: str):
    with crew_of({"a": waits, "b": hangs, "c": waits}) as crew:
        begin_s = time.monotonic()
        with pytest.raises(WorkerLost) as told:
            crew.ask(dict.fromkeys("abc", {"do": what}))
        assert time.monotonic() - begin_s < 2 * LIMIT_S + 1.5
        assert told.value.worker == "b"
        reason = f"took more than {LIMIT_S:g} s to {LIMITS[what].what}"
        assert told.value.reason.startswith(reason)
        assert sorted(told.value.reports) == ["a", "c"] == sorted(crew.workers)


def test_where_all_wait_for_each_other_one_is_named_and_none_is_cut_off():
    with crew_of({"a": waits, "b": waits}) as crew:
        with pytest.raises(WorkerLost, match="'a' took more than 0.4 s to train a"):
            crew.ask(dict.fromkeys("ab", {"do": "step"}))
        assert sorted(crew.workers) == ["a", "b"]


def test_patience_multiplies_the_limits():
    with crew_of({"a": answers, "b": hangs}, patience=4.0) as crew:
        begin_s = time.monotonic()
        with pytest.raises(WorkerLost, match="took more than 1.6 s .*--patience"):
            crew.ask(dict.fromkeys("ab", {"do": "step"}))
        assert time.monotonic() - begin_s > 4 * LIMIT_S


def test_who_never_calls_is_named_with_the_time():
    with crew_of({"a": answers}) as crew:
        with pytest.raises(WorkerLost, match="'b' took more than 0.4 s to start and"):
            crew.wait_for(["a", "b"])


def test_a_wait_ends_with_what_an_interruption_raises():
    def interrupt() -> None:
        raise KeyboardInterrupt

    with crew_of({"a": hangs}) as crew:
        with pytest.raises(KeyboardInterrupt), crew.interrupted_by(interrupt):
            crew.ask({"a": {"do": "step"}})
        with pytest.raises(WorkerLost):
            crew.ask({"a": {"do": "step"}})


def test_a_reply_that_is_no_json_loses_the_worker():
    def babbles(line: Line, number: int, message: Message) -> None:
        line._link.send((0, number, 1, 0, 0, 0), [np.frombuffer(b"{no", np.uint8)])

    with crew_of({"a": babbles}) as crew:
        with pytest.raises(WorkerLost, match="'a' sent what cannot be read"):
            crew.ask({"a": {"do": "step"}})
