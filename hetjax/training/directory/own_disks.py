# SPDX-License-Identifier: Apache-2.0
"""Describes and records which machines of a run do not see its directory.

They keep checkpoints on their own disks. So a run directory without checkpoints does
not prove that the run has none. Owns the words, the event, and which folder gathers the
last checkpoint. Does not own the check of what a machine sees (`checkpoint/storage.py`)
nor what a start does about it (`leftover_checkpoints.py`).
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

from hetjax.checkpoint.reader import steps
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.launchers.table import LAUNCHERS
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.progress import last_saved
from hetjax.training.directory.rundir import CHECKPOINTS, EVENTS
from hetjax.training.settings.config import RunConfig

APART = "apart"  # an event in events.jsonl, with `folders` by worker


def kept_where(
    run_dir: Path,
    places: Mapping[str, str],
    storage: CheckpointStorage,
    num_nodes: int,
) -> str:
    """Return a text on which workers, by `places`, do not see the run's directory.

    `num_nodes` is the number of nodes that train.

    >>> storage = CheckpointStorage(directory="/run/checkpoints", copies=2)
    >>> kept_where(Path("/run"), {}, storage, 2)
    'all workers see /run: checkpoints are kept in /run/checkpoints'
    >>> print(kept_where(Path("/run"), {"b": "/state/1", "a": "/state/1"}, storage, 2))
    a, b do not see /run: checkpoints are kept on their own disks, in /state/1, each \
part on 2 nodes; text and weights that they lack come from this machine

    A single node cannot have two copies, whatever the settings are.

    >>> "on one node only" in kept_where(Path("/run"), {"a": "/state/1"}, storage, 1)
    True
    """
    if not places:
        there = "on their own disks, in " if storage.is_local else "in "
        return (
            f"all workers see {run_dir}: checkpoints are kept {there}"
            f"{storage.directory}"
        )
    folders = ", ".join(sorted({*places.values()}))
    who = ", ".join(sorted(places))
    do = "does" if len(places) == 1 else "do"
    their = "its own disk" if len(places) == 1 else "their own disks"
    return (
        f"{who} {do} not see {run_dir}: checkpoints are kept on {their}, in {folders}"
        f"{_lasting(storage, num_nodes)}; "
        "text and weights that they lack come from this machine"
    )


def _lasting(storage: CheckpointStorage, num_nodes: int) -> str:
    copies = min(storage.copies, num_nodes)
    if copies > 1:
        return f", each part on {copies} nodes"
    if storage.cloud is not None:
        return f" and in {storage.cloud}"
    prevents = (
        "--checkpoint.cloud prevents this"
        if num_nodes == 1
        else "--checkpoint.copies 2 or --checkpoint.cloud prevent this"
    )
    return (
        ", each part on one node only, so it is lost if that node is lost for good "
        f"({prevents})"
    )


def gathering_folder(config: RunConfig) -> Path | None:
    """Return the folder of this machine that gets the last checkpoint of a finished
    run; None if checkpoints are in a store, in a folder that users chose, or here."""
    kept = config.checkpoint
    are_here = LAUNCHERS[config.launcher].workers_are_here
    if are_here or kept.cloud is not None or kept.local is not None:
        return None
    return config.run_dir / CHECKPOINTS


def lacks_results(config: RunConfig) -> bool:
    """Return whether the last checkpoint is to be gathered, but is not here yet."""
    folder = gathering_folder(config)
    if folder is None or not folders_apart(config.run_dir):
        return False
    return config.steps not in steps(folder)


def folders_apart(run_dir: Path) -> Mapping[str, str]:
    """Return the last recorded folders by worker; none if all see the directory."""
    lines = read_journal(run_dir / EVENTS)
    recorded = [line["folders"] for line in lines if line["event"] == APART]
    return recorded[-1] if recorded else {}


def warn_of_newer(run_dir: Path, step: int) -> None:
    """Warn if machines that do not see the directory have a later checkpoint."""
    apart, saved = folders_apart(run_dir), last_saved(read_journal(run_dir / EVENTS))
    if apart and saved is not None and saved > step:
        warnings.warn(
            f"using step {step}, the newest checkpoint on this machine: step {saved} "
            f"is on the disks of {', '.join(sorted(apart))}",
            stacklevel=2,
        )
