# SPDX-License-Identifier: Apache-2.0
"""Defines stores, and moves bytes safely to and from any of them.

Owns the protocol and the errors of stores, retries and their pauses, the checked
receipt of a file, the bandwidth that upload threads share, and the timeout of each
call. A call that timed out continues in its own thread to its end, and nothing waits
for it. It does no harm: objects are created once and files are put in place whole. Does
not own where the bytes are kept (`local.py`, `gcs.py`, `s3.py`).
"""

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

from hetjax.checkpoint.file_records import FileRecord, mismatch
from hetjax.errors import BadInput

NUM_ATTEMPTS = 10
CALL_S = 60.0  # timeout of a list, a text or a removal
LAST_UPLOAD_S = 3600.0  # timeout of uploads in flight when a run ends
SLOWEST_BYTES_PER_S = 50e3  # the timeout of a file allows for this rate
_NUM_SHARES = 16  # at most, of the upload limit
_MAX_PAUSE_S = 30.0
_T = TypeVar("_T")


class Store(Protocol):
    """Named objects that are created once; safe to use from several threads.

    A permanent failure raises StoreError: which object, how many attempts, why. Uploads
    share the bandwidth of `limit`.
    """

    limit: "BandwidthLimit"

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        """Create an object; it is no error if the same object exists.

        Raises Conflict if it exists with other content, CorruptData if the file differs
        from its record.
        """

    def put_text(self, name: str, text: str) -> None:
        """Create an object with this text, under the same rules."""

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        """Download an object; the file is in place only once it equals its record.

        Raises FileNotFoundError if there is none, CorruptData if it stays wrong.
        """

    def get_text(self, name: str) -> str | None:
        """Return the text of an object; None if there is none."""

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with the prefix, sorted."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in this order; skip missing ones."""

    def written_s(self, name: str) -> float:
        """Return when an object was written, in seconds since 1970 (store's clock)."""
        ...


class StoreError(OSError):
    """A store did not do what was asked, after all attempts that made sense."""


class CorruptData(StoreError):
    """Bytes that differ from their record."""


class AccessDenied(StoreError):
    """The store denies access: no permission, or no valid credentials."""


class Conflict(BadInput):
    """An object that exists already, with other content."""


class TransientError(Exception):
    """A fault that may not recur at the next attempt."""


class BandwidthLimit:
    """A limit in bytes per second that threads share, first come, first served."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        assert bytes_per_s > 0, bytes_per_s
        self.bytes_per_s = bytes_per_s
        self._lock, self._lifted = threading.Lock(), threading.Event()
        self._free_at_s = 0.0

    def reserve(self, num_bytes: int, now_s: float) -> float:
        """Return the seconds until these bytes and all reserved before have passed."""
        with self._lock:
            start_s = max(self._free_at_s, now_s)
            self._free_at_s = start_s + num_bytes / self.bytes_per_s
            return self._free_at_s - now_s

    def spend(self, num_bytes: int) -> None:
        """Return once these bytes may pass."""
        self._lifted.wait(self.reserve(num_bytes, time.monotonic()))

    def lift(self) -> None:
        """Let all bytes pass from now on, including those that wait."""
        self._lifted.set()


def retry(what: str, attempt: Callable[[], _T], pause_s: float) -> _T:
    """Call `attempt` until it succeeds, up to NUM_ATTEMPTS times.

    Retries only after `TransientError` and `CorruptData`. Pauses are random up to a
    limit that doubles from `pause_s`, so that many workers do not return all at once.
    """
    for number in range(1, NUM_ATTEMPTS + 1):
        try:
            return attempt()
        except (TransientError, CorruptData) as error:
            if number == NUM_ATTEMPTS:
                kind = CorruptData if isinstance(error, CorruptData) else StoreError
                text = f"{what}: tried {number} times, the last time: {error}"
                raise kind(text) from error
        limit_s = min(pause_s * 2 ** (number - 1), _MAX_PAUSE_S)
        time.sleep(random.uniform(0, limit_s))
    raise AssertionError("the last attempt returns or raises")


def receive(path: Path, record: FileRecord, download: Callable[[Path], None]) -> None:
    """Put a file in place only once `download` wrote it as its record says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        download(part)
        if wrong := mismatch(part, record):
            raise CorruptData(wrong)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def text_of(data: bytes, where: str) -> str:
    """Return the text of an object, which is UTF-8; raises CorruptData if it is not."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptData(f"{where} is not UTF-8 at byte {error.start}") from error


def check_source(path: Path, record: FileRecord) -> None:
    """Raise if a file is missing or differs from its record, before it is sent."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is gone and cannot be uploaded")
    if wrong := mismatch(path, record):
        raise CorruptData(f"not uploaded: {wrong}")


def check_same(url: str, found: FileRecord, expected: FileRecord) -> None:
    """Raise Conflict unless the existing object is as expected."""
    if found != expected:
        raise Conflict(
            got=f"{url} already exists, with crc32c {found.crc32c} and "
            f"{found.size_bytes} bytes",
            allowed=f"no such object, or one with crc32c {expected.crc32c} and "
            f"{expected.size_bytes} bytes: objects are never overwritten",
            fix="give every run its own folder in the store, or remove what an "
            "earlier run left there",
        )


class TimeLimitedStore:
    """A store whose every call ends: with its result, or with StoreError on timeout.

    The timeout is CALL_S, for a file plus the time that it takes at the slowest rate.
    """

    def __init__(self, store: Store) -> None:
        self._store, self.limit = store, store.limit

    def __str__(self) -> str:
        return str(self._store)

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        share = self.limit.bytes_per_s / _NUM_SHARES
        limit_s = CALL_S + record.size_bytes / min(SLOWEST_BYTES_PER_S, share)
        what = f"writing {name} to {self}"
        within(limit_s, what, lambda: self._store.put(name, path, record))

    def put_text(self, name: str, text: str) -> None:
        what = f"writing {name} to {self}"
        within(CALL_S, what, lambda: self._store.put_text(name, text))

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        limit_s = CALL_S + record.size_bytes / SLOWEST_BYTES_PER_S
        what = f"reading {name} of {self}"
        within(limit_s, what, lambda: self._store.get(name, path, record))

    def get_text(self, name: str) -> str | None:
        what = f"reading {name} of {self}"
        return within(CALL_S, what, lambda: self._store.get_text(name))

    def names(self, prefix: str) -> list[str]:
        what = f"listing {prefix}* of {self}"
        return within(CALL_S, what, lambda: self._store.names(prefix))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            what = f"removing {name} of {self}"
            within(CALL_S, what, lambda name=name: self._store.remove([name]))

    def written_s(self, name: str) -> float:
        what = f"looking at {name} of {self}"
        return within(CALL_S, what, lambda: self._store.written_s(name))


def within(limit_s: float, what: str, act: Callable[[], _T]) -> _T:
    """Return or raise what `act` does, or a StoreError with `what` after `limit_s`."""
    try:
        return answer_within(limit_s, act)
    except NoAnswer as error:
        raise StoreError(f"{what}: no answer within {limit_s:.0f} s") from error


class NoAnswer(TimeoutError):
    """A call has not ended within its limit."""


def answer_within(limit_s: float, act: Callable[[], _T]) -> _T:
    """Return or raise what `act` does in a thread, or NoAnswer after `limit_s`.

    The thread then continues: nothing can end a thread that waits for a dead disk.
    """
    outcome: Future[_T] = Future()

    def work() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True, name="store").start()
    try:
        return outcome.result(limit_s)
    except TimeoutError as error:
        if outcome.done():  # the call's own timeout
            raise
        raise NoAnswer from error
