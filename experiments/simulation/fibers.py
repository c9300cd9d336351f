# SPDX-License-Identifier: Apache-2.0
"""Runs code that can wait in the middle; only one fiber runs at any time.

Each fiber has a thread, which runs from each `resume` until the fiber waits. So
simulated events alone determine the order. Owns these switches. Does not own time
(`world.py`) nor the stand-ins for the product's threads (`threads.py`).
"""

import threading
from collections.abc import Callable
from typing import Any

_now: list["Fiber"] = []  # resumed fibers, the innermost last
_idle: list["_Runner"] = []


class Killed(BaseException):
    """The fiber's process is gone; none of its code runs any more."""


class Fiber:
    """A function that starts at the first `resume`, which raises its errors."""

    def __init__(self, do: Callable[[], Any], process: Any) -> None:
        self.process = process
        self.is_done = self.is_killed = False
        self.error: BaseException | None = None
        self._do: Callable[[], Any] | None = do
        self._runner: _Runner | None = None

    def resume(self) -> None:
        """Let it run until it waits or is done."""
        if self.is_done:
            return
        if self._runner is None:
            self._runner = _idle.pop() if _idle else _Runner()
            self._runner.fiber = self
        runner = self._runner
        _now.append(self)
        runner.go.release()
        runner.back.acquire()
        _now.pop()
        if self.is_done:
            self._runner = None
            _idle.append(runner)
            if self.error is not None:
                raise self.error

    def pause(self) -> None:
        """Wait, inside the fiber, until it is resumed. Raises Killed."""
        assert self._runner is not None
        self._runner.back.release()
        self._runner.go.acquire()
        if self.is_killed:
            raise Killed

    def kill(self) -> None:
        """End it at the place where it waits."""
        self.is_killed = True
        if self._runner is None:
            self.is_done = True
        elif self not in _now:
            self.resume()

    def run(self) -> None:
        """Run the function; called in the fiber's thread."""
        assert self._do is not None
        try:
            self._do()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_done, self._do = True, None


def current() -> Fiber | None:
    """Return the fiber that calls this, if any."""
    return _now[-1] if _now else None


class _Runner:
    """A thread that runs fibers, one after another."""

    def __init__(self) -> None:
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.fiber: Fiber
        threading.Thread(target=self._run, daemon=True, name="fiber").start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            self.fiber.run()
            self.back.release()
