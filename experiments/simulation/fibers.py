# SPDX-License-Identifier: Apache-2.0
"""Code that waits in the middle, of which only one piece runs at any time.

Each fiber has a thread, which runs when it is resumed until it waits, so that the order
is that of simulated events. Owns these switches. Does not own time (`world.py`) nor
what stands for the product's threads (`threads.py`).
"""

import threading
from collections.abc import Callable
from typing import Any

_now: list["Fiber"] = []  # those that are resumed, the innermost last
_idle: list["_Runner"] = []


class Killed(BaseException):
    """The process of this fiber is gone: nothing of it runs any more."""


class Fiber:
    """A function that begins when it is resumed first; `resume` raises what it does."""

    def __init__(self, do: Callable[[], Any], process: Any) -> None:
        self.process = process
        self.is_done = self.is_killed = False
        self.error: BaseException | None = None
        self._do: Callable[[], Any] | None = do
        self._runner: _Runner | None = None

    def resume(self) -> None:
        """Let it go on until it waits or is done."""
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
        """Within it: wait until it is resumed. Raises Killed."""
        assert self._runner is not None
        self._runner.back.release()
        self._runner.go.acquire()
        if self.is_killed:
            raise Killed

    def kill(self) -> None:
        """End it where it waits."""
        self.is_killed = True
        if self._runner is None:
            self.is_done = True
        elif self not in _now:
            self.resume()

    def run(self) -> None:
        """What its thread does."""
        assert self._do is not None
        try:
            self._do()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_done, self._do = True, None


def current() -> Fiber | None:
    """The fiber that this is called in, if any."""
    return _now[-1] if _now else None


class _Runner:
    """A thread that runs fibers, one after the other."""

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
