# SPDX-License-Identifier: Apache-2.0
"""Defines numbered leases on a folder or a store, whose one holder may write.

    lease/0000000003/holder        created once: who holds number 3
    lease/0000000003/renewed-12    a new one every few seconds while it is held
    lease/0000000003/released      created when the holder releases it

Owns taking, renewing and releasing a lease. Only the greatest number counts: the holder
of a smaller one may not write any more. What is written carries the number. A store
creates an object once (by a link on a disk, by a precondition in a bucket). That alone
decides who is first: no system lock, and no clock of another machine. Does not own what
is written under a lease (`writer.py`, `uploader.py`).
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from hetjax.checkpoint.leases.lease_holder import (
    NOBODY,
    HeldFor,
    Holder,
    holder_here,
    holder_text,
)
from hetjax.checkpoint.stores.store import Conflict, CorruptData, Store
from hetjax.errors import BadInput, RunFailed
from hetjax.files.parsing import json_value
from hetjax.files.tables import read_fields

LEASE_S = 60.0  # until a lease without renewal is over, by the waiter's clock
RENEW_S = 10.0
_LOOK_S = 0.5
_PREFIX, _HOLDER, _RENEWED, _RELEASED = "lease/", "holder", "renewed-", "released"
_END_S = 5.0  # timeout of a release: the next holder can do without it


class LeaseHeld(BadInput):
    """Another process has the lease, and renews it."""


class LeaseLost(RunFailed):
    """Another process has taken the lease over: this one must not write any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """The objects of a lease that existed at a time of this process's clock."""

    names: frozenset[str]
    at_s: float


@dataclass(frozen=True, slots=True)
class Fence:
    """Keeps a process from writing once its lease is over; number 0: no check.

    `where` tells people what the lease is for. `beside` is another fence whose lease
    must not be over either.
    """

    store: Store
    where: str
    number: int
    beside: "Fence | None" = None

    def check(self) -> None:
        """Raise LeaseLost if another process has a greater number."""
        if self.beside is not None:
            self.beside.check()
        newest = last_number(self.store) if self.number else 0
        if newest > self.number:
            raise _lost(self.store, self.where, self.number, newest)

    @contextmanager
    def around(self, undo: Callable[[], None]) -> Iterator[None]:
        """Run a block that needs the lease; call `undo` if the lease ended meanwhile.

        Raises LeaseLost.
        """
        self.check()
        yield
        try:
            self.check()
        except LeaseLost:
            undo()
            raise


class Lease:
    """A lease that this process has taken, and renews until it is released."""

    def __init__(self, fence: Fence, renew_s: float, holder: Holder) -> None:
        self.fence, self.number, self._store = fence, fence.number, fence.store
        self._holder = holder
        self._count, self._renew_s = 0, renew_s
        self._over: LeaseLost | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lease")
        self._thread.start()

    @property
    def token(self) -> str:
        """The holder's token, which is in the holder's file and unique."""
        return self._holder.token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check_seen(self) -> None:
        """Raise LeaseLost if the last renewal found that the lease is over."""
        if self._over is not None:
            raise self._over

    def release(self) -> None:
        """Release the lease, so that the next holder can begin at once."""
        self._ended.set()
        self._thread.join(_END_S)
        with suppress(OSError, BadInput):
            if not self._has_another_holder():
                self._store.put_text(_name(self.number, _RELEASED), "")

    def assert_again(self) -> None:
        """Write the holder's file again, in case another process removed it.

        Raises Conflict if another process took the same number since.
        """
        self._store.put_text(_name(self.number, _HOLDER), holder_text(self._holder))

    def forget(self) -> None:
        """Remove all objects of the released lease; its number may then be reused."""
        own = [n for n in self._store.names(_PREFIX) if _number_of(n) == self.number]
        if not self._has_another_holder():
            self._store.remove(own)

    def _has_another_holder(self) -> bool:
        """Return whether another process has taken this number.

        This can happen once all leases were removed.
        """
        found = holder_of(self._store, self.number)
        return found is not None and found.token != self._holder.token

    def _run(self) -> None:
        while not self._ended.wait(self._renew_s):
            try:
                if self._has_another_holder():
                    raise _lost(self._store, self.fence.where, self.number, self.number)
                self._renew()
                self.fence.check()
            except LeaseLost as lost:
                self._over = lost
                return
            except (OSError, BadInput) as error:  # retried at the next renewal
                with suppress(Warning):  # survives where warnings are errors
                    warnings.warn(
                        f"the lease on {self.fence.where} was not renewed ({error}); "
                        f"after {LEASE_S:g} s others may take it over",
                        stacklevel=1,
                    )

    def _renew(self) -> None:
        names = [_name(self.number, f"{_RENEWED}{n}") for n in self._next()]
        self._store.put_text(names[1], "")
        self._store.remove(names[:1])

    def _next(self) -> tuple[int, int]:
        self._count += 1
        return self._count - 1, self._count


