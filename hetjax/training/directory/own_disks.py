# SPDX-License-Identifier: Apache-2.0
"""Describes and records which machines of a run do not see its directory.

They keep checkpoints on their own disks. So a run directory without checkpoints does
not prove that the run has none. Owns the words and the event. Does not own the check of
what a machine sees (`checkpoint/storage.py`) nor what a start does about it
(`leftover_checkpoints.py`).
"""

from collections.abc import Mapping
from pathlib import Path

from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import EVENTS

APART = "apart"  # an event in events.jsonl, with `folders` by worker


def kept_where(
    run_dir: Path, places: Mapping[str, str], storage: CheckpointStorage
) -> str:
    """Return a text on which workers, by `places`, do not see the run's directory.

    >>> storage = CheckpointStorage(directory="/run/checkpoints", copies=2)
    >>> kept_where(Path("/run"), {}, storage)
    'all workers see /run: checkpoints are kept in /run/checkpoints'
    >>> print(kept_where(Path("/run"), {"b": "/state/1", "a": "/state/1"}, storage))
    a, b do not see /run: checkpoints are kept on their own disks, in /state/1, each \
part on 2 nodes; text and weights that they lack come from this machine
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
        f"{_lasting(storage)}; text and weights that they lack come from this machine"
    )


def _lasting(storage: CheckpointStorage) -> str:
    if storage.copies > 1:
        return f", each part on {storage.copies} nodes"
    if storage.cloud is not None:
        return f" and in {storage.cloud}"
    return (
        ", each part on one node only, so it is lost if that node is lost for good "
        "(--checkpoint.copies 2 or --checkpoint.cloud prevent this)"
    )


def folders_apart(run_dir: Path) -> Mapping[str, str]:
    """Return the last recorded folders by worker; none if all see the directory."""
    lines = read_journal(run_dir / EVENTS)
    recorded = [line["folders"] for line in lines if line["event"] == APART]
    return recorded[-1] if recorded else {}
