# SPDX-License-Identifier: Apache-2.0
"""Replaces threads and the clock in the product's modules that use them.

These classes stand in for `threading` and `time` there, so that the modules run
unchanged. Threads are fibers of the process that starts them, and waiting lets
simulated time pass. Owns these stand-ins. Does not own fibers (`fibers.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from experiments.simulation.fibers import Fiber, current
from experiments.simulation.world import Process, World
from hetjax.checkpoint import uploader

_NEVER_S = 1e9


def wait(
    world: World, is_over: Callable[[], bool], limit_s: float, woken: list[Fiber]
) -> bool:
    """Wait until `is_over()` or the limit; return whether it is over.

    A fiber is in `woken` while it waits. Outside any fiber, simulated events run
    meanwhile.
    """
    end_s, fiber = world.now_s + limit_s, current()
    if fiber is None:
        world.run_until(is_over, end_s)
        return is_over()
    woken.append(fiber)
    if limit_s < _NEVER_S:
        fiber.process.after(limit_s, fiber.resume)
    while not is_over() and world.now_s < end_s:
        fiber.pause()
    woken.remove(fiber)
    return is_over()


def sleep(world: World, seconds: float) -> None:
    end_s, fiber = world.now_s + seconds, current()
    if fiber is None:
        return world.run_until(lambda: False, end_s)
    fiber.process.after(seconds, fiber.resume)
    while world.now_s < end_s:
        fiber.pause()


class Threads:
    """`threading` and `time` of a process; outside fibers, `of` sets which."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._process: Process | None = None
        self.processes = set[Process]()  # that started something here

    @contextmanager
    def of(self, process: Process) -> Iterator[None]:
        """Assign what starts within this context to the process."""
        before, self._process = self._process, process
        self.processes.add(process)
        try:
            yield
        finally:
            self._process = before

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Patch the product's modules with these stand-ins."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(uploader, "threading", self))
            yield

    @property
    def process(self) -> Process:
        fiber = current()
        found = self._process if fiber is None else fiber.process
        assert found is not None, "whose thread is it?"
        return found

    def Thread(self, target: Callable[[], Any], **_: Any) -> "Thread":
        return Thread(target, self.process)

    def Condition(self) -> "Condition":
        return Condition(self.world)

    def Event(self) -> "Event":
        return Event(self.world)

    def monotonic(self) -> float:
        return self.world.now_s

    def sleep(self, seconds: float) -> None:
        sleep(self.world, seconds)


class Thread:
    """`threading.Thread`."""

    def __init__(self, target: Callable[[], Any], process: Process) -> None:
        self._process, self._done = process, Condition(process.world)
        self._target, self._is_done = target, False

    def start(self) -> None:
        self._process.begin(self._run)

    def _run(self) -> None:
        self._target()
        self._is_done = True
        self._done.notify_all()

    def join(self, timeout: float = _NEVER_S) -> None:
        self._done.wait_for(lambda: self._is_done, timeout)


class Condition:
    """`threading.Condition`, without a lock: only one fiber runs at a time."""

    def __init__(self, world: World) -> None:
        self._world, self._waiting = world, list[Fiber]()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(
        self, predicate: Callable[[], Any], timeout: float | None = None
    ) -> bool:
        limit_s = _NEVER_S if timeout is None else timeout
        return wait(self._world, lambda: bool(predicate()), limit_s, self._waiting)

    def notify_all(self) -> None:
        for fiber in self._waiting:
            fiber.process.after(0.0, fiber.resume)


class Event:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._changed, self._is_set = Condition(world), False

    def set(self) -> None:
        self._is_set = True
        self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        return self._changed.wait_for(lambda: self._is_set, timeout)
