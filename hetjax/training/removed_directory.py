# SPDX-License-Identifier: Apache-2.0
"""A run whose directory is removed while it goes on.

Owns noticing that, also where another run has begun there since, writing it again, and
the errors. Does not own the files (`rundir.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetjax.checkpoint.run_identity import RunIdentity, named
from hetjax.checkpoint.stores.store import Conflict
from hetjax.data.dataset import Dataset
from hetjax.elastic.driver import Driver
from hetjax.errors import BadInput, RunFailed
from hetjax.report.progress import Display
from hetjax.training.events import event
from hetjax.training.rundir import CONFIG, Journal, read_identity, write_start
from hetjax.training.starting import Start


def was_removed(run_dir: Path, run: RunIdentity) -> bool:
    """Whether the directory of this run is not there any more.

    Raises RunFailed where it is another run's.
    """
    try:
        if not (run_dir / CONFIG).exists():
            return True
        found = read_identity(run_dir)
    except (BadInput, OSError):  # whoever changes the file, or a disk that is away
        return False  # is heard of where the directory is used next
    if found is None or found.id == run.id:
        return False
    raise _replaced(run_dir, run, named(found.id))


def _replaced(run_dir: Path, run: RunIdentity, by: str) -> RunFailed:
    return RunFailed(
        got=f"run directory {str(run_dir)!r} holds {by}, and held "
        f"{named(run.id)}, which goes on here",
        allowed="a directory that stays as long as its run",
        fix="start this run again in another --run-dir: it goes on from what is in its "
        "--checkpoint.local folders or its store, if it has any, and else begins anew",
    )


@contextmanager
def rewriting(run_dir: Path, run: RunIdentity) -> Iterator[None]:
    """Write in a directory that was removed; raises RunFailed where that fails."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        yield
    except Conflict as conflict:
        raise _replaced(run_dir, run, "a run that has just begun") from conflict
    except OSError as error:
        raise RunFailed(
            got=f"run directory {str(run_dir)!r} was removed, and cannot be written "
            f"again ({error.strerror})",
            allowed="a directory that stays as long as its run",
            fix="see that the directory can be made, then run the same command again: "
            "it goes on from what is in --checkpoint.local folders or the store, if "
            "the run has any, and else begins anew",
        ) from error


def write_again_if_removed(
    start: Start,
    dataset: Dataset,
    driver: Driver,
    metrics: Journal,
    events: Journal,
    shown: Display,
) -> bool:
    """Write the run's files again if its directory was removed; tell whether so."""
    run_dir, run = start.config.run_dir, driver.run or start.run
    if not was_removed(run_dir, run):
        return False
    with rewriting(run_dir, run):
        if start.leases is not None:
            start.leases.assert_again()
        config, cluster, plan = start.config, driver.cluster, driver.plan
        write_start(run_dir, run, config, dataset, cluster, plan)
        metrics.write_again()
        events.write_again()
    event(events, "rewritten", driver.at)
    shown.note(f"{run_dir} was removed: its files are written again")
    return True
