# SPDX-License-Identifier: Apache-2.0
"""Defines the steps in a store: which are complete, and what they contain.

    <store>/step_00000010/<worker>/...  as on disk, the manifest last
    <store>/step_00000010/COMMIT        once the manifests of all its workers are there

Owns the names of a step's objects, COMMIT (its run, and a checksum of each worker's
manifest), and which steps and manifests COMMIT vouches for. Does not own uploading
(`uploader.py`), fetching (`fetching.py`) nor the stores (`stores/`).
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hetjax.checkpoint.file_records import record_of_bytes
from hetjax.checkpoint.format import (
    MANIFEST,
    Manifest,
    from_text,
    step_directory,
    step_of,
)
from hetjax.checkpoint.leases.lease import Fence
from hetjax.checkpoint.reader import DamagedCheckpoint, merge
from hetjax.checkpoint.recovery_plan import CLOUD, PartialSnapshot
from hetjax.checkpoint.run_identity import (
    UNIDENTIFIED,
    RunId,
    RunIdentity,
)
from hetjax.checkpoint.signing import signed, verified
from hetjax.checkpoint.stores.store import CorruptData, Store
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value
from hetjax.files.tables import as_kind
from hetjax.names import UnsafeName, is_worker

COMMIT = "COMMIT"
_VERSION = 1
_NUM_COMMITS = 3
_T = TypeVar("_T")


def object_name(step: int, *parts: str) -> str:
    """Return the name of an object of a step.

    >>> object_name(10, "east-0", "manifest.json")
    'step_00000010/east-0/manifest.json'
    """
    return "/".join((step_directory(Path(), step).name, *parts))


def stored_steps(names: Iterable[str], *tail: str) -> list[int]:
    """Return steps, ascending, with an object whose name continues with `tail`.

    >>> stored_steps(["step_00000010/COMMIT", "step_00000020/a/state/c"], "COMMIT")
    [10]
    """
    parts = [name.split("/") for name in names]
    found = (step_of(p[0]) for p in parts if tuple(p[1:][: len(tail)]) == tail)
    return sorted({step for step in found if step is not None})


def committed_steps(store: Store, run: RunIdentity | None = None) -> list[int]:
    """Return the run's steps with a COMMIT, ascending; without `run`, of any run."""
    found = stored_steps(store.names("step_"), COMMIT)
    if run is None:
        return found
    return [step for step in found if _may_be_of(run, store, step)]


def _may_be_of(run: RunIdentity, store: Store, step: int) -> bool:
    try:
        return run.owns(committed_run(store, step))
    except CorruptData:
        return True  # using the step raises the error


def manifests(store: Store, step: int, key: bytes | None = None) -> list[Manifest]:
    """Return the manifests that the COMMIT of a step vouches for, sorted by worker.

    If there is a key, all of them must be signed with it. Raises FileNotFoundError if
    the step has no COMMIT, CorruptData if a manifest is not the one that was committed.
    """
    commit = _text(store, object_name(step, COMMIT))
    if commit is None:
        raise FileNotFoundError(f"{store}: step {step} has no {COMMIT}")
    found = []
    run, checksums = _committed_workers(store, step, commit, key)
    for worker, crc32c in checksums.items():
        text = _manifest_text(store, step, worker)
        if text is None or record_of_bytes(text.encode()).crc32c != crc32c:
            name = object_name(step, worker, MANIFEST)
            raise CorruptData(f"{store}: {name} is not the one that was committed")
        manifest = _parse(store, step, worker, text, key)
        if manifest.run != run:
            name = object_name(step, worker, MANIFEST)
            raise CorruptData(
                f"{store}: {name} belongs to another run than its {COMMIT}"
            )
        found.append(manifest)
    return found


def committed_lease(store: Store, step: int) -> int:
    """Return the lease under which a step was committed; -1 if it was not.

    0 means a COMMIT without a lease.
    """
    return _read_commit(store, step, _lease_of, -1)


def committed_run(store: Store, step: int) -> RunId:
    """Return the run that committed a step; UNIDENTIFIED if none, or without identity.

    Only for choosing among steps: `manifests` checks what is then used.
    """
    return _read_commit(store, step, _run_of, UNIDENTIFIED)


def _lease_of(body: dict[str, Any]) -> int:
    return as_kind(body.get("lease", 0), "an integer", where="lease")


def _run_of(body: dict[str, Any]) -> RunId:
    return as_kind(body.get("run", UNIDENTIFIED), "a string", where="run")


def _read_commit(
    store: Store, step: int, read: Callable[[dict[str, Any]], _T], missing: _T
) -> _T:
    text = _text(store, object_name(step, COMMIT))
    if text is None:
        return missing
    try:
        return read(as_kind(json_value(text), "a table", where=COMMIT))
    except ValueError as error:
        raise _unusable(store, step, error) from error


