# SPDX-License-Identifier: Apache-2.0
"""Ends a run: done, stopped with its state saved, or unable to continue.

Owns exit codes and the messages for full disks, failing stores and lost workers. Does
not own what led to the end (`session.py`, `loop.py`).
"""

import errno
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from hetjax.checkpoint.format import MANIFEST
from hetjax.checkpoint.stores.store import StoreError
from hetjax.errors import RunFailed, counted_noun
from hetjax.launchers.table import LAUNCHERS
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.directory import rundir
from hetjax.training.directory.best import VAL_LOSS
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.own_disks import folders_apart, gathering_folder
from hetjax.training.directory.rundir import LOGS
from hetjax.training.recorder import Recorder
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.notices import StopRequest
from hetjax.training.recovery.recovered import GivenUp
from hetjax.training.settings.checks import option
from hetjax.training.settings.config import RunConfig
from hetjax.training.start import Start

DONE, PREEMPTED = 0, 4  # exit codes
_HOW_TO_COPY = "docs/many-machines.md#the-model-of-machines-that-share-nothing"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def finish(
    start: Start,
    step: int,
    stop: StopRequest,
    recorder: Recorder,
    again: str,
) -> int:
    """Record the end, show that `again` resumes from there, return the exit code."""
    run_dir, num_steps = start.config.run_dir, start.config.steps
    if step < num_steps:
        grace = {} if stop.grace_s is None else {"grace_s": stop.grace_s}
        recorder.event("preempted", step, reason=stop.reason, **grace)
        where = f"in {run_dir}"
        if step and folders_apart(run_dir):
            store = _and_in_store(start.config)
            where = f"on the machines' own disks{store}, settings {where}"
        state = f"{'state saved' if step else 'nothing saved yet'} {where}"
        recorder.note(
            f"stopped by {stop.reason} at step {step} of {num_steps}, {state}; {again} "
            f"{'resumes from there' if step else 'begins the run'}"
        )
        return PREEMPTED
    recorder.event("finished", step)
    lines = read_journal(run_dir / rundir.METRICS)
    last = next(line for line in reversed(lines) if "val_bits_per_byte" in line)
    speeds = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    # no step has a line if metrics.jsonl was lost after the last step
    speed = f", median tokens_per_s {median(speeds):,.0f}" if speeds else ""
    recorder.note(
        f"done: {counted_noun(num_steps, 'step')}, val_loss {last[VAL_LOSS]:.4f}, "
        f"val_bits_per_byte {last['val_bits_per_byte']:.4f}{speed}"
    )
    recorder.note(
        f"{_what_is_here(start.config)} are in {run_dir}; {again} with more steps "
        "resumes from there"
    )
    return DONE


def gather_results(
    driver: Driver,
    best: int | None,
    config: RunConfig,
    recorder: Recorder,
    stop: StopRequest,
) -> None:
    """Copy the last and the best checkpoint to this machine, if others have them on
    their own disks alone. The run is done: whatever fails is only reported, and a
    request to stop ends the copying.
    """
    folder = gathering_folder(config)
    if folder is None or not driver.places():
        return
    stop.is_saved, driver.must_give_up = True, lambda: stop.reason is not None
    also = [] if best is None else [best]
    with suppress(WorkerLost, GivenUp):
        for step in sorted({*also, driver.at}):  # the last one replaces earlier ones
            _gather(driver, step, also, folder, recorder)


def _gather(
    driver: Driver,
    step: int,
    also: Sequence[int],
    folder: Path,
    recorder: Recorder,
) -> None:
    """Copy a checkpoint to this folder here. Raises WorkerLost and GivenUp."""
    what, apart = f"checkpoint of step {step}", ", ".join(sorted(driver.places()))
    begin_s = time.perf_counter()

    def on_begin(senders: Sequence[str], num_bytes: int) -> None:
        names = ", ".join(sorted(senders))
        recorder.note(
            f"copying the {what} ({num_bytes:,} bytes) from {names} to {folder}"
        )

    try:
        num_bytes = driver.gather(step, also, on_begin)
    except (OSError, GivenUp) as error:
        recorder.note(
            f"the {what} was not copied to this machine ("
            f"{str(error) or 'the run was asked to stop'}): the same command tries it "
            f"again; or copy it from the disks of {apart} as {_HOW_TO_COPY} shows"
        )
        if isinstance(error, (WorkerLost, GivenUp)):
            raise
    else:
        if num_bytes:
            took_s = round(time.perf_counter() - begin_s, 3)
            moved = {"bytes": {"peer": num_bytes}, "seconds": {"peer": took_s}}
            recorder.event("gathered", step, **moved)


def _what_is_here(config: RunConfig) -> str:
    if not (apart := folders_apart(config.run_dir)):
        return "metrics, settings and checkpoints"
    whose, store = ", ".join(sorted(apart)), _and_in_store(config)
    # of workers that do see the run directory, or gathered
    folder = config.run_dir / rundir.CHECKPOINTS
    here = f" and in {folder}" if any(folder.glob(f"step_*/*/{MANIFEST}")) else ""
    return f"checkpoints are on the disks of {whose}{here}{store}; metrics and settings"


def _and_in_store(config: RunConfig) -> str:
    cloud = config.checkpoint.cloud
    return "" if cloud is None else f" and in {cloud}"


@contextmanager
def clear_ends(config: RunConfig) -> Iterator[None]:
    """Turn a full disk, a store that fails and a lost worker into RunFailed."""
    try:
        yield
    except StoreError as error:
        raise _failed(
            error,
            "a store that answers and has what was stored "
            f"({option('checkpoint.cloud')} {config.checkpoint.cloud})",
            "make sure that this machine can reach it",
        ) from error
    except WorkerLost as lost:  # the worker could not be restarted
        logs = LAUNCHERS[config.launcher].logs.format(logs=config.run_dir / LOGS)
        allowed = f"all workers of the plan; {len(lost.reports)} more without error"
        raise _failed(lost, allowed, f"see {logs}") from lost
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _failed(
            f"{error.filename or f'a file of the run in {config.run_dir}'}: "
            f"{error.strerror}",
            "room for the run's files; what was written before is intact",
            "make room on that disk",
        ) from error


def _failed(got: object, allowed: str, fix: str) -> RunFailed:
    again = "then run the same command again: it resumes from the last checkpoint"
    return RunFailed(got=str(got), allowed=allowed, fix=f"{fix}, {again}")
