# SPDX-License-Identifier: Apache-2.0
"""Limits a search by time, by an amount of work, or by a request to stop.

Owns the deadline of the code inside `deadline`, and the check that long loops make. A
nested deadline ends with the outer one at the latest. The work of a search is the
number of its checks. A search of the same request whose deadlines end at the same
checks (`SearchWork`) does the same, however fast the machine is. Does not own what
happens to the results found by then (`search/find.py`).
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


class TimeUp(Exception):
    """The search has to end."""


@dataclass(slots=True)
class SearchWork:
    """The checks of a search: how many it made, and at which ones a deadline ended.

    With `planned`, deadlines end at these checks and not by time. Each of them but the
    last ends the innermost deadline; after the last, all deadlines are over.
    """

    planned: tuple[int, ...] = ()
    checks: int = 0
    ended: list[int] = field(default_factory=list)

    @property
    def done(self) -> tuple[int, ...]:
        """The `planned` of a search that repeats this one."""
        return *self.ended, self.checks

    def is_due(self) -> bool:
        """Return whether this check ends the innermost deadline, as planned."""
        return self.checks > self.planned[-1] or self.checks in self.planned[:-1]


@dataclass(slots=True)
class Deadline:
    """When to end, by `time.monotonic` or by work, and whether a stop was requested."""

    until_s: float
    work: SearchWork
    outer: "Deadline | None" = None
    is_stopped: bool = False
    is_noticed: bool = False  # a check has seen that it is over
    counts_time: bool = True

    def stop(self) -> None:
        """Request that the code under this deadline ends at its next check."""
        self.is_stopped = True

    def check(self) -> float:
        """Count this check and return the seconds until the end."""
        self.work.checks += 1
        if self.work.planned and self.work.is_due():
            self.is_noticed = True
        left_s = self.left_s
        if left_s == 0.0 and not self.is_noticed:
            self.work.ended.append(self.work.checks)
            self.is_noticed = True
        return left_s

    @property
    def left_s(self) -> float:
        """Seconds until the end; 0 after it."""
        if self.was_stopped or self.is_noticed:
            return 0.0
        if self.work.planned or not self.counts_time:
            return math.inf
        outer_s = self.outer.left_s if self.outer else math.inf
        return min(max(self.until_s - time.monotonic(), 0.0), outer_s)

    @property
    def was_stopped(self) -> bool:
        """Whether this deadline or an outer one was asked to stop."""
        return self.is_stopped or (self.outer is not None and self.outer.was_stopped)


_NONE = Deadline(until_s=math.inf, work=SearchWork())
_DEADLINE: ContextVar[Deadline] = ContextVar("deadline", default=_NONE)


@contextmanager
def deadline(
    seconds: float = math.inf, planned: tuple[int, ...] = ()
) -> Iterator[Deadline]:
    """Limit the enclosed code to `seconds`, or to the `planned` work, or until it is
    stopped. The outermost deadline counts work from 0; `planned` is only for that."""
    outer = _DEADLINE.get()
    work = SearchWork(planned=planned) if outer is _NONE else outer.work
    found = Deadline(until_s=time.monotonic() + seconds, work=work, outer=outer)
    token = _DEADLINE.set(found)
    try:
        yield found
    finally:
        _DEADLINE.reset(token)


@contextmanager
def overtime() -> Iterator[None]:
    """Let the enclosed code run past the time limit, until it is stopped."""
    outer = _DEADLINE.get()
    inner = Deadline(until_s=math.inf, work=outer.work, outer=outer, counts_time=False)
    token = _DEADLINE.set(inner)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def left_s() -> float:
    """Return how many seconds the search may still run: 0 to infinity."""
    return _DEADLINE.get().check()


def is_over() -> bool:
    """Return whether the search has to end."""
    return left_s() == 0.0


def check_deadline() -> None:
    """Raise TimeUp if the search has to end."""
    if is_over():
        raise TimeUp


def check_stopped() -> None:
    """Raise TimeUp if a stop was requested. For long work that runs even after the time
    is up."""
    if _DEADLINE.get().was_stopped:
        raise TimeUp