def commit(
    store: Store,
    step: int,
    workers: Iterable[str],
    fence: Fence | None = None,
    key: bytes | None = None,
) -> None:
    """Write COMMIT if the manifests of all workers of the step are in the store.

    COMMIT carries the number of the lease of `fence`. If that lease is over, COMMIT is
    removed and LeaseLost raised.

    Meanwhile a worker may remove its part, left over from an earlier run. It removes
    its manifest before it looks for COMMIT, and we write COMMIT before we look for its
    manifest. So one of the two sees the other, and COMMIT is removed.
    """
    fence = fence or Fence(store, str(store), 0)
    name = object_name(step, COMMIT)
    for _ in range(_NUM_COMMITS):
        text = _commit_text(store, step, workers, fence.number, key)
        if text is None:
            return
        with fence.around(lambda text=text: _remove_if(store, name, text)):
            store.put_text(name, text)
        if _commit_text(store, step, workers, fence.number, key) == text:
            return
        store.remove([name])


def _remove_if(store: Store, name: str, text: str) -> None:
    """Remove the object if it still has the text that we wrote."""
    if store.get_text(name) == text:
        store.remove([name])


def _commit_text(
    store: Store, step: int, workers: Iterable[str], lease: int, key: bytes | None
) -> str | None:
    """Return the content of COMMIT; None while the manifest of a worker is missing.

    A manifest with other workers, or of another attempt or run than the rest, is left
    over from an earlier run and counts as missing: its worker will replace it.
    """
    checksums: dict[str, str] = {}
    saves: list[tuple[RunId, Mapping[str, Any]]] = []
    for worker in sorted(workers):
        text = _manifest_text(store, step, worker)
        if text is None:
            return None
        manifest = _parse(store, step, worker, text, key)
        saves.append((manifest.run, manifest.host))
        if set(manifest.workers) != set(workers) or saves[-1] != saves[0]:
            return None
        checksums[worker] = record_of_bytes(text.encode()).crc32c
    body: dict[str, Any] = {"version": _VERSION, "step": step, "manifests": checksums}
    if lease:
        body["lease"] = lease
    if saves and (run := saves[0][0]) != UNIDENTIFIED:
        body["run"] = run
    return json.dumps(signed(body, key)) + "\n"


def _committed_workers(
    store: Store, step: int, commit: str, key: bytes | None
) -> tuple[RunId, dict[str, str]]:
    """Return the run that COMMIT names, and the checksum of each worker's manifest."""
    try:
        found = as_kind(json_value(commit), "a table", where=COMMIT)
        body = verified(found, key)
        if (body["version"], body["step"]) != (_VERSION, step):
            raise ValueError(f"version {body['version']}, step {body['step']}")
        checksums = as_kind(body["manifests"], "a table", where="manifests")
        if strangers := [name for name in checksums if not is_worker(name)]:
            raise ValueError(f"{strangers[0][:80]!r} is not a worker name")
        for name, crc32c in checksums.items():
            as_kind(crc32c, "a string", where=f"manifests.{name}")
        if not checksums:
            raise ValueError("it names no manifest")
        return _run_of(body), dict(sorted(checksums.items()))
    except (KeyError, ValueError) as error:
        raise _unusable(store, step, error) from error


def _unusable(store: Store, step: int, error: Exception) -> CorruptData:
    why = error.got if isinstance(error, BadInput) else repr(error)
    return CorruptData(f"{store}: {object_name(step, COMMIT)} cannot be used: {why}")


def _manifest_text(store: Store, step: int, worker: str) -> str | None:
    return _text(store, object_name(step, worker, MANIFEST))


def _text(store: Store, name: str) -> str | None:
    """Return the text of an object; CorruptData if a link leads out of the store."""
    try:
        return store.get_text(name)
    except UnsafeName as unsafe:
        raise CorruptData(unsafe.got) from unsafe


def _parse(
    store: Store, step: int, worker: str, text: str, key: bytes | None
) -> Manifest:
    name = object_name(step, worker, MANIFEST)
    try:
        manifest = from_text(text, key)
    except ValueError as error:
        raise CorruptData(f"{store}: {name} cannot be used: {error}") from error
    if (manifest.step, manifest.worker) != (step, worker):
        found = f"step {manifest.step}, worker {manifest.worker}"
        raise CorruptData(f"{store}: {name} describes {found}")
    return manifest


def in_store(store: Store | None, key: bytes | None = None) -> list[PartialSnapshot]:
    """Return what the store has of each committed step; nothing without a store.

    A step that cannot be used is left out with a warning.
    """
    if store is None:
        return []
    found = []
    for step in committed_steps(store):
        try:
            merged = merge(Path(), manifests(store, step, key))
        except (CorruptData, DamagedCheckpoint, FileNotFoundError) as damage:
            warnings.warn(f"step {step} in {store} is not used: {damage}", stacklevel=2)
            continue
        found.append(
            PartialSnapshot(
                worker=CLOUD,
                tier="cloud",
                save=(step, merged.attempt),
                leaves=frozenset(merged.leaves),
                host=merged.host,
                run=merged.run,
            )
        )
    return found
