# SPDX-License-Identifier: Apache-2.0
"""Defines the format of a checkpoint on disk: entries, their slices, the manifest.

    <directory>/step_00000010/<worker>/manifest.json
    <directory>/step_00000010/<worker>/state/<entry name>.<i>of<n>/{zarr.json, c.0.0}

Owns the names of steps, parts, entries, leaves and attempts, the fixed slices behind
the leaves, and the manifest. A manifest lists what one worker saved at one step, with a
checksum of every file. The format does not depend on the plan, so directories of
several workers merge into one. A worker's part of a step is valid once its manifest is
in place: the manifest is written last, and atomically. Does not own writing
(`writer.py`) nor reading (`reader.py`).
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hetjax.checkpoint.file_records import FileRecord, record_of_bytes
from hetjax.checkpoint.run_identity import MOST_STARTS, UNIDENTIFIED, RunId, is_id
from hetjax.checkpoint.signing import signed, verified
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value
from hetjax.files.reading import decoded, read_bytes
from hetjax.files.tables import as_kind
from hetjax.names import check_relative, inside, is_worker

MANIFEST, VERSION = "manifest.json", 1
# Manifest of an earlier save of the same step. It is kept as long as all workers have
# that save but not the new one.
EARLIER = "earlier.json"
STATES = ("state", "state_2", "state_3")  # others are for repeated saves
WEIGHTS = "params."  # prefix of the names of weight entries
_ATTEMPT = re.compile("[0-9a-f]{16}")
_ATTEMPTS = 2**32  # at most, per start
_STEP = re.compile(r"step_(\d{8,})")
_END_OF_STEPS = 2**63
_MOST_MANIFEST_BYTES = 256 << 20
_MOST_DIMS, _MOST_SLICES, _MOST_BYTES = 32, 1024, 1 << 50  # limits of an entry


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of the state of one module.

    `name` is `params.<path>` or `opt.<optimizer path>.<path>`, for instance
    `opt.0.mu.block_003.attention.q`. `slices` is (dim, number): the array is cut along
    `dim` into `number` equal slices, the same for every plan.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    slices: tuple[int, int]


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory of a step, which holds the parts of all workers."""
    return directory / f"step_{step:08d}"


def part_directory(directory: Path, step: int, worker: str) -> Path:
    """Return the directory of one worker's part of a step; raises UnsafeName."""
    return inside(step_directory(directory, step), worker)


def step_numbers(directory: Path) -> list[int]:
    """Return the steps that have a directory, finished or not, ascending."""
    if not directory.is_dir():
        return []
    folders = (path for path in directory.iterdir() if path.is_dir())
    found = (step_of(path.name) for path in folders)
    return sorted(step for step in found if step is not None)


def committed_after(directory: Path, step: int) -> list[int]:
    """Return the steps after `step` that a worker has committed, ascending."""
    after = (s for s in step_numbers(directory) if s > step)
    return [s for s in after if any(step_directory(directory, s).glob(f"*/{MANIFEST}"))]


def step_of(name: str) -> int | None:
    """Return the step whose directory has this name, or None."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


class AttemptNames:
    """Names of attempts to save a step: each sorts after all names noted here.

    A name begins with the number of the run's start (its lease number, which grows). So
    names of an earlier start sort before it, even if they were never noted. No clock is
    involved.
    """

    def __init__(self, start: int = 0) -> None:
        self._last = start * _ATTEMPTS

    def note(self, names: Iterable[str]) -> None:
        """Note names that exist already; ignore strings that are not attempt names."""
        ours = (int(name, 16) for name in names if _ATTEMPT.fullmatch(name))
        self._last = max([self._last, *ours])

    def begin(self, start: int) -> None:
        """Make the following names belong to this start of the run, or a later one."""
        self._last = max(self._last, start * _ATTEMPTS)

    def new(self) -> str:
        """Return the name of the next attempt."""
        self._last += 1
        return f"{self._last:016x}"


def leaf_names(entry: Entry) -> list[str]:
    """Return the names of the entry's leaves in slice order; an empty array has none.

    >>> leaf_names(Entry("params.head.w", (4, 6), np.dtype("float32"), (1, 2)))
    ['params.head.w.0of2', 'params.head.w.1of2']
    """
    number = entry.slices[1] if 0 not in entry.shape else 0
    return [f"{entry.name}.{i}of{number}" for i in range(number)]


def split_leaves(entry: Entry, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Return the entry's leaves with their values as views: nothing is copied."""
    assert value.shape == entry.shape and value.dtype == entry.dtype, entry
    value = np.asarray(value)  # indexing away the last dim gives a NumPy scalar
    names, dim = leaf_names(entry), entry.slices[0]
    parts = np.split(value, len(names), axis=dim) if len(names) > 1 else [value]
    return zip(names, parts[: len(names)], strict=True)


