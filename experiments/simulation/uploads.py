# SPDX-License-Identifier: Apache-2.0
"""Runs the product's uploader, and its reader of stored steps, on simulated disks.

Owns the substitutes for the files of a worker's part: its manifest, and its leaves'
values. Does not own the order of an upload (`hetjax/checkpoint/uploader.py`), which
steps are complete (`stored_steps.py`) nor the store (`object_store.py`).
"""

from pathlib import Path

import numpy as np

from experiments.simulation.disk import Disk, Written
from experiments.simulation.object_store import Bucket, SimStore, record_of
from experiments.simulation.storage import DIRECTORY, SimStorage
from hetjax.checkpoint.format import (
    MANIFEST,
    Entry,
    Manifest,
    step_of,
    to_text,
)
from hetjax.checkpoint.reader import Checkpoint, merge
from hetjax.checkpoint.stored_steps import manifests, object_name
from hetjax.checkpoint.uploader import Uploader

_STATE = "state"
_TYPE = np.dtype("int64")


def entry_of(leaf: str) -> Entry:
    """Return the entry of a layer's array, which has one slice."""
    return Entry(leaf.removesuffix(".0of1"), (1,), _TYPE, (0, 1))


def manifest_of(step: int, worker: str, written: Written) -> Manifest:
    return Manifest(
        step=step,
        worker=worker,
        workers=written.workers,
        entries=tuple(entry_of(leaf) for leaf in written.in_manifest),
        host=written.host,
        state=_STATE,
        files={
            f"{_STATE}/{leaf}/c": record_of(v)
            for leaf, v in written.in_manifest.items()
        },
    )


class PartFiles:
    """The files of a worker's parts on a disk, by path."""

    def __init__(self, disk: Disk, worker: str) -> None:
        self._disk, self._worker = disk, worker

    def text(self, path: Path) -> str:
        """Return the text of a manifest. Raises FileNotFoundError."""
        assert path.name == MANIFEST, path
        step, written = self._found(path.parent)
        return to_text(manifest_of(step, self._worker, written))

    def value(self, path: Path) -> int | None:
        part = path.parent.parent.parent
        try:
            return self._found(part)[1].leaves.get(path.parent.name)
        except FileNotFoundError:
            return None

    def _found(self, part: Path) -> tuple[int, Written]:
        step = step_of(part.parent.name)
        assert step is not None, part
        found = self._disk.parts.get((step, self._worker))
        if found is None or found.committed is None:
            raise FileNotFoundError(part)
        return step, found.committed


def uploader_of(storage: SimStorage, disk: Disk, worker: str) -> Uploader:
    """Return a real uploader; its thread belongs to the process that calls this."""
    assert storage.bucket is not None
    files = PartFiles(disk, worker)
    return Uploader(
        SimStore(storage.bucket, files.value),
        DIRECTORY,
        worker,
        num_threads=2,
        keep=storage.keep,
        fence=storage.store_fence(),
        read_text=files.text,
    )


class Fetched:
    """A committed step in a store. Raises OSError as `manifests` does."""

    def __init__(self, bucket: Bucket, step: int) -> None:
        self._store = SimStore(bucket)
        self._step = step
        self._found: Checkpoint = merge(Path(), manifests(self._store, step))

    def read(self, leaf: str) -> int | None:
        """Return a leaf's value; None if it cannot be read as it was written."""
        ((path, record),) = self._found.leaf(leaf).files.items()
        try:
            self._store.get(object_name(self._step, str(path)), path, record)
        except OSError:
            return None
        return self._store.fetched.pop(path)
