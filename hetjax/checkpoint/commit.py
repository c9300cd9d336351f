# SPDX-License-Identifier: Apache-2.0
"""What makes a step in a store whole: COMMIT, a checksum of each worker's manifest.

Owns the names of a step's objects, COMMIT, and which steps and manifests it vouches
for. Does not own who uploads what when (`upload.py`) nor the stores (`store.py`).
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from hetjax.checkpoint.format import MANIFEST, step_directory
from hetjax.checkpoint.manifest import Manifest, from_text, record_of
from hetjax.checkpoint.stores.store import Corrupt, Store
from hetjax.names import is_worker

COMMIT = "COMMIT"
_VERSION = 1
_NUM_COMMITS = 3
_STEP = re.compile(r"step_(\d{8,})")


def object_name(step: int, *parts: str) -> str:
    """The name of an object of a step.

    >>> object_name(10, "east-0", "manifest.json")
    'step_00000010/east-0/manifest.json'
    """
    return "/".join((step_directory(Path(), step).name, *parts))


def stored_steps(names: Iterable[str], *tail: str) -> list[int]:
    """Steps, ascending, with an object whose name goes on with these parts.

    >>> stored_steps(["step_00000010/COMMIT", "step_00000020/a/state/c"], "COMMIT")
    [10]
    """
    parts = [name.split("/") for name in names]
    found = (_STEP.fullmatch(p[0]) for p in parts if tuple(p[1:][: len(tail)]) == tail)
    return sorted({int(match[1]) for match in found if match})


def committed_steps(store: Store) -> list[int]:
    """Steps with a COMMIT, ascending."""
    return stored_steps(store.names("step_"), COMMIT)


def manifests(store: Store, step: int) -> list[Manifest]:
    """The manifests that the COMMIT of a step vouches for, sorted by worker.

    Raises FileNotFoundError where the step has no COMMIT, Corrupt where a manifest is
    not the one that was committed.
    """
    commit = store.get_text(object_name(step, COMMIT))
    if commit is None:
        raise FileNotFoundError(f"{store}: step {step} has no {COMMIT}")
    found = []
    for worker, crc32c in _committed_workers(store, step, commit).items():
        text = _manifest_text(store, step, worker)
        if text is None or record_of(text.encode()).crc32c != crc32c:
            name = object_name(step, worker, MANIFEST)
            raise Corrupt(f"{store}: {name} is not the one that was committed")
        found.append(_parse(store, step, worker, text))
    return found


def commit(store: Store, step: int, workers: Iterable[str]) -> None:
    """Write COMMIT if the manifests of all workers of the step are there.

    A worker may remove its part meanwhile (remains of a run that was given up): its
    manifest goes before it looks for COMMIT, ours comes before we look for its
    manifest; so one of us sees the other, and COMMIT does not stay.
    """
    for _ in range(_NUM_COMMITS):
        text = _commit_text(store, step, workers)
        if text is None:
            return
        store.put_text(object_name(step, COMMIT), text)
        if _commit_text(store, step, workers) == text:
            return
        store.remove([object_name(step, COMMIT)])


def _commit_text(store: Store, step: int, workers: Iterable[str]) -> str | None:
    """The content of COMMIT; None while the manifest of a worker is missing.

    A manifest that names other workers, or another attempt than another manifest, is of
    a run that was given up: its worker will replace it.
    """
    checksums, hosts = {}, []
    for worker in sorted(workers):
        text = _manifest_text(store, step, worker)
        if text is None:
            return None
        manifest = _parse(store, step, worker, text)
        hosts.append(manifest.host)
        if set(manifest.workers) != set(workers) or manifest.host != hosts[0]:
            return None
        checksums[worker] = record_of(text.encode()).crc32c
    body = {"version": _VERSION, "step": step, "manifests": checksums}
    return json.dumps(body) + "\n"


def _committed_workers(store: Store, step: int, commit: str) -> dict[str, str]:
    try:
        body = json.loads(commit)
        if (body["version"], body["step"]) != (_VERSION, step):
            raise ValueError(f"version {body['version']}, step {body['step']}")
        checksums = dict(sorted(body["manifests"].items()))
        if strangers := [name for name in checksums if not is_worker(name)]:
            raise ValueError(f"{strangers[0][:80]!r} is no name of a worker")
        return checksums
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        name = object_name(step, COMMIT)
        raise Corrupt(f"{store}: {name} cannot be used: {error!r}") from error


def _manifest_text(store: Store, step: int, worker: str) -> str | None:
    return store.get_text(object_name(step, worker, MANIFEST))


def _parse(store: Store, step: int, worker: str, text: str) -> Manifest:
    name = object_name(step, worker, MANIFEST)
    try:
        manifest = from_text(text)
    except ValueError as error:
        raise Corrupt(f"{store}: {name} cannot be used: {error}") from error
    if (manifest.step, manifest.worker) != (step, worker):
        found = f"step {manifest.step}, worker {manifest.worker}"
        raise Corrupt(f"{store}: {name} is of {found}")
    return manifest
