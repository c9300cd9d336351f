# SPDX-License-Identifier: Apache-2.0
"""Keeps checkpoints in a folder that outlives the machine, on a shared file system.

Owns `FileStore`: objects as files that are created once and never overwritten. Does not
own the store protocol, retries and checks (`store.py`).
"""

import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetjax.checkpoint.disk import fsync
from hetjax.checkpoint.file_records import FileRecord, record_of_bytes, record_of_file
from hetjax.checkpoint.stores.store import (
    CALL_S,
    BandwidthLimit,
    CorruptData,
    Store,
    StoreError,
    TimeLimitedStore,
    check_same,
    check_source,
    receive,
    retry,
    text_of,
    within,
)
from hetjax.errors import BadInput
from hetjax.files.reading import Unreadable, opened, read_bytes
from hetjax.names import inside

_BUILDING = ".parts"  # next to the objects, so that a link can put them in place
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_OLD_S = 24 * 3600.0
_NUM_LINKS = 5
_CHUNK_BYTES = 1 << 20


class FileStore:
    """Objects as files of a directory, on any file system with hard links.

    If not `needs_links`, works without them; then objects may be seen before they are
    whole.
    """

    def __init__(
        self,
        directory: Path,
        limit: BandwidthLimit | None = None,
        pause_s: float = 0.1,
        needs_links: bool = True,
    ) -> None:
        self._directory, self._pause_s = directory, pause_s
        self._needs_links = needs_links
        self.limit = limit or BandwidthLimit()

    def __str__(self) -> str:
        return str(self._directory)

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        check_source(path, record)
        target = inside(self._directory, name)
        if target.exists():
            return check_same(str(target), record_of_file(target), record)
        with self._part() as part:
            _copy(path, part, self.limit)
            self._link(part, target, record)

    def put_text(self, name: str, text: str) -> None:
        data = text.encode()
        with self._part() as part:
            part.write_bytes(data)
            fsync(part)
            self._link(part, inside(self._directory, name), record_of_bytes(data))

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        source = inside(self._directory, name)

        def attempt() -> None:
            receive(path, record, lambda part: _copy(source, part, BandwidthLimit()))

        retry(str(source), attempt, self._pause_s)

    def get_text(self, name: str) -> str | None:
        path = inside(self._directory, name)
        try:
            return text_of(read_bytes(path, what="object"), str(path))
        except FileNotFoundError:
            return None
        except Unreadable as error:
            raise CorruptData(error.got) from error

    def names(self, prefix: str) -> list[str]:
        folder = prefix.rpartition("/")[0]
        top = inside(self._directory, *[folder] * bool(folder))
        found = []
        for folder, folders, files in os.walk(top):
            if Path(folder) == self._directory and _BUILDING in folders:
                folders.remove(_BUILDING)
            within = Path(folder).relative_to(self._directory)
            found += [str(within / file) for file in files]
        return sorted(name for name in found if name.startswith(prefix))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = inside(self._directory, name)
            path.unlink(missing_ok=True)
            with suppress(OSError):  # up to the first folder that is not empty
                while (path := path.parent) != self._directory:
                    path.rmdir()

    def written_s(self, name: str) -> float:
        return inside(self._directory, name).stat().st_mtime

    def remove_old_parts(self) -> None:
        """Remove files of uploads killed long ago; newer ones may still be running.

        The age is measured by the store's clock: ours may be wrong.
        """
        with self._part() as probe:
            probe.touch()
            now_s = probe.stat().st_mtime
        for part in (self._directory / _BUILDING).glob("*"):
            with suppress(FileNotFoundError):
                if part.stat().st_mtime < now_s - _OLD_S:
                    part.unlink()

    @contextmanager
    def _part(self) -> Iterator[Path]:
        """Yield the path where an object is written before it is put in place."""
        building = self._directory / _BUILDING
        building.mkdir(parents=True, exist_ok=True)
        part = building / uuid.uuid4().hex
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)

    def _link(self, part: Path, target: Path, expected: FileRecord) -> None:
        """Put a complete file in place unless one exists, which no rename can do."""
        if record_of_file(part) != expected:
            raise CorruptData(f"{part}, made for {target}, is not what was written")
        for _ in range(_NUM_LINKS):
            try:
                _make(target.parent)
                self._place(part, target)
                return fsync(target.parent)
            except FileExistsError:
                return check_same(str(target), record_of_file(target), expected)
            except FileNotFoundError:  # another worker removed the empty folder
                continue
        raise StoreError(
            f"{target}: tried {_NUM_LINKS} times, but its folder keeps vanishing"
        )

    def _place(self, part: Path, target: Path) -> None:
        try:
            os.link(part, target)
        except OSError as error:
            if self._needs_links or error.errno not in _NO_LINKS:
                raise
            with target.open("xb") as file:  # also decides who is first
                file.write(part.read_bytes())
                file.flush()
                os.fsync(file.fileno())


def open_directory(
    directory: Path, limit: BandwidthLimit, is_tried: bool = True
) -> Store:
    """Open the store, and if `is_tried`, write there; BadInput if that fails."""
    files = FileStore(directory, limit)
    store, probe = TimeLimitedStore(files), uuid.uuid4().hex
    if not is_tried:
        return store
    try:
        store.put_text(probe, "")
        store.remove([probe])
        within(CALL_S, f"listing {directory}", files.remove_old_parts)
    except StoreError:
        raise  # the folder does not respond at all
    except OSError as error:
        raise BadInput(
            got=f"checkpoint store {directory} cannot be used "
            f"({error.strerror or error})",
            allowed="a folder that you may write to, on a file system with hard links",
            fix="choose another folder, or gs://BUCKET/PREFIX",
        ) from error
    return store


def _copy(source: Path, target: Path, limit: BandwidthLimit) -> None:
    """Copy a plain file; raises StoreError for another kind."""
    try:
        with opened(source, what="object") as reader, target.open("wb") as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                limit.spend(len(chunk))
                writer.write(chunk)
            writer.flush()
            os.fsync(writer.fileno())
    except Unreadable as error:
        raise StoreError(error.got) from error


def _make(directory: Path) -> None:
    """Make a folder and its missing parents, each durable."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        fsync(directory.parent)
