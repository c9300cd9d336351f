# SPDX-License-Identifier: Apache-2.0
"""Saves of other runs: whose they are, also where this run may not read them.

Owns the run that a save in a store names, and the saves that a run's key does not open.
What they say is not trusted: they count only as a reason to leave them alone. Does not
own reading (`reader.py`, `stored_steps.py`) nor removing (`disk.py`, `uploader.py`).
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
    """The run that COMMIT of a step names, else this worker's manifest.

    None if neither can be read.
    """
    try:
        if committed_lease(store, step) != _NOT_COMMITTED:
            return committed_run(store, step)
        text = store.get_text(object_name(step, worker, MANIFEST))
        return None if text is None else from_text(text).run
    except (CorruptData, ValueError):
        return None


def others_in_store(store: Store | None, own: RunIdentity) -> list[tuple[int, RunId]]:
    """Committed steps of other runs than one's own, ascending, by what COMMIT says."""
    if store is None:
        return []
    found = []
    for step in committed_steps(store):
        try:
            run = committed_run(store, step)
        except CorruptData:
            continue  # in_store warns of it
        if not own.owns(run):
            found.append((step, run))
    return found


def untrusted_on_disk(directory: Path, key: bytes | None) -> list[Checkpoint]:
    """Saves of runs none of whose saves here is signed with the key."""
    if key is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever reads with the key sees them
        trusted = {found.run for found in partial_checkpoints(directory, key)}
        found = partial_checkpoints(directory)
    return [one for one in found if one.run not in trusted]
