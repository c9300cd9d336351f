# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint looks like on disk: entries, their slices, and the manifest.

    <directory>/step_00000010/<worker>/manifest.json
    <directory>/step_00000010/<worker>/state/<entry name>.<i>of<n>/{zarr.json, c.0.0}

Owns the names of steps, parts, entries, leaves and attempts, the fixed slices behind
the leaves, and the manifest: what one worker saved at one step, every file with its
checksum. No plan appears in any of it, so directories of several workers merge into
one. A worker's part of a step is valid once its manifest is in place: it is written
last, and atomically. Does not own writing (`writer.py`) nor reading (`reader.py`).
"""

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np

from hetjax.checkpoint.run_identity import UNIDENTIFIED, RunId, is_id
from hetjax.checkpoint.signing import signed, unsigned
from hetjax.names import check_relative, inside, is_worker

MANIFEST, VERSION = "manifest.json", 1
# In place of the manifest for an earlier save of the same step, as long as all workers
# have that one and not this
EARLIER = "earlier.json"
STATES = ("state", "state_2", "state_3")  # others where a step is saved over itself
WEIGHTS = "params."  # how names of entries begin that are weights
_ATTEMPT = re.compile("[0-9a-f]{16}")
_ATTEMPTS = 2**32  # of one start, at most
_STEP = re.compile(r"step_(\d{8,})")
_CHUNK_BYTES = 1 << 20
_END_OF_STEPS = 2**63
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of the state of one module.

    `name` is `params.<path>` or `opt.<optimizer path>.<path>`, for instance
    `opt.0.mu.block_003.attention.q`; `slices` is its (dim, number) of fixed equal
    slices, the same for every plan.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    slices: tuple[int, int]


def step_directory(directory: Path, step: int) -> Path:
    """The directory of a step, all workers together."""
    return directory / f"step_{step:08d}"


def part_directory(directory: Path, step: int, worker: str) -> Path:
    """The directory of one worker's part of a step; raises UnsafeName."""
    return inside(step_directory(directory, step), worker)


def step_numbers(directory: Path) -> list[int]:
    """Steps that have a directory, finished or not, ascending."""
    if not directory.is_dir():
        return []
    folders = (path for path in directory.iterdir() if path.is_dir())
    found = (step_of(path.name) for path in folders)
    return sorted(step for step in found if step is not None)


def step_of(name: str) -> int | None:
    """The step whose directory has this name; None if it is no step's."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


class AttemptNames:
    """Names of attempts to save a step: each sorts after all that were noted here.

    They begin with the number of the start of the run (its lease, which grows), so
    that those of an earlier start sort before them even if they were never noted. No
    clock has a say in it.
    """

    def __init__(self, start: int = 0) -> None:
        self._last = start * _ATTEMPTS

    def note(self, names: Iterable[str]) -> None:
        """Take note of names that exist already; what is not such a name is ignored."""
        ours = (int(name, 16) for name in names if _ATTEMPT.fullmatch(name))
        self._last = max([self._last, *ours])

    def begin(self, start: int) -> None:
        """Let the names that follow be of this start of the run, or of a later one."""
        self._last = max(self._last, start * _ATTEMPTS)

    def new(self) -> str:
        """The name of the next attempt."""
        self._last += 1
        return f"{self._last:016x}"


def leaf_names(entry: Entry) -> list[str]:
    """Names of the entry's leaves in slice order; an empty array has none.

    >>> leaf_names(Entry("params.head.w", (4, 6), np.dtype("float32"), (1, 2)))
    ['params.head.w.0of2', 'params.head.w.1of2']
    """
    number = entry.slices[1] if 0 not in entry.shape else 0
    return [f"{entry.name}.{i}of{number}" for i in range(number)]


def split_leaves(entry: Entry, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The entry's leaves with their values, which are views: nothing is copied."""
    assert value.shape == entry.shape and value.dtype == entry.dtype, entry
    value = np.asarray(value)  # NumPy makes a scalar of an array's last dim
    names, dim = leaf_names(entry), entry.slices[0]
    parts = np.split(value, len(names), axis=dim) if len(names) > 1 else [value]
    return zip(names, parts[: len(names)], strict=True)


def join_leaves(entry: Entry, parts: list[np.ndarray]) -> np.ndarray:
    """The whole value of the entry from its leaves in slice order."""
    if not parts:
        return np.empty(entry.shape, entry.dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, entry.slices[0])


def leaf_tree(named: Iterable[tuple[str, np.ndarray]]) -> dict[str, Any]:
    """Nested dicts whose keys, joined with dots as Orbax does, are the leaf names."""
    root: dict[str, Any] = {}
    for name, value in named:
        *path, last = name.split(".")
        node = root
        for key in path:
            node = node.setdefault(key, {})
        assert last not in node, f"two leaves are called {name}"
        node[last] = value
    return root


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file as written; `crc32c` is the base64 text that object stores report too.

    Where manifests are signed there is also a `digest`, which cannot be met on purpose.
    """

    size_bytes: int
    crc32c: str
    digest: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One worker's part of a step.

    `workers` are all that took part in the step, `host` is the training loop's own
    JSON, `state` is the directory of the leaves, `files` is keyed by path relative to
    the worker's directory. The last two are known once the leaves are written. `run` is
    the identity of the run: UNIDENTIFIED where the save is from before there were any.
    """

    step: int
    worker: str
    workers: tuple[str, ...]
    entries: tuple[Entry, ...]
    host: Mapping[str, Any]
    state: str = ""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    run: RunId = UNIDENTIFIED


