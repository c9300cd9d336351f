# SPDX-License-Identifier: Apache-2.0
"""Finds a run's checkpoint to read: on the disks here, otherwise in the run's store.

Owns the choice between the newest, the best and a given step. Does not own reading
(`checkpoint/reader.py`) nor what is read for (`exporting.py`, `trained_sources.py`).
"""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from hetjax.checkpoint.fetching import fetch, fetch_newest
from hetjax.checkpoint.reader import Checkpoint, steps
from hetjax.checkpoint.storage import LEASES, CheckpointStorage
from hetjax.checkpoint.stored_steps import committed_steps
from hetjax.checkpoint.stores.store import Store
from hetjax.errors import BadInput
from hetjax.training.directory import rundir
from hetjax.training.directory.best import best_of, losses_of
from hetjax.training.directory.frozen_base import base_hashes, check_base
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.own_disks import warn_of_newer
from hetjax.training.directory.progress import checkpoint_storage
from hetjax.training.directory.reopened import reopened
from hetjax.training.settings.config import RunConfig

AskedStep = int | Literal["best"] | None  # None: the newest


def run_config(run_dir: Path) -> RunConfig:
    """Return the settings of the run in that directory.

    Raises BadInput if there is none, or if its frozen weights have changed.
    """
    previous = rundir.read_previous(run_dir)
    if previous is None:
        raise BadInput(
            got=f"no run in {str(run_dir)!r}",
            allowed="the --run-dir of a run",
            fix="give the folder that train was given; presets train in runs/PRESET",
        )
    config = reopened(previous, run_dir)
    check_base(previous.base, base_hashes(config), config)
    return config


@contextmanager
def open_checkpoint(config: RunConfig, step: AskedStep) -> Iterator[Checkpoint]:
    """Open a checkpoint on the disks here, otherwise one from the run's store.

    Raises BadInput if there is no complete checkpoint, none of that step, or, for the
    best, none that was evaluated.
    """
    _check_step(step)
    run = rundir.read_identity(config.run_dir)
    storage = checkpoint_storage(config, run)
    directory, key = Path(storage.directory), storage.key()
    is_whole = "{worker}" not in storage.directory
    here = steps(directory, key, run) if is_whole else []
    store = None if step in here else storage.store()
    if store is None and is_whole:
        found = _best(config, here) if step == "best" else step
        yield _opened(config, directory, found, storage)
        return
    with TemporaryDirectory() as scratch:
        no_leases = shutil.ignore_patterns(LEASES)  # these appear and vanish
        for root in glob(storage.directory.replace("{worker}", "*")):
            shutil.copytree(
                root,
                scratch,
                ignore=no_leases,
                copy_function=_linked,
                dirs_exist_ok=True,
            )
        if step is not None:
            step = _fetch(step, config, store, Path(scratch), storage)
        elif store is not None:
            fetch_newest(store, Path(scratch), -1, key, run)
        yield _opened(config, Path(scratch), step, storage)


def _opened(
    config: RunConfig, directory: Path, step: int | None, storage: CheckpointStorage
) -> Checkpoint:
    """Open a checkpoint; warn if a newer one is on disks of other machines alone."""
    found = Checkpoint.open(directory, step, storage.key(), storage.run)
    if step is None:
        warn_of_newer(config.run_dir, found.step)
    return found


def _fetch(
    asked: int | Literal["best"],
    config: RunConfig,
    store: Store | None,
    directory: Path,
    storage: CheckpointStorage,
) -> int:
    """Return the step asked for, after fetching it from the store unless it is here.
    Raises BadInput if it is in neither."""
    key, run = storage.key(), storage.run
    here = steps(directory, key, run)
    stored = [] if store is None or asked in here else committed_steps(store, run)
    known = {*here, *stored}
    step = _best(config, known) if asked == "best" else asked
    if step not in known:
        where = "here" if store is None else "here or in the run's store"
        raise BadInput(
            got=f"no complete checkpoint of step {step} {where}",
            allowed=f"complete steps: {', '.join(map(str, sorted(known))) or 'none'}",
            fix="give one of these steps, or leave --step out",
        )
    if store is not None and step not in here:
        fetch(store, directory, step, key)
    return step


def _check_step(step: Any) -> None:
    is_number = type(step) is int and step >= 0
    if not is_number and step not in (None, "best"):
        raise BadInput(
            got=f"step {step!r}",
            allowed="the step of a checkpoint, 'best', or None for the newest",
            fix="give step=None, say",
        )


def _best(config: RunConfig, saved: Collection[int]) -> int:
    metrics = read_journal(config.run_dir / rundir.METRICS)
    found = best_of(losses_of(metrics), saved)
    if found is None:
        raise BadInput(
            got="--step best, but no checkpoint of the run in "
            f"{str(config.run_dir)!r} was evaluated",
            allowed="runs with an evaluation at a saved step, as all have at their end",
            fix="leave --step out, to use the newest checkpoint",
        )
    return found


def _linked(source: str, target: str) -> None:
    """Link `target` to the file if the disk allows that, otherwise copy the file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
