# SPDX-License-Identifier: Apache-2.0
"""How long a search may go on: until a time, until it has done so much work, or until
somebody asks it to end.

Owns the deadline of what runs inside `deadline`, and the check that long loops make. A
deadline inside another ends with that one at the latest. The work of a search is the
number of its checks: a search of the same request whose deadlines end at the same
checks (`SearchWork`) does the same, however fast the machine is. Does not own what
becomes of what was found by then (`search/find.py`).
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


class TimeUp(Exception):
    """The search may not go on."""


@dataclass(slots=True)
class SearchWork:
    """The checks of a search: how many there were, and at which a deadline ended.

    With `planned` deadlines end by it and not by time: each but the last of these is
    the check that ends the innermost deadline, after the last one all are over.
    """

    planned: tuple[int, ...] = ()
    checks: int = 0
    ended: list[int] = field(default_factory=list)

    @property
    def done(self) -> tuple[int, ...]:
        """What to plan for a search that does the same."""
        return *self.ended, self.checks

    def is_due(self) -> bool:
        """Say whether this check ends the innermost deadline, as planned."""
        return self.checks > self.planned[-1] or self.checks in self.planned[:-1]


@dataclass(slots=True)
class Deadline:
    """When to end, by `time.monotonic` or by work, and whether somebody asked for it
    before."""

    until_s: float
    work: SearchWork
    outer: "Deadline | None" = None
    is_stopped: bool = False
    is_noticed: bool = False  # a check has found it over
    counts_time: bool = True

    def stop(self) -> None:
        """End what runs before the deadline at its next check."""
        self.is_stopped = True

    def check(self) -> float:
        """Return the seconds until the end, and count that it was asked."""
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
        """Whether somebody asked for the end of this one or of one around it."""
        return self.is_stopped or (self.outer is not None and self.outer.was_stopped)


_NONE = Deadline(until_s=math.inf, work=SearchWork())
_DEADLINE: ContextVar[Deadline] = ContextVar("deadline", default=_NONE)


@contextmanager
def deadline(
    seconds: float = math.inf, planned: tuple[int, ...] = ()
) -> Iterator[Deadline]:
    """Let what runs inside go on for so long, or for the work that is `planned`, or
    until it is stopped. The outermost one counts work from 0."""
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
    """Let what runs inside go on when the time is over, until it is stopped."""
    outer = _DEADLINE.get()
    inner = Deadline(until_s=math.inf, work=outer.work, outer=outer, counts_time=False)
    token = _DEADLINE.set(inner)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def left_s() -> float:
    """Return how long the search may still go on: 0 to infinity."""
    return _DEADLINE.get().check()


def is_over() -> bool:
    """Say whether the search has to end."""
    return left_s() == 0.0


def check_deadline() -> None:
    """Raise TimeUp where the search has to end."""
    if is_over():
        raise TimeUp


def check_stopped() -> None:
    """Raise TimeUp where somebody asked for the end: for long work that is done even
    where the time is up."""
    if _DEADLINE.get().was_stopped:
        raise TimeUp
