# SPDX-License-Identifier: Apache-2.0
"""Simulates an object store that is slow, refuses calls, or is away for a while.

Owns the objects, and the outcome of calls. Each call ends with its result or, at its
limit, with StoreError, as in a real store (`checkpoint/stores/store.py`). A call that
was given up may still take effect later. Does not own when faults occur
(`store_faults.py`) nor the content (the product's uploader).
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from experiments.simulation.disk import TORN
from experiments.simulation.threads import sleep
from experiments.simulation.world import World
from hetjax.checkpoint.file_records import FileRecord, record_of_bytes
from hetjax.checkpoint.stores.store import (
    CALL_S,
    BandwidthLimit,
    Conflict,
    CorruptData,
    StoreError,
    check_same,
)

_TAKES_S = 0.01, 0.1
_AFTER_S = 2.0  # most time until an abandoned call takes effect, once the store answers
_Found = TypeVar("_Found")
Content = str | int  # a text, or the value of a leaf


def record_of(value: int) -> FileRecord:
    """Return the record of a leaf's file."""
    return FileRecord(size_bytes=8, crc32c=str(value))


@dataclass
class Bucket:
    """The store's objects and condition; `changed` receives each name that changes.

    One call in `refuses_one_in` is refused, though some of these take effect
    nevertheless.
    """

    world: World
    changed: Callable[[str], None] = lambda name: None
    objects: dict[str, Content] = field(default_factory=dict)
    slowness: float = 1.0
    away_until_s: float = 0.0
    refuses_one_in: float = 0.0  # 0: none
    last_trouble_s: float = -1e9

    def trouble(self, until_s: float) -> None:
        """Excuse everything that needs the store until then."""
        self.last_trouble_s = max(self.last_trouble_s, until_s)

    def create(self, name: str, content: Content) -> None:
        if name in self.objects:
            found = _record(self.objects[name])
            return check_same(name, found, _record(content))
        self.objects[name] = content
        self.changed(name)

    def remove(self, name: str) -> None:
        if self.objects.pop(name, None) is not None:
            self.changed(name)


class SimStore:
    """`Store` of a bucket; `read` returns a file's value, or None if it is gone."""

    def __init__(
        self, bucket: Bucket, read: Callable[[Path], int | None] = lambda path: None
    ) -> None:
        self._bucket, self._read = bucket, read
        self.limit = BandwidthLimit()
        self.fetched: dict[Path, int] = {}

    def __str__(self) -> str:
        return "the store"

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        value = self._read(path)
        if value is None:
            raise FileNotFoundError(f"{path} is gone and cannot be uploaded")
        if record_of(value) != record:
            raise CorruptData(f"not uploaded: {path}")
        self._call(lambda: self._bucket.create(name, value))

    def put_text(self, name: str, text: str) -> None:
        self._call(lambda: self._bucket.create(name, text))

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        value = self._call(lambda: self._bucket.objects.get(name))
        if value is None:
            raise FileNotFoundError(name)
        if not isinstance(value, int) or record_of(value) != record:
            raise CorruptData(f"{name} is not as it was written")
        self.fetched[path] = value

    def get_text(self, name: str) -> str | None:
        found = self._call(lambda: self._bucket.objects.get(name))
        assert found is None or isinstance(found, str), name
        return found

    def names(self, prefix: str) -> list[str]:
        """List the names; one that comes or goes meanwhile may be among them or not."""
        before = {*self._bucket.objects}
        after = self._call(lambda: {*self._bucket.objects})
        chance = self._bucket.world.random
        for name in sorted(before ^ after):
            if chance.random() < 0.5:
                after ^= {name}
        return sorted(name for name in after if name.startswith(prefix))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._call(lambda name=name: self._bucket.remove(name))

    def written_s(self, name: str) -> float:
        raise NotImplementedError  # no simulated run calls this

    def _call(self, act: Callable[[], _Found]) -> _Found:
        bucket, world = self._bucket, self._bucket.world
        takes_s = world.random.uniform(*_TAKES_S) * bucket.slowness
        sleep(world, min(takes_s, CALL_S))
        if world.now_s < bucket.away_until_s:
            return self._given_up(act)
        if takes_s > CALL_S / 2:
            bucket.trouble(world.now_s)
        if takes_s > CALL_S:
            raise StoreError("no answer in time")
        if bucket.refuses_one_in and world.one_in(bucket.refuses_one_in):
            bucket.trouble(world.now_s)
            if world.one_in(3):
                with suppress(Conflict):
                    act()
            raise StoreError("refused")
        return act()

    def _given_up(self, act: Callable[[], _Found]) -> _Found:
        """Answer late if the store returns in time.

        Otherwise the call fails, and takes effect later or never.
        """
        bucket, world = self._bucket, self._bucket.world
        bucket.trouble(world.now_s)
        left_s = bucket.away_until_s - world.now_s + world.random.uniform(0, _AFTER_S)
        if left_s < CALL_S:
            sleep(world, left_s)
            return act()
        if world.one_in(2):

            def late() -> None:
                with suppress(Conflict):
                    act()

            world.after(left_s, late)
        sleep(world, CALL_S)
        bucket.trouble(world.now_s)
        raise StoreError(f"no answer within {CALL_S:g} s")


def _record(content: Content) -> FileRecord:
    if isinstance(content, int):
        return record_of(content)
    return record_of_bytes(content.encode())


def spoilt(content: Content) -> Content:
    """Return what remains of an object that was damaged in the store."""
    return TORN if isinstance(content, int) else content[: len(content) // 2]
