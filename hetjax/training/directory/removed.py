# SPDX-License-Identifier: Apache-2.0
"""Detects that the directory of a run was removed while it trains.

Owns the check, which also notices another run that has since started there, and the
errors. Does not own the files (`rundir.py`) nor writing them again
(`training/open_run.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetjax.checkpoint.run_identity import RunIdentity, named
from hetjax.checkpoint.stores.store import Conflict
from hetjax.errors import BadInput, RunFailed
from hetjax.training.directory.rundir import CONFIG, read_identity


def was_removed(run_dir: Path, run: RunIdentity) -> bool:
    """Return whether the directory of this run no longer exists.

    Raises RunFailed if another run is in it.
    """
    try:
        if not (run_dir / CONFIG).exists():
            return True
        found = read_identity(run_dir)
    except (BadInput, OSError):  # a file that was changed, or a disk that is missing
        return False  # the next use of the directory reports it
    if found is None or found.id == run.id:
        return False
    raise _replaced(run_dir, run, named(found.id))


def _replaced(run_dir: Path, run: RunIdentity, by: str) -> RunFailed:
    return RunFailed(
        got=f"run directory {str(run_dir)!r} now holds {by}, but {named(run.id)} is "
        "still running there",
        allowed="a run directory that stays in place until its run ends",
        fix="start this run again in another --run-dir: it resumes from its "
        "--checkpoint.local folders or its store, if it has any, or else starts anew",
    )


@contextmanager
def rewriting(run_dir: Path, run: RunIdentity) -> Iterator[None]:
    """Make a removed directory anew for writes within `with`.

    Raises RunFailed if that or a write fails.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        yield
    except Conflict as conflict:
        raise _replaced(run_dir, run, "a run that has just started") from conflict
    except OSError as error:
        raise RunFailed(
            got=f"run directory {str(run_dir)!r} was removed, and cannot be written "
            f"again ({error.strerror})",
            allowed="a run directory that stays in place until its run ends",
            fix="make sure that the directory can be created, then run the same "
            "command again: it resumes from --checkpoint.local folders or the store, "
            "if the run has any, or else starts anew",
        ) from error