def acquire(
    store: Store,
    where: str,
    report_line: Callable[[str], None] = lambda text: None,
    *,
    held_for: HeldFor = NOBODY,
    check: Callable[[int, Holder], None] = lambda number, holder: None,
    seen: Sighting | None = None,
    lease_s: float = LEASE_S,
    renew_s: float = RENEW_S,
) -> Lease:
    """Take the lease; raises LeaseHeld if another process has it, and OSError.

    Takes it at once from a holder that released it or is known to be dead. Otherwise
    waits until the holder has not renewed it for `lease_s`, counted from when it was
    first `seen`. `report_line` gets a message about this wait. `check` is called first
    with the number and the holder of the last lease, and may raise.
    """
    last = last_number(store)
    if last:
        holder = holder_of(store, last)
        if holder is not None:
            check(last, holder)
        _await_end(store, where, last, holder, held_for, lease_s, report_line, seen)
    number = last + 1
    own = holder_here(held_for)
    try:
        store.put_text(_name(number, _HOLDER), holder_text(own))
    except Conflict as conflict:
        raise _held(store, where, number) from conflict
    if (
        newest := last_number(store)
    ) != number:  # our file came after we were overtaken
        raise _held(store, where, newest)
    old = [name for name in store.names(_PREFIX) if _number_of(name) < number]
    store.remove(old)
    return Lease(Fence(store, where, number), renew_s, own)


def _lost(store: Store, where: str, number: int, newest: int) -> LeaseLost:
    holder = holder_of(store, newest) or "another process"
    return LeaseLost(
        got=f"{where} was taken over by {holder} (lease {newest}): this process did "
        f"not renew its lease {number} for {LEASE_S:g} s, or was assumed dead",
        allowed="one run at a time; what this process had not saved by then is lost",
        fix="let the other process continue, or stop it and run the same command again",
    )


def look(store: Store) -> Sighting:
    """Record the lease's objects now, so that waiting for its end begins now."""
    names = frozenset(_from(store, last_number(store)))
    return Sighting(names=names, at_s=time.monotonic())


def await_end(
    store: Store,
    where: str,
    report_line: Callable[[str], None],
    held_for: HeldFor,
) -> None:
    """Wait until the last lease, if any, is over; raises LeaseHeld if it is renewed."""
    last = last_number(store)
    if last:
        holder = holder_of(store, last)
        _await_end(store, where, last, holder, held_for, LEASE_S, report_line)


def _await_end(
    store: Store,
    where: str,
    last: int,
    holder: Holder | None,
    held_for: HeldFor,
    lease_s: float,
    report_line: Callable[[str], None],
    seen: Sighting | None = None,
) -> None:
    now = _from(store, last)
    if _is_over(now, last) or held_for.follows(holder):
        return
    if held_for.excludes(holder):
        raise _held(store, where, last)
    seen = seen or Sighting(names=frozenset(now), at_s=time.monotonic())
    left_s = seen.at_s + lease_s - time.monotonic()
    if left_s > 0:
        report_line(f"waiting up to {left_s:.3g} s: {where} may be in use by {holder}")
    while now == seen.names:
        if time.monotonic() >= seen.at_s + lease_s:
            return
        time.sleep(min(_LOOK_S, lease_s / 10))
        now = _from(store, last)
        if _is_over(now, last) or held_for.follows(holder):
            return
    raise _held(store, where, max(map(_number_of, now), default=last))


def is_free(store: Store) -> bool:
    """Return whether the lease was never taken, or was released by its last holder."""
    last = last_number(store)
    return not last or _is_over(_from(store, last), last)


def _from(store: Store, number: int) -> set[str]:
    """Return the names of all objects of the leases from this number on."""
    return {name for name in store.names(_PREFIX) if _number_of(name) >= number}


def _is_over(names: set[str], number: int) -> bool:
    return _name(number, _RELEASED) in names


def _held(store: Store, where: str, number: int) -> LeaseHeld:
    holder = holder_of(store, number)
    return LeaseHeld(
        got=f"{where} is in use by {holder or 'another process'} (lease {number})",
        allowed="one run at a time",
        fix="wait for it or stop it, or give another --run-dir, --checkpoint.local and "
        "--checkpoint.cloud",
    )


def holder_of(store: Store, number: int) -> Holder | None:
    """Return who took the lease of this number; None if that cannot be read."""
    try:
        text = store.get_text(_name(number, _HOLDER))
        if text is None:
            return None
        return Holder(**read_fields(json_value(text), Holder, where="holder"))
    except (CorruptData, ValueError):
        return None


def last_number(store: Store) -> int:
    """Return the greatest number of all leases so far; 0 if there was none."""
    return max(map(_number_of, store.names(_PREFIX)), default=0)


def _number_of(name: str) -> int:
    digits = name.removeprefix(_PREFIX).partition("/")[0]
    return int(digits) if digits.isdecimal() else 0


def _name(number: int, part: str) -> str:
    return f"{_PREFIX}{number:010d}/{part}"
