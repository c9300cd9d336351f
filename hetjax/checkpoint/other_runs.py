# SPDX-License-Identifier: Apache-2.0
"""Identifies saves of other runs, including those that this run may not read.

Owns finding the run that a stored save names, and the saves that lack the signature of
a run's key. Their content is not trusted: it serves only as a reason to leave them
alone. Does not own reading (`reader.py`, `stored_steps.py`) nor removing (`disk.py`,
`uploader.py`).
"""

import warnings
from pathlib import Path

from hetjax.checkpoint.format import MANIFEST, from_text
from hetjax.checkpoint.reader import Checkpoint, partial_checkpoints
from hetjax.checkpoint.run_identity import RunId, RunIdentity
from hetjax.checkpoint.stored_steps import (
    committed_lease,
    committed_run,
    committed_steps,
    object_name,
)
from hetjax.checkpoint.stores.store import CorruptData, Store

_NOT_COMMITTED = -1


def saved_by(store: Store, step: int, worker: str) -> RunId | None:
    """Return the run that COMMIT of a step names, else this worker's manifest.

    Returns None if neither can be read.
    """
    try:
        if committed_lease(store, step) != _NOT_COMMITTED:
            return committed_run(store, step)
        text = store.get_text(object_name(step, worker, MANIFEST))
        return None if text is None else from_text(text).run
    except (CorruptData, ValueError):
        return None


def others_in_store(store: Store | None, own: RunIdentity) -> list[tuple[int, RunId]]:
    """Return committed steps of runs other than `own`, ascending, as COMMIT says."""
    if store is None:
        return []
    found = []
    for step in committed_steps(store):
        try:
            run = committed_run(store, step)
        except CorruptData:
            continue  # `in_store` warns about it
        if not own.owns(run):
            found.append((step, run))
    return found


def untrusted_on_disk(directory: Path, key: bytes | None) -> list[Checkpoint]:
    """Return saves of the runs that have no save here signed with the key."""
    if key is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # readers that pass the key report them
        trusted = {found.run for found in partial_checkpoints(directory, key)}
        found = partial_checkpoints(directory)
    return [one for one in found if one.run not in trusted]
