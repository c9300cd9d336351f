# SPDX-License-Identifier: Apache-2.0
"""A worker's requests wait for its background work and raise that work's errors."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hetjax.runtime.rpc.schema import Build, Compile, Done, Initialise, PlaceState
from hetjax.runtime.worker.background import Background
from hetjax.runtime.worker.service import WorkerService
from tests.training.small import ONE_STAGE

PATIENCE_S = 60.0


def test_it_goes_on_beside_until_it_is_waited_for():
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        begun.set()
        go_on.wait()
        done.append(1)

    beside = Background(work, "beside")
    begun.wait()
    assert not done
    go_on.set()
    beside.wait()
    assert done == [1]


def test_what_goes_wrong_is_raised_where_it_is_waited_for():
    def work() -> None:
        raise ValueError("no such program")

    beside = Background(work, "beside")
    with pytest.raises(ValueError, match="no such program"):
        beside.wait()


class Compiling:
    """A worker's part of a run that finishes compiling once `may_end` is set."""

    def __init__(self) -> None:
        self.may_end, self.done = threading.Event(), list[str]()
        self.runtime: Any = SimpleNamespace(
            plan=ONE_STAGE,
            members=None,
            compile=self._compile,
            restore=lambda read: self.done.append("restored"),
            initialise=lambda seed: self.done.append("initialised"),
        )

    def _compile(self, progress: object = None) -> None:
        assert self.may_end.wait(PATIENCE_S)
        self.done.append("compiled")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (PlaceState(step=3), ["compiled", "restored"]),
        (Initialise(seed=0), ["compiled", "initialised"]),
        (Compile(), ["compiled", "compiled"]),
    ],
)
def test_a_worker_compiles_beside_until_it_needs_its_programs(
    request_: Any, expected: list[str]
):
    work = Compiling()
    service = WorkerService("a", lambda settings: work)  # pyright: ignore
    assert service.answer(Build(settings={}, compiles=True)) == Done()
    asked = threading.Thread(target=service.answer, args=(request_,))
    asked.start()
    assert work.done == []
    work.may_end.set()
    asked.join(PATIENCE_S)
    assert work.done == expected


def test_a_worker_that_cannot_compile_says_so_when_it_is_asked_for_its_programs():
    work = Compiling()
    work.runtime.compile = lambda: 1 / 0
    service = WorkerService("a", lambda settings: work)  # pyright: ignore
    service.answer(Build(settings={}, compiles=True))
    with pytest.raises(ZeroDivisionError):
        service.answer(Compile())
