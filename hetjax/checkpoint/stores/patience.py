# SPDX-License-Identifier: Apache-2.0
"""Calls to a store that end, whatever the store does.

Owns the limits of a call and giving it up. What is given up goes on in a thread of its
own until its own end, and nobody waits for it: objects are created once and files are
put in place whole, so it can do no harm. Does not own attempts (`transfer.py`).
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from hetjax.checkpoint.manifest import FileRecord
from hetjax.checkpoint.stores.store import Store, StoreError

CALL_S = 60.0  # for a list, a text or a removal
LAST_UPLOAD_S = 3600.0  # for what is still on its way when a run ends
_SLOWEST_BYTES_PER_S = 50e3  # of a file that is given up no sooner
_NUM_SHARES = 16  # of the limit of uploads, at most
_T = TypeVar("_T")


class Patient:
    """A store of which each call ends: as it should, or with StoreError at its limit.

    That is CALL_S, and for a file the time that it takes at the slowest rate besides;
    `bytes_per_s` is the limit that uploads share.
    """

    def __init__(self, store: Store, bytes_per_s: float | None = None) -> None:
        self._store, self._slowest = store, _SLOWEST_BYTES_PER_S
        if bytes_per_s is not None:
            self._slowest = min(self._slowest, bytes_per_s / _NUM_SHARES)

    def __str__(self) -> str:
        return str(self._store)

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        limit_s = CALL_S + record.size_bytes / self._slowest
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

    def lift_limit(self) -> None:
        self._store.lift_limit()


def within(limit_s: float, what: str, act: Callable[[], _T]) -> _T:
    """What `act` returns or raises; StoreError naming what was waited for too long."""
    told: Future[_T] = Future()

    def work() -> None:
        try:
            told.set_result(act())
        except BaseException as error:
            told.set_exception(error)

    threading.Thread(target=work, daemon=True, name="store").start()
    try:
        return told.result(limit_s)
    except TimeoutError as error:
        if told.done():  # it is the store's own
            raise
        raise StoreError(f"{what}: no answer within {limit_s:.0f} s") from error
