# SPDX-License-Identifier: Apache-2.0
"""Defines simulated time, which only events advance, and seeded chance.

Owns the clock, the pending events, the processes that they affect, and the log of a run
that failed. Does not own the events' content (`network.py`, `worker.py`).
"""

import heapq
import random
from collections import deque
from collections.abc import Callable

from experiments.simulation.fibers import Fiber

_MOST_EVENTS = 400_000
_NEVER_S = 1e12
_NUM_TOLD = 400  # last events that are kept for the log of a failed run

Do = Callable[[], None]


class ControllerCrashed(BaseException):
    """The controller's process is gone; none of its code runs any more."""


class Violation(AssertionError):
    """Something happened that must never happen."""


class Stuck(Violation):
    """Something waits for an event that will never happen."""


class World:
    """The clock and the events of one run; `crash_at` counts events."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.num_events = 0
        self._num_waits = 0  # that no event ended
        self.crash_at: int | None = None
        self.told: deque[str] = deque(maxlen=_NUM_TOLD)
        self.fibers: list[Fiber] = []
        self.wrong: Violation | None = None  # seen in code that might swallow it
        self._queue: list[tuple[float, int, Do]] = []
        self._count = 0

    def after(self, delay_s: float, do: Do) -> None:
        """Schedule this for `delay_s` seconds from now."""
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, do))

    def run_until(self, is_over: Callable[[], bool], until_s: float = _NEVER_S) -> None:
        """Run events in order until `is_over()` or the time `until_s`.

        Raises ControllerCrashed if the controller crashes meanwhile.
        """
        while not is_over():
            if not self._queue and until_s >= _NEVER_S:
                raise Stuck("nothing will ever happen")
            if not self._queue or self._queue[0][0] > until_s:
                self.now_s = until_s
                self._num_waits += 1
                if self._num_waits > _MOST_EVENTS:
                    raise Stuck("there is no end to waiting")
                return
            self.now_s, _, do = heapq.heappop(self._queue)
            do()
            if self.wrong is not None:
                raise self.wrong
            self.num_events += 1
            if self.num_events > _MOST_EVENTS:
                raise Stuck("there is no end to it")
            if self.crash_at is not None and self.num_events >= self.crash_at:
                self.crash_at = None
                raise ControllerCrashed

    def end(self) -> None:
        """Kill all fibers."""
        for fiber in self.fibers:
            fiber.kill()

    def tell(self, text: str) -> None:
        self.told.append(f"{self.now_s:10.3f} {text}")

    def one_in(self, count: float) -> bool:
        return self.random.random() * count < 1


class Process:
    """What runs on a host until it ends; while it is stopped, all its calls wait."""

    def __init__(self, world: World, host: str, name: str) -> None:
        self.world, self.host, self.name = world, host, name
        self.is_alive, self.is_stopped = True, False
        self.ended: Do = lambda: None
        self._waiting: list[Do] = []
        self._fibers: list[Fiber] = []

    def begin(self, do: Do) -> None:
        """Run this in a new fiber, where it may wait."""
        fiber = Fiber(do, self)
        self._fibers = [found for found in self._fibers if not found.is_done]
        self._fibers.append(fiber)
        self.world.fibers.append(fiber)
        self.after(0.0, fiber.resume)

    def call(self, do: Do) -> None:
        """Run this in the process if it is alive; while it is stopped, keep it."""
        if self.is_stopped:
            self._waiting.append(do)
        elif self.is_alive:
            do()

    def after(self, delay_s: float, do: Do) -> None:
        self.world.after(delay_s, lambda: self.call(do))

    def stop(self) -> None:
        """Stop as SIGSTOP does: the process gives no sign of life either."""
        self.is_stopped = self.is_alive

    def go_on(self) -> None:
        if self.is_alive and self.is_stopped:
            self.is_stopped = False
            waiting, self._waiting = self._waiting, []
            for do in waiting:
                self.call(do)

    def kill(self) -> None:
        """End as SIGKILL does; others see its connections end."""
        if self.is_alive:
            self.is_alive = self.is_stopped = False
            self._waiting.clear()
            for fiber in self._fibers:
                fiber.kill()
            self.ended()