def to_text(manifest: Manifest, key: bytes | None = None) -> str:
    """The manifest as JSON with a checksum of itself, signed if there is a key."""
    body = {
        "version": VERSION,
        "step": manifest.step,
        "worker": manifest.worker,
        "workers": list(manifest.workers),
        "state": manifest.state,
        "host": manifest.host,
        "entries": {e.name: _entry_record(e) for e in manifest.entries},
        "files": {
            path: _file_record(record) for path, record in manifest.files.items()
        },
    }
    if manifest.run != UNIDENTIFIED:
        body["run"] = manifest.run
    body = json.loads(json.dumps(body))  # as it will be read, tuples and keys too
    return json.dumps(signed({"crc32c": _checksum(body), **body}, key)) + "\n"


def from_text(text: str, key: bytes | None = None) -> Manifest:
    """The manifest of a text; ValueError where it is damaged or of another version.

    So it is where there is a key that it is not signed with. The checksum detects
    damage, not forgery, so the names are checked as well.
    """
    try:
        body = unsigned(json.loads(text), key)
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
                path: FileRecord(
                    size_bytes=f["size"],
                    crc32c=f["crc32c"],
                    digest=f.get("blake2b", "") if key is None else f["blake2b"],
                )
                for path, f in body["files"].items()
            },
            host=body["host"],
            run=body.get("run", UNIDENTIFIED),
        )
        _check_names(found)
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def start_of(attempt: str) -> int:
    """The number of the start of the run that made this attempt; 0 if none is in it.

    >>> names = AttemptNames(start=3)
    >>> start_of(names.new()), start_of("")
    (3, 0)
    """
    return int(attempt, 16) // _ATTEMPTS if _ATTEMPT.fullmatch(attempt) else 0


def attempt(host: Mapping[str, Any]) -> str:
    """The attempt to save a step that a manifest belongs to; later ones sort higher.

    A step that is repeated after a loss, under another plan, is saved with other bits.
    """
    return str(host.get("attempt", ""))


def record_of_file(path: Path, *, with_digest: bool = False) -> FileRecord:
    """Size and checksum of a file, from reading it, and its digest if asked for."""
    checksum, size_bytes = google_crc32c.Checksum(), 0
    digest = blake2b(digest_size=_DIGEST_BYTES) if with_digest else None
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
            if digest is not None:
                digest.update(chunk)
            size_bytes += len(chunk)
    return FileRecord(
        size_bytes=size_bytes,
        crc32c=_base64(checksum.digest()),
        digest="" if digest is None else digest.hexdigest(),
    )


def record_of_bytes(data: bytes, *, with_digest: bool = False) -> FileRecord:
    """Size and checksum of a file with these bytes, and its digest if asked for."""
    digest = blake2b(data, digest_size=_DIGEST_BYTES) if with_digest else None
    return FileRecord(
        size_bytes=len(data),
        crc32c=_base64(google_crc32c.Checksum(data).digest()),
        digest="" if digest is None else digest.hexdigest(),
    )


def size_mismatch(path: Path, expected: FileRecord) -> str | None:
    """How the file differs at a glance: it is missing, or has another size."""
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if size_bytes != expected.size_bytes:
        return f"{path} has {size_bytes} bytes, not {expected.size_bytes}"
    return None


def mismatch(path: Path, expected: FileRecord) -> str | None:
    """How the file differs from its record, after reading all of it."""
    if wrong := size_mismatch(path, expected):
        return wrong
    try:
        found = record_of_file(path, with_digest=bool(expected.digest))
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return _difference(path, found, expected)


class NotAsWritten(ValueError):
    """A file that is not what its record says."""


def read_checked(path: Path, expected: FileRecord) -> bytes:
    """The bytes of the file, which are those that were checked: it is read once.

    Raises NotAsWritten.
    """
    if wrong := size_mismatch(path, expected):
        raise NotAsWritten(wrong)
    try:
        with path.open("rb") as file:
            data = file.read(expected.size_bytes + 1)
    except OSError as error:
        raise NotAsWritten(f"{path} cannot be read ({error.strerror})") from error
    found = record_of_bytes(data, with_digest=bool(expected.digest))
    if wrong := _difference(path, found, expected):
        raise NotAsWritten(wrong)
    return data


def _difference(path: Path, found: FileRecord, expected: FileRecord) -> str | None:
    if found != expected:
        return f"{path} has crc32c {found.crc32c}, not {expected.crc32c}"
    if found.digest != expected.digest:
        return f"{path} is not what was signed"
    return None


def _check_names(found: Manifest) -> None:
    """Raise ValueError where a name would not lead to a place in the step's folder."""
    if type(found.step) is not int or not 0 <= found.step < _END_OF_STEPS:
        raise ValueError(f"step {str(found.step)[:80]}")
    for worker in (found.worker, *found.workers):
        if not is_worker(worker):
            raise ValueError(f"{str(worker)[:80]!r} is no name of a worker")
    if not is_id(found.run):
        raise ValueError(f"{str(found.run)[:80]} is no identity of a run")
    if found.state not in STATES:
        raise ValueError(f"{str(found.state)[:80]!r} is no name of a state")
    for path in found.files:
        check_relative(path)
        if not path.startswith(f"{found.state}/"):
            raise ValueError(f"{path[:80]!r} is not in {found.state}")


def _file_record(record: FileRecord) -> dict[str, Any]:
    found = {"size": record.size_bytes, "crc32c": record.crc32c}
    return found | ({"blake2b": record.digest} if record.digest else {})


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
    return record_of_bytes(canonical.encode()).crc32c


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