def join_leaves(entry: Entry, parts: list[np.ndarray]) -> np.ndarray:
    """Return the whole value of the entry from its leaves in slice order."""
    if not parts:
        return np.empty(entry.shape, entry.dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, entry.slices[0])


def leaf_tree(named: Iterable[tuple[str, np.ndarray]]) -> dict[str, Any]:
    """Return nested dicts whose keys, joined with dots as in Orbax, are leaf names."""
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
class Manifest:
    """The description of one worker's part of a step.

    `workers` are all that took part in the step, `host` is the training loop's own
    JSON, `state` is the directory of the leaves, `files` is keyed by path relative to
    the worker's directory. `state` and `files` are known once the leaves are written.
    `run` is the identity of the run, or UNIDENTIFIED if the save predates identities.
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
    """Return the manifest as JSON with its own checksum, signed if there is a key."""
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
    # as a reader will see it, including tuples and keys
    body = json_value(json.dumps(body), finite=False)
    return json.dumps(signed({"crc32c": _checksum(body), **body}, key)) + "\n"


def read_manifest_text(path: Path) -> str:
    """Return the text of a manifest file; raises OSError, or Unreadable if not text."""
    data = read_bytes(path, what="manifest", most_bytes=_MOST_MANIFEST_BYTES)
    return decoded(data, str(path))


def from_text(text: str, key: bytes | None = None) -> Manifest:
    """Parse a manifest; raises ValueError if it is damaged or of another version.

    Also raises ValueError if there is a key and the manifest is not signed with it. The
    checksum detects damage, not forgery, so the names are checked as well.
    """
    try:
        body = verified(_object(json_value(text, finite=False), "the manifest"), key)
        if (version := body.get("version")) != VERSION:
            shown = str(version)[:80]
            raise ValueError(
                f"version {shown}, but this hetjax reads version {VERSION}"
            )
        if body.pop("crc32c", None) != _checksum(body):
            raise ValueError("its checksum does not match its content")
        entries, files = (_object(body[key], key) for key in ("entries", "files"))
        found = Manifest(
            step=body["step"],
            worker=body["worker"],
            workers=tuple(as_kind(body["workers"], "a list", where="workers")),
            state=body["state"],
            entries=tuple(_entry(name, e) for name, e in entries.items()),
            files={path: _record(path, f, key) for path, f in files.items()},
            host=_object(body["host"], "host"),
            run=as_kind(body.get("run", UNIDENTIFIED), "a string", where="run"),
        )
        _check_names(found)
        return found
    except KeyError as missing:
        raise ValueError(f"it has no {missing}") from missing
    except BadInput as bad:
        raise ValueError(bad.got) from bad


def start_of(attempt: str) -> int:
    """Return the number of the run's start that made this attempt; 0 if it has none.

    >>> names = AttemptNames(start=3)
    >>> start_of(names.new()), start_of("")
    (3, 0)
    """
    return int(attempt, 16) // _ATTEMPTS if _ATTEMPT.fullmatch(attempt) else 0


def attempt(host: Mapping[str, Any]) -> str:
    """Return the attempt that a manifest belongs to; later attempts sort higher.

    A step that is repeated after a loss, under another plan, is saved with other bits.
    """
    return str(host.get("attempt", ""))


def other_model(checkpoint: str, differs: str, alike: str = "") -> BadInput:
    """Return the error for a checkpoint whose arrays are not this run's.

    `alike` says how arrays are compared.
    """
    return BadInput(
        got=f"{checkpoint} is from another model or optimizer: {differs}",
        allowed="a checkpoint with the arrays of this run's model and optimizer"
        + alike,
        fix="use the run's original configuration (config.json in its directory), or "
        "start a new run with another --run-dir",
    )


def _check_names(found: Manifest) -> None:
    """Raise ValueError if a name is invalid or would lead outside the step's folder."""
    if type(found.step) is not int or not 0 <= found.step < _END_OF_STEPS:
        raise ValueError(f"step {str(found.step)[:80]}")
    for worker in (found.worker, *found.workers):
        if not is_worker(worker):
            raise ValueError(f"{str(worker)[:80]!r} is not a worker name")
    if not is_id(found.run):
        raise ValueError(f"{str(found.run)[:80]} is not a run identity")
    if start_of(attempt(found.host)) >= MOST_STARTS:
        raise ValueError(
            f"attempt {attempt(found.host)} has an impossible start number"
        )
    if found.state not in STATES:
        raise ValueError(f"{str(found.state)[:80]!r} is not a state name")
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


