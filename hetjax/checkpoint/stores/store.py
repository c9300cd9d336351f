# SPDX-License-Identifier: Apache-2.0
"""What a store is, and how bytes come and go safely, whatever the store.

Owns the protocol and the errors of stores, attempts and the pauses between them, the
checked receipt of a file, the bandwidth that upload threads share, and the limit of
each call. A call that is given up goes on in a thread of its own until its own end, and
nobody waits for it: objects are created once and files are put in place whole, so it
can do no harm. Does not own where the bytes are kept (`local.py`, `gcs.py`, `s3.py`).
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
CALL_S = 60.0  # for a list, a text or a removal
LAST_UPLOAD_S = 3600.0  # for what is still on its way when a run ends
_SLOWEST_BYTES_PER_S = 50e3  # of a file that is given up no sooner
_NUM_SHARES = 16  # of the limit of uploads, at most
_MAX_PAUSE_S = 30.0
_T = TypeVar("_T")


class Store(Protocol):
    """Named objects that are created once; safe to use from several threads.

    What fails for good raises StoreError: which object, how often it was tried, why.
    Uploads share the bandwidth of `limit`.
    """

    limit: "BandwidthLimit"

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        """Create an object; the same one being there already is success.

        Raises Conflict where it is there with another content, CorruptData where the
        file is not what its record says.
        """

    def put_text(self, name: str, text: str) -> None:
        """Create an object with this text, under the same rules."""

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        """Download an object; the file is in place only once it equals its record.

        Raises FileNotFoundError where there is none, CorruptData where it stays wrong.
        """

    def get_text(self, name: str) -> str | None:
        """The text of an object; None where there is none."""

    def names(self, prefix: str) -> list[str]:
        """Names that begin with the prefix, sorted."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in this order; missing ones are skipped."""

    def written_s(self, name: str) -> float:
        """When an object was written, in seconds since 1970 by the store's clock."""
        ...


class StoreError(OSError):
    """A store did not do what was asked, after all attempts that made sense."""


class CorruptData(StoreError):
    """Bytes that are not what their record says."""


class AccessDenied(StoreError):
    """The store does not let us: no permission, or no valid credentials."""


class Conflict(BadInput):
    """An object that is there already, with another content."""


class TransientError(Exception):
    """A fault that may not occur at the next attempt."""


class BandwidthLimit:
    """A limit in bytes per second that threads share, first come, first served."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        assert bytes_per_s > 0, bytes_per_s
        self.bytes_per_s = bytes_per_s
        self._lock, self._lifted = threading.Lock(), threading.Event()
        self._free_at_s = 0.0

    def reserve(self, num_bytes: int, now_s: float) -> float:
        """Seconds from now until these bytes and all reserved before have passed."""
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
    """Try until it works: up to NUM_ATTEMPTS times, pauses doubling from `pause_s`.

    Only `TransientError` and `CorruptData` are tried again; pauses are random up to
    their limit, so that many workers do not return all at once.
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
    """The text of an object, which is UTF-8 as it was written; raises CorruptData."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptData(f"{where} is no text at byte {error.start}") from error


def check_source(path: Path, record: FileRecord) -> None:
    """Raise before bytes that are not what the record says go anywhere."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is gone, it cannot be uploaded")
    if wrong := mismatch(path, record):
        raise CorruptData(f"not uploaded: {wrong}")


def check_same(url: str, found: FileRecord, expected: FileRecord) -> None:
    """Raise Conflict unless the object that is there already is the one we want."""
    if found != expected:
        raise Conflict(
            got=f"{url} is there already, with crc32c {found.crc32c} and "
            f"{found.size_bytes} bytes",
            allowed=f"no such object, or one with crc32c {expected.crc32c} and "
            f"{expected.size_bytes} bytes: objects are never overwritten",
            fix="give every run its own folder in the store, or remove what an "
            "earlier run left there",
        )


class TimeLimitedStore:
    """A store whose every call ends: with its result, or with StoreError at its limit.

    The limit is CALL_S, and for a file also the time that it takes at the slowest rate.
    """

    def __init__(self, store: Store) -> None:
        self._store, self.limit = store, store.limit

    def __str__(self) -> str:
        return str(self._store)

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        share = self.limit.bytes_per_s / _NUM_SHARES
        limit_s = CALL_S + record.size_bytes / min(_SLOWEST_BYTES_PER_S, share)
        what = f"writing {name} to {self}"
        within(limit_s, what, lambda: self._store.put(name, path, record))

    def put_text(self, name: str, text: str) -> None:
        what = f"writing {name} to {self}"
        within(CALL_S, what, lambda: self._store.put_text(name, text))

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        limit_s = CALL_S + record.size_bytes / _SLOWEST_BYTES_PER_S
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
    """What `act` returns or raises; after `limit_s` StoreError, naming `what`."""
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
        if outcome.done():  # it is the store's own
            raise
        raise StoreError(f"{what}: no answer within {limit_s:.0f} s") from error
