# SPDX-License-Identifier: Apache-2.0
"""Reads the progress of the run in a directory from its journals and checkpoints.

Owns where its checkpoints are, its newest step, which steps were evaluated and which
was best. Does not own the run's identity (`identity.py`), nor restoring its state
(`hetjax/training/recovery/`).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetjax.checkpoint.fetching import fetch_newest
from hetjax.checkpoint.reader import Checkpoint, DamagedCheckpoint, steps
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.errors import BadInput
from hetjax.launchers.table import LAUNCHERS
from hetjax.plans.worker_map import EMBEDDED
from hetjax.report.progress import Display
from hetjax.training.directory import rundir
from hetjax.training.directory.best import BestCheckpoint, losses_of
from hetjax.training.directory.identity import Claim, settled
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.leftover_checkpoints import identify, saved_here
from hetjax.training.settings.config import RunConfig


def checkpoint_storage(
    config: RunConfig, run: RunIdentity | None = None
) -> CheckpointStorage:
    """Return where the run's checkpoints go; without `run`, any run's are read."""
    directory = config.checkpoint.local or config.run_dir / rundir.CHECKPOINTS
    key_file, copies = config.checkpoint.key_file, config.checkpoint.copies
    return CheckpointStorage(
        directory=str(directory.absolute()),
        keep=config.checkpoint.keep,
        copies=copies or 1,
        copies_apart=copies or (2 if config.checkpoint.cloud is None else 1),
        cloud=config.checkpoint.cloud,
        endpoint=config.checkpoint.endpoint,
        upload_mbit_per_s=config.checkpoint.upload_mbit_per_s,
        key_file=None if key_file is None else str(key_file.absolute()),
        run=run,
        is_local=config.checkpoint.local is not None,
    )


def identified_here(config: RunConfig, claim: Claim, shown: Display) -> Claim:
    """Return the claim, with the run's identity if this process sees all saves."""
    if LAUNCHERS[config.launcher].has_worker_processes:
        return claim
    storage = checkpoint_storage(config)
    found = saved_here(storage, EMBEDDED)
    return settled(claim, identify(claim, storage, found, shown.note))


def read_progress(
    config: RunConfig, run: RunIdentity, shown: Display
) -> tuple[int | None, bool]:
    """Return the newest step that the run has saved, if any, and whether it is done.

    Without worker processes it is the newest complete checkpoint, for which newer or
    missing files are fetched from the store. With worker processes it is the newest
    recorded step: workers find the files once they have started. Raises BadInput if
    more than `config.steps` steps are done.
    """
    if LAUNCHERS[config.launcher].has_worker_processes:
        saved = last_saved(read_journal(config.run_dir / rundir.EVENTS))
    else:
        saved = _newest_step(config, run, shown)
    if saved is not None:
        check_reached(saved, config)
    return saved, saved == config.steps and saved in evaluated(config.run_dir)


def check_reached(step: int, config: RunConfig) -> None:
    """Raise BadInput if the run has done more than `config.steps` steps."""
    if step > config.steps:
        raise BadInput(
            got=f"--steps {config.steps}, but the run in {str(config.run_dir)!r} has "
            f"done {step}",
            allowed=f"steps >= {step}",
            fix=f"give --steps {step} or more, or another --run-dir",
        )


def evaluated(run_dir: Path) -> set[int]:
    """Return the steps after which the run was evaluated."""
    return set(losses_of(read_journal(run_dir / rundir.METRICS)))


def best_so_far(config: RunConfig) -> BestCheckpoint:
    """Return the best checkpoint according to the run's journals."""
    metrics, events = (
        read_journal(config.run_dir / name) for name in (rundir.METRICS, rundir.EVENTS)
    )
    return BestCheckpoint.before(metrics, events, config.checkpoint.keep)


def last_saved(events: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the newest complete checkpoint according to the lines of events.jsonl.

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


def _newest_step(config: RunConfig, run: RunIdentity, shown: Display) -> int | None:
    """Return the newest step here or in the store, which repairs damaged files here."""
    kept = checkpoint_storage(config, run)
    directory, store = kept.at(EMBEDDED), kept.store()
    key = kept.key()
    newest = max(steps(directory, key, run), default=0)
    fetched = None
    if store is not None:
        fetched = fetch_newest(store, directory, newest - 1, key, run)
    if fetched is not None and fetched.cloud_bytes:
        shown.note(
            f"fetched step {fetched.step} from {config.checkpoint.cloud}: "
            f"{fetched.cloud_bytes:,} bytes in {fetched.seconds:.1f} s, "
            f"{fetched.disk_bytes:,} were already here"
        )
    try:
        with rundir.usable(config.run_dir):
            return Checkpoint.open(directory, key=key, run=run).step
    except (DamagedCheckpoint, rundir.Unusable):
        raise  # starting anew would overwrite what may be repaired
    except BadInput:
        return None  # none is complete yet
