# SPDX-License-Identifier: Apache-2.0
"""Fetches steps from a store: whole steps to the disk, or single slices.

Owns the choice of files to fetch: only those that are missing on the disk or differ
from their record. Does not own which steps a store has (`stored_steps.py`) nor reading
the completed steps (`reader.py`).
"""

import shutil
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetjax.checkpoint.disk import replace_text
from hetjax.checkpoint.file_records import FileRecord, mismatch
from hetjax.checkpoint.format import (
    MANIFEST,
    Manifest,
    part_directory,
    step_directory,
    to_text,
)
from hetjax.checkpoint.reader import merge
from hetjax.checkpoint.run_identity import RunIdentity, is_ours
from hetjax.checkpoint.stored_steps import committed_steps, manifests, object_name
from hetjax.checkpoint.stores.store import CorruptData, Store
from hetjax.names import inside

_NUM_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchResult:
    """A step that is now complete on the disk, and the bytes from each source."""

    step: int
    disk_bytes: int
    cloud_bytes: int
    seconds: float


def fetch_newest(
    store: Store,
    directory: Path,
    after: int = -1,
    key: bytes | None = None,
    run: RunIdentity | None = None,
) -> FetchResult | None:
    """Complete the run's newest undamaged step on the disk; None if the store has none.

    Considers only steps after `after`, because earlier ones are on the disk. Reads and
    checks the files that are on the disk. Skips a damaged step with a warning. If this
    leaves no step at all, raises CorruptData or FileNotFoundError. Raises OSError if
    the store fails.
    """
    damages: list[OSError] = []
    committed = committed_steps(store, run)
    for step in reversed([step for step in committed if step > after]):
        try:
            found = fetch(store, directory, step, key)
        except (CorruptData, FileNotFoundError) as damage:
            damages.append(damage)
        else:
            _warn_of(damages)
            return found
    if damages and after < 0:
        raise damages[0]
    _warn_of(damages)
    return None


def _warn_of(damages: Iterable[OSError]) -> None:
    for damage in damages:
        warnings.warn(f"skipped: {damage}", stacklevel=3)


def fetch(
    store: Store, directory: Path, step: int, key: bytes | None = None
) -> FetchResult:
    """Complete a committed step on the disk, each worker's manifest last."""
    start_s = time.perf_counter()
    found = manifests(store, step, key)
    files = [(m, name, record) for m in found for name, record in m.files.items()]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sources = list(pool.map(lambda file: _complete(store, directory, *file), files))
    for manifest in found:
        part = part_directory(directory, step, manifest.worker)
        replace_text(part / MANIFEST, to_text(manifest, key))
    num_bytes = {True: 0, False: 0}
    for was_here, (_, _, record) in zip(sources, files, strict=True):
        num_bytes[was_here] += record.size_bytes
    return FetchResult(
        step=step,
        disk_bytes=num_bytes[True],
        cloud_bytes=num_bytes[False],
        seconds=time.perf_counter() - start_s,
    )


class StoredStep:
    """A committed step of a store, whose slices are fetched one by one.

    Files go to `directory`, which should hold nothing else. Raises FileNotFoundError
    and CorruptData as `manifests` does, and CorruptData if the step belongs to a run
    other than `run`.
    """

    def __init__(
        self,
        store: Store,
        step: int,
        directory: Path,
        key: bytes | None = None,
        run: RunIdentity | None = None,
    ) -> None:
        self._store = store
        path = step_directory(directory, step)
        self.checkpoint = merge(path, manifests(store, step, key))
        if not is_ours(run, self.checkpoint.run):
            raise CorruptData(f"{store}: step {step} belongs to another run")

    def read(self, leaf: str) -> np.ndarray:
        """Return the value of a slice; raises OSError if the store fails."""
        found = self.checkpoint.leaf(leaf)
        for path, record in found.files.items():
            name = str(path.relative_to(self.checkpoint.path))
            self._store.get(object_name(self.checkpoint.step, name), path, record)
        (value,) = self.checkpoint.read_leaves([leaf])
        shutil.rmtree(found.path)
        return value


def _complete(
    store: Store, directory: Path, manifest: Manifest, name: str, record: FileRecord
) -> bool:
    """Return whether the file was on the disk; fetch it otherwise."""
    part = part_directory(directory, manifest.step, manifest.worker)
    path = inside(part, name)
    if mismatch(path, record) is None:
        return True
    store.get(object_name(manifest.step, manifest.worker, name), path, record)
    return False
