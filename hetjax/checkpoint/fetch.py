# SPDX-License-Identifier: Apache-2.0
"""A committed step from a store, next to what is left of it on the disk.

Owns which files are fetched: those that are missing here or not as written, and nothing
else. Does not own the store (`store.py`), its commits (`commit.py`) nor reading what is
then complete (`restore.py`).
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hetjax.checkpoint import layout
from hetjax.checkpoint.commit import committed_steps, manifests, object_name
from hetjax.checkpoint.durable import replace_text
from hetjax.checkpoint.manifest import FileRecord, Manifest, flaw, to_text
from hetjax.checkpoint.store import Store

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
        own = layout.step_directory(directory, step) / manifest.worker
        replace_text(own / layout.MANIFEST, to_text(manifest))
    num_bytes = {True: 0, False: 0}
    for was_here, (_, _, record) in zip(sources, files, strict=True):
        num_bytes[was_here] += record.size_bytes
    return Fetched(
        step=step,
        disk_bytes=num_bytes[True],
        cloud_bytes=num_bytes[False],
        seconds=time.perf_counter() - start_s,
    )


def _complete(
    store: Store, directory: Path, manifest: Manifest, name: str, record: FileRecord
) -> bool:
    """Whether the file was here; fetch it otherwise."""
    path = layout.step_directory(directory, manifest.step) / manifest.worker / name
    if flaw(path, record) is None:
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    store.get(object_name(manifest.step, manifest.worker, name), path, record)
    return False
