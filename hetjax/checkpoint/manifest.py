# SPDX-License-Identifier: Apache-2.0
"""What one worker saved at one step: its entries and every file with its checksum.

Owns the manifest's JSON, its own checksum, and the test of a file against its record.
A worker's part of a step is valid once its manifest is in place: it is written last,
and atomically. Does not own where files lie (`layout.py`) nor the commit (`save.py`).
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np

from hetjax.checkpoint.entry import Entry
from hetjax.checkpoint.format import STATES
from hetjax.names import check_relative, is_worker

VERSION = 1
_CHUNK_BYTES = 1 << 20
_END_OF_STEPS = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file as written; `crc32c` is the base64 text that object stores report too."""

    size_bytes: int
    crc32c: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One worker's part of a step.

    `workers` are all that took part in the step, `state` is the directory of the
    leaves, `files` is keyed by path relative to the worker's directory, `host` is the
    training loop's own JSON.
    """

    step: int
    worker: str
    workers: tuple[str, ...]
    state: str
    entries: tuple[Entry, ...]
    files: Mapping[str, FileRecord]
    host: Mapping[str, Any]


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON with a checksum of itself."""
    body = {
        "version": VERSION,
        "step": manifest.step,
        "worker": manifest.worker,
        "workers": list(manifest.workers),
        "state": manifest.state,
        "host": manifest.host,
        "entries": {e.name: _entry_record(e) for e in manifest.entries},
        "files": {
            path: {"size": record.size_bytes, "crc32c": record.crc32c}
            for path, record in manifest.files.items()
        },
    }
    body = json.loads(json.dumps(body))  # as it will be read, tuples and keys too
    return json.dumps({"crc32c": _checksum(body), **body}) + "\n"


def from_text(text: str) -> Manifest:
    """The manifest of a text; ValueError where it is damaged or of another version.

    Its checksum shows damage, not who wrote it: its names are checked all the same.
    """
    try:
        body = json.loads(text)
        if (version := body["version"]) != VERSION:
            raise ValueError(f"version {version}, this hetjax reads {VERSION}")
        if body.pop("crc32c") != _checksum(body):
            raise ValueError("its checksum does not match its content")
        found = Manifest(
            step=body["step"],
            worker=body["worker"],
            workers=tuple(body["workers"]),
            state=body["state"],
            entries=tuple(_entry(name, e) for name, e in body["entries"].items()),
            files={
                path: FileRecord(size_bytes=f["size"], crc32c=f["crc32c"])
                for path, f in body["files"].items()
            },
            host=body["host"],
        )
        _check_names(found)
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def attempt(host: Mapping[str, Any]) -> str:
    """Which save of a step the manifests with this `host` are of; later ones are more.

    A step that is done again after a loss, by another plan, is saved with other bits.
    """
    return str(host.get("attempt", ""))


def record(path: Path) -> FileRecord:
    """Size and checksum of a file, from reading it."""
    checksum, size_bytes = google_crc32c.Checksum(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
            size_bytes += len(chunk)
    return FileRecord(size_bytes=size_bytes, crc32c=_base64(checksum.digest()))


def record_of(data: bytes) -> FileRecord:
    """Size and checksum of a file with these bytes."""
    digest = google_crc32c.Checksum(data).digest()
    return FileRecord(size_bytes=len(data), crc32c=_base64(digest))


def size_flaw(path: Path, expected: FileRecord) -> str | None:
    """What is wrong with the file at a glance: missing, or of another size."""
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if size_bytes != expected.size_bytes:
        return f"{path} has {size_bytes} bytes, not {expected.size_bytes}"
    return None


def flaw(path: Path, expected: FileRecord) -> str | None:
    """What is wrong with the file after reading all of it."""
    if wrong := size_flaw(path, expected):
        return wrong
    try:
        found = record(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if found != expected:
        return f"{path} has crc32c {found.crc32c}, not {expected.crc32c}"
    return None


def _check_names(found: Manifest) -> None:
    """Raise ValueError where a name would not lead to a place in the step's folder."""
    if type(found.step) is not int or not 0 <= found.step < _END_OF_STEPS:
        raise ValueError(f"step {str(found.step)[:80]}")
    for worker in (found.worker, *found.workers):
        if not is_worker(worker):
            raise ValueError(f"{str(worker)[:80]!r} is no name of a worker")
    if found.state not in STATES:
        raise ValueError(f"{str(found.state)[:80]!r} is no name of a state")
    for path in found.files:
        check_relative(path)
        if not path.startswith(f"{found.state}/"):
            raise ValueError(f"{path[:80]!r} is not in {found.state}")


def _entry_record(entry: Entry) -> dict[str, Any]:
    return {
        "shape": list(entry.shape),
        "dtype": entry.dtype.name,
        "slices": list(entry.slices),
    }


def _entry(name: str, found: Mapping[str, Any]) -> Entry:
    dtype = np.dtype(getattr(ml_dtypes, found["dtype"], found["dtype"]))
    dim, number = found["slices"]
    return Entry(name, tuple(found["shape"]), dtype, (dim, number))


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return record_of(canonical.encode()).crc32c


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
