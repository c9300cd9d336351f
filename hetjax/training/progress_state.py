# SPDX-License-Identifier: Apache-2.0
"""How far a run has come before this start: what its directory and its store say.

Owns finding the checkpoint to go on from where this process is to read it, and whether
anything is left to do. Workers in other processes find theirs when they are there
(`starting.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.checkpoint.reader import (
    Checkpoint,
    DamagedCheckpoint,
    steps,
)
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stored_steps import fetch_newest
from hetjax.errors import BadInput
from hetjax.plans.worker_map import EMBEDDED
from hetjax.report.progress import Display
from hetjax.training import rundir
from hetjax.training.config import RunConfig
from hetjax.training.journal import read_journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What is known of earlier starts.

    `saved` is the newest step that the run has saved, None if there is none: of the
    embedded launcher what is complete, of others what they have written.
    """

    saved: int | None
    is_done: bool


def checkpoint_storage(config: RunConfig) -> CheckpointStorage:
    """Where the run's checkpoints go."""
    directory = config.checkpoint.local or config.run_dir / rundir.CHECKPOINTS
    return CheckpointStorage(
        directory=str(directory.absolute()),
        keep=config.checkpoint.keep,
        copies=config.checkpoint.copies,
        cloud=config.checkpoint.cloud,
        upload_mbit_per_s=config.checkpoint.upload_mbit_per_s,
    )


def read_progress(config: RunConfig, shown: Display) -> Progress:
    """Read it; of the embedded launcher fetch what is newer or missing here.

    Raises BadInput where more steps are done than the run is to have.
    """
    if config.launcher == EMBEDDED:
        saved = _newest_step(config, shown)
    else:
        saved = last_saved(read_journal(config.run_dir / rundir.EVENTS))
    if saved is not None:
        check_reached(saved, config)
    done = saved == config.steps and saved in evaluated(config.run_dir)
    return Progress(saved=saved, is_done=done)


def check_reached(step: int, config: RunConfig) -> None:
    """Raise BadInput if the run has done more steps than it is to have."""
    if step > config.steps:
        raise BadInput(
            got=f"--steps {config.steps}, and the run in {str(config.run_dir)!r} has "
            f"done {step}",
            allowed=f"steps >= {step}",
            fix=f"give --steps {step} or more, or another --run-dir",
        )


def evaluated(run_dir: Path) -> set[int]:
    """Steps after which the run was evaluated."""
    lines = read_journal(run_dir / rundir.METRICS)
    return {line["step"] for line in lines if "val_loss" in line}


def last_saved(events: Iterable[Mapping[str, Any]]) -> int | None:
    """The newest complete checkpoint by the lines of events.jsonl.

    >>> last_saved([{"event": "saved", "step": 9}, {"event": "recovered", "step": 6}])
    6
    """
    found: int | None = None
    for line in events:
        if line["event"] == "saved":
            found = line["step"]
        elif line["event"] in ("recovered", "restored") and found is not None:
            found = min(found, line["step"])
    return found


def _newest_step(config: RunConfig, shown: Display) -> int | None:
    """The newest that is here or in the store, which mends what is damaged here."""
    directory = checkpoint_storage(config).at(EMBEDDED)
    _fetch(config, shown, after=max(steps(directory), default=0) - 1)
    try:
        with rundir.usable(config.run_dir):
            return Checkpoint.open(directory).step
    except (DamagedCheckpoint, rundir.Unusable):
        raise  # starting anew would write over what may be mended
    except BadInput:
        return None  # none is complete yet


def _fetch(config: RunConfig, shown: Display, after: int) -> None:
    """Complete the store's newest step on the disk, if it has one after this."""
    kept = checkpoint_storage(config)
    store = kept.store()
    if store is None:
        return
    fetched = fetch_newest(store, kept.at(EMBEDDED), after)
    if fetched is not None and fetched.cloud_bytes:
        shown.note(
            f"fetched step {fetched.step} from {config.checkpoint.cloud}: "
            f"{fetched.cloud_bytes:,} bytes in {fetched.seconds:.1f} s, "
            f"{fetched.disk_bytes:,} were here"
        )
