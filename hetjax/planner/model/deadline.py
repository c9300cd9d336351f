# SPDX-License-Identifier: Apache-2.0
"""How long a search may go on: until a time, or until somebody asks it to end.

Owns the deadline of what runs inside `deadline`, and the check that long loops make. A
deadline inside another ends with that one at the latest. Does not own what becomes of
what was found by then (`search/find.py`).
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


class TimeUp(Exception):
    """The search may not go on."""


@dataclass(slots=True)
class Deadline:
    """When to end, by `time.monotonic`, and whether somebody asked for it before."""

    until_s: float
    outer: "Deadline | None" = None
    is_stopped: bool = False
    counts_time: bool = True

    def stop(self) -> None:
        """End what runs before the deadline at its next check."""
        self.is_stopped = True

    @property
    def left_s(self) -> float:
        """Seconds until the end; 0 after it."""
        if self._was_stopped:
            return 0.0
        if not self.counts_time:
            return math.inf
        outer_s = self.outer.left_s if self.outer else math.inf
        return min(max(self.until_s - time.monotonic(), 0.0), outer_s)

    @property
    def _was_stopped(self) -> bool:
        return self.is_stopped or (self.outer is not None and self.outer._was_stopped)


_NONE = Deadline(until_s=math.inf)
_DEADLINE: ContextVar[Deadline] = ContextVar("deadline", default=_NONE)


@contextmanager
def deadline(seconds: float = math.inf) -> Iterator[Deadline]:
    """Let what runs inside go on for so long, or until it is stopped."""
    found = Deadline(until_s=time.monotonic() + seconds, outer=_DEADLINE.get())
    token = _DEADLINE.set(found)
    try:
        yield found
    finally:
        _DEADLINE.reset(token)


@contextmanager
def overtime() -> Iterator[None]:
    """Let what runs inside go on when the time is over, until it is stopped."""
    outer = _DEADLINE.get()
    token = _DEADLINE.set(Deadline(until_s=math.inf, outer=outer, counts_time=False))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def left_s() -> float:
    """Return how long the search may still go on: 0 to infinity."""
    return _DEADLINE.get().left_s


def is_over() -> bool:
    """Say whether the search has to end."""
    return left_s() == 0.0


def check_deadline() -> None:
    """Raise TimeUp where the search has to end."""
    if is_over():
        raise TimeUp