def _object(found: Any, where: str) -> dict[str, Any]:
    return as_kind(found, "a table", where=where)


def _record(path: str, found: Any, key: bytes | None) -> FileRecord:
    """Parse a manifest's record of a file; a signed manifest must have a digest."""
    of_file = _object(found, f"file {path[:80]!r}")
    size, crc32c = of_file["size"], of_file["crc32c"]
    digest = of_file.get("blake2b", "") if key is None else of_file["blake2b"]
    if not _is_size(size) or not isinstance(crc32c, str) or not isinstance(digest, str):
        raise ValueError(f"{str(of_file)[:80]} of file {path[:80]!r}")
    return FileRecord(size_bytes=size, crc32c=crc32c, digest=digest)


def _entry(name: str, found: Any) -> Entry:
    """Parse a manifest's description of an entry; raises ValueError if impossible."""
    of_entry, where = _object(found, f"entry {name[:80]!r}"), f"of entry {name[:80]!r}"
    dtype = _dtype(of_entry["dtype"], where)
    shape, slices = of_entry["shape"], of_entry["slices"]
    if not _are_sizes(shape) or len(shape) > _MOST_DIMS:
        raise ValueError(f"shape {str(shape)[:80]} {where}")
    if math.prod(shape) * dtype.itemsize > _MOST_BYTES:
        raise ValueError(f"shape {shape} {where}, too large for any memory")
    if not (_are_sizes(slices) and len(slices) == 2 and _divides(slices, shape)):
        raise ValueError(f"slices {str(slices)[:80]} of shape {shape} {where}")
    return Entry(name, tuple(shape), dtype, (slices[0], slices[1]))


def _dtype(name: Any, where: str) -> np.dtype:
    """Return the dtype with this name, which must be one of plain numbers."""
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise ValueError(f"dtype {str(name)[:80]} {where}") from error
    if not isinstance(name, str) or dtype.name != name or dtype.hasobject:
        raise ValueError(f"dtype {str(name)[:80]} {where}")
    return dtype


def _divides(slices: list[int], shape: list[int]) -> bool:
    """Return whether the dim of an array of this shape can be cut into equal slices."""
    dim, number = slices
    if number == 1:
        return dim < max(len(shape), 1)
    is_dim = dim < len(shape) and 1 < number <= _MOST_SLICES
    return is_dim and shape[dim] % number == 0


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(map(_is_size, found))


def _is_size(found: Any) -> bool:
    return type(found) is int and 0 <= found < _END_OF_STEPS


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return record_of_bytes(canonical.encode()).crc32c
