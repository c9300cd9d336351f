# SPDX-License-Identifier: Apache-2.0
"""Writes, checks and removes one worker's part of a step on the local disk.

Owns writes that survive a power cut, the test whether a part is complete, and cleanup
that never leaves half a step. Does not own the content of parts (`writer.py`,
`replication.py`).
"""

import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hetjax.checkpoint.file_records import size_mismatch
from hetjax.checkpoint.format import (
    EARLIER,
    MANIFEST,
    Manifest,
    attempt,
    from_text,
    part_directory,
    read_manifest_text,
    step_directory,
    step_numbers,
)
from hetjax.checkpoint.run_identity import RunIdentity, is_ours

_NUM_REMOVALS, _LATE_WRITE_S = 20, 0.1


def fsync(path: Path) -> None:
    """Make a file, or the list of names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file durably and atomically: it has either the old text or the new."""
    building = path.with_suffix(".part")
    with building.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(building, path)


def read_manifest(part: Path, name: str = MANIFEST) -> Manifest | None:
    """Return the manifest of the part, or None if it is missing or damaged."""
    try:
        return from_text(read_manifest_text(part / name))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def is_complete(part: Path) -> bool:
    """Return whether all files of the manifest exist with the right size."""
    manifest = read_manifest(part)
    return manifest is not None and not any(
        size_mismatch(part / path, expected)
        for path, expected in manifest.files.items()
    )


def remove_uncommitted(part: Path) -> None:
    """Remove everything that no manifest lists."""
    manifest, earlier = read_manifest(part), read_manifest(part, EARLIER)
    if manifest is None:
        return remove_part(part)
    kept = {MANIFEST, manifest.state}
    if earlier is not None:
        kept |= {EARLIER, earlier.state}
    for path in part.iterdir():
        if path.name not in kept:
            is_folder = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if is_folder else path.unlink()


def remove_failed(part: Path) -> None:
    """Remove a failed save, some of whose writes may still be running.

    The next save removes anything that remains.
    """
    for _ in range(_NUM_REMOVALS):
        with suppress(OSError):
            remove_uncommitted(part)
        time.sleep(_LATE_WRITE_S)
        if not part.exists() or is_complete(part):
            return


def remove_part(part: Path) -> None:
    """Remove the part, its manifests first, so that half a step never counts."""
    if not part.is_dir():
        return
    for name in (MANIFEST, EARLIER):
        (part / name).unlink(missing_ok=True)
    shutil.rmtree(part)
    with suppress(OSError):  # not empty: the parts of other workers stay
        part.parent.rmdir()


def remove_after(directory: Path, step: int, run: RunIdentity | None = None) -> None:
    """Remove all workers' parts of the run's steps after `step`.

    Other processes may do this at the same time.
    """
    for later in step_numbers(directory):
        if later > step:
            for file in step_directory(directory, later).glob(f"*/{MANIFEST}"):
                found = read_manifest(file.parent)
                if found is None or is_ours(run, found.run):
                    with suppress(FileNotFoundError):
                        remove_part(file.parent)


def retain(
    directory: Path, worker: str, last: int, keep: int, also: Collection[int]
) -> None:
    """Keep a worker's newest `keep` complete parts up to step `last`, and steps `also`.

    Removes the other parts. Later ones are left over from before the run resumed at an
    earlier step. Removes nothing if a later start has saved meanwhile.
    """
    parts = _parts(directory, worker)
    found = _attempts(parts)
    if last not in found or is_overtaken(found.values(), found[last]):
        return
    complete = [s for s, part in parts.items() if s <= last and is_complete(part)]
    for step in outdated(parts, complete, keep, also):
        remove_part(parts[step])


def has_been_overtaken(directory: Path, worker: str, own: str) -> bool:
    """Return whether this worker's parts include one of a later attempt than `own`."""
    return is_overtaken(_attempts(_parts(directory, worker)).values(), own)


def _parts(directory: Path, worker: str) -> dict[int, Path]:
    """Return the path of the worker's part of each step, whether or not it exists."""
    numbers = step_numbers(directory)
    return {step: part_directory(directory, step, worker) for step in numbers}


def _attempts(parts: Mapping[int, Path]) -> dict[int, str]:
    """Return the attempt of each committed part."""
    manifests = {step: read_manifest(part) for step, part in parts.items()}
    return {step: attempt(found.host) for step, found in manifests.items() if found}


def is_overtaken(attempts: Iterable[str], own: str) -> bool:
    """Return whether an attempt is later than `own`.

    A process that hung meanwhile must not touch what the later attempt saved.
    """
    return any(found > own for found in attempts)


def outdated(
    steps: Iterable[int],
    complete: Sequence[int],
    keep: int,
    also: Collection[int | None],
) -> list[int]:
    """Return the steps to remove: all but the newest `keep` complete ones and `also`.

    `complete` is ascending.

    >>> outdated([2, 4, 6, 8], [2, 4, 6], 2, {None})
    [2, 8]
    """
    return sorted({*steps} - {*complete[-keep:], *also})


def make_directory(part: Path) -> None:
    """Make the folder of a part while other workers may be removing theirs."""
    for _ in range(_NUM_REMOVALS):
        with suppress(FileNotFoundError):  # another worker removed the step's folder
            return part.mkdir(parents=True, exist_ok=True)
    part.mkdir(parents=True, exist_ok=True)
