# SPDX-License-Identifier: Apache-2.0
"""A committed step from a store: whole, next to what is left of it, or by the slice.

Owns which files are fetched: those that are missing here or not as written, and nothing
else. Does not own the store (`store.py`), its commits (`commit.py`) nor reading what is
then complete (`restore.py`).
"""

import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetjax.checkpoint.commit import committed_steps, manifests, object_name
from hetjax.checkpoint.durable import replace_text
from hetjax.checkpoint.format import MANIFEST, part_directory, step_directory
from hetjax.checkpoint.manifest import FileRecord, Manifest, flaw, to_text
from hetjax.checkpoint.reader import DamagedCheckpoint, merged
from hetjax.checkpoint.recovery_plan import CLOUD, Holding
from hetjax.checkpoint.stores.store import Corrupt, Store
from hetjax.names import inside

_NUM_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """A step that is whole on the disk now, and what came from where."""

    step: int
    disk_bytes: int
    cloud_bytes: int
    seconds: float


def fetch_newest(store: Store, directory: Path, after: int = -1) -> Fetched | None:
    """Complete the newest committed step on the disk; None if none is after `after`.

    Files that are here are read and checked. Raises OSError where the store fails.
    """
    committed = committed_steps(store)
    if not committed or committed[-1] <= after:
        return None
    return fetch(store, directory, committed[-1])


def fetch(store: Store, directory: Path, step: int) -> Fetched:
    """Complete a committed step on the disk, each worker's manifest last."""
    start_s = time.perf_counter()
    found = manifests(store, step)
    files = [(m, name, record) for m in found for name, record in m.files.items()]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sources = list(pool.map(lambda file: _complete(store, directory, *file), files))
    for manifest in found:
        own = part_directory(directory, step, manifest.worker)
        replace_text(own / MANIFEST, to_text(manifest))
    num_bytes = {True: 0, False: 0}
    for was_here, (_, _, record) in zip(sources, files, strict=True):
        num_bytes[was_here] += record.size_bytes
    return Fetched(
        step=step,
        disk_bytes=num_bytes[True],
        cloud_bytes=num_bytes[False],
        seconds=time.perf_counter() - start_s,
    )


def in_store(store: Store | None) -> list[Holding]:
    """What a store has of each committed step; nothing if there is no store.

    A step that cannot be used is left out, with a warning.
    """
    found = []
    for step in [] if store is None else committed_steps(store):
        assert store is not None
        try:
            step_ = merged(Path(), manifests(store, step))
        except (Corrupt, DamagedCheckpoint, FileNotFoundError) as damage:
            warnings.warn(f"step {step} in {store} is not used: {damage}", stacklevel=2)
            continue
        found.append(
            Holding(
                worker=CLOUD,
                tier="cloud",
                save=(step, step_.attempt),
                leaves=frozenset(step_.leaves),
                host=step_.host,
            )
        )
    return found


class Stored:
    """A committed step of a store, whose slices are fetched one by one.

    Files come into `directory`, which should hold nothing else. Raises
    FileNotFoundError and Corrupt as `manifests` does.
    """

    def __init__(self, store: Store, step: int, directory: Path) -> None:
        self._store = store
        path = step_directory(directory, step)
        self.checkpoint = merged(path, manifests(store, step))

    def read(self, leaf: str) -> np.ndarray:
        """The value of a slice; raises OSError where the store fails."""
        found = self.checkpoint.leaf(leaf)
        for path, record in found.files.items():
            name = str(path.relative_to(self.checkpoint.path))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._store.get(object_name(self.checkpoint.step, name), path, record)
        (value,) = self.checkpoint.read_leaves([leaf])
        shutil.rmtree(found.path)
        return value


def _complete(
    store: Store, directory: Path, manifest: Manifest, name: str, record: FileRecord
) -> bool:
    """Whether the file was here; fetch it otherwise."""
    own = part_directory(directory, manifest.step, manifest.worker)
    path = inside(own, name)
    if flaw(path, record) is None:
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    store.get(object_name(manifest.step, manifest.worker, name), path, record)
    return False
