# SPDX-License-Identifier: Apache-2.0
"""How bytes come and go safely, whatever the store: attempts, checks, bandwidth.

Owns what a store is, the errors of stores, the back-off between attempts, the checked
receipt of a file, and the limit that upload threads share. Does not own where the bytes
are kept (`store.py`, `gcs.py`).
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from hetjax.checkpoint.manifest import FileRecord, flaw
from hetjax.errors import BadInput

NUM_ATTEMPTS = 10
_MAX_PAUSE_S = 30.0
_T = TypeVar("_T")


class Store(Protocol):
    """Named objects that are created once; safe to use from several threads.

    What fails for good raises `StoreError`: which object, how often it was tried, why.
    """

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        """Create an object; the same one being there already is success.

        Raises Conflict where it is there with another content, Corrupt where the file
        is not what its record says.
        """
        ...

    def put_text(self, name: str, text: str) -> None:
        """Create an object with this text, under the same rules."""
        ...

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        """Download an object; the file is in place only once it equals its record.

        Raises FileNotFoundError where there is none, Corrupt where it stays wrong.
        """
        ...

    def get_text(self, name: str) -> str | None:
        """The text of an object; None where there is none."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Names that begin with the prefix, sorted."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in this order; those that are not there are passed over."""
        ...

    def lift_limit(self) -> None:
        """Let uploads take all the bandwidth there is, from now on."""
        ...


class StoreError(OSError):
    """A store did not do what was asked, after all attempts that made sense."""


class Corrupt(StoreError):
    """Bytes that are not what their record says."""


class Refused(StoreError):
    """The store does not let us: no permission, or no valid credentials."""


class Conflict(BadInput):
    """An object that is there already, with another content."""


class Passing(Exception):
    """A fault that may be gone at the next attempt."""


class Bandwidth:
    """A limit in bytes per second that threads share, first come, first served."""

    def __init__(self, bytes_per_s: float) -> None:
        assert bytes_per_s > 0, bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._lock, self._lifted = threading.Lock(), threading.Event()
        self._free_at_s = 0.0

    def reserve(self, num_bytes: int, now_s: float) -> float:
        """Seconds from now until these bytes and all reserved before have passed."""
        with self._lock:
            start_s = max(self._free_at_s, now_s)
            self._free_at_s = start_s + num_bytes / self._bytes_per_s
            return self._free_at_s - now_s

    def take(self, num_bytes: int) -> None:
        """Return once these bytes may pass."""
        self._lifted.wait(self.reserve(num_bytes, time.monotonic()))

    def lift(self) -> None:
        """Let all bytes pass from now on, those that wait too."""
        self._lifted.set()


def persist(what: str, attempt: Callable[[], _T], pause_s: float) -> _T:
    """Try until it works: up to NUM_ATTEMPTS times, pauses doubling from `pause_s`.

    Only `Passing` and `Corrupt` are tried again; pauses are random up to their limit,
    so that many workers do not come back all at once.
    """
    for number in range(1, NUM_ATTEMPTS + 1):
        try:
            return attempt()
        except (Passing, Corrupt) as error:
            if number == NUM_ATTEMPTS:
                kind = Corrupt if isinstance(error, Corrupt) else StoreError
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
        if wrong := flaw(part, record):
            raise Corrupt(wrong)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def check_source(path: Path, record: FileRecord) -> None:
    """Raise before bytes that are not what the record says go anywhere."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is gone, it cannot be uploaded")
    if wrong := flaw(path, record):
        raise Corrupt(f"not uploaded: {wrong}")


def conflict(url: str, found: str, expected: FileRecord) -> Conflict:
    """The error for an object that is there with another content."""
    return Conflict(
        got=f"{url} is there already, {found}",
        allowed=f"no such object, or one with crc32c {expected.crc32c} and "
        f"{expected.size_bytes} bytes: objects are never overwritten",
        fix="give every run its own folder in the store, or remove what an earlier "
        "run left there",
    )
