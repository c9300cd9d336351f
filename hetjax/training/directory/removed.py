# SPDX-License-Identifier: Apache-2.0
"""A run whose directory is removed while it goes on.

Owns noticing that, also where another run has begun there since, and the errors. Does
not own the files (`rundir.py`) nor writing them again (`training/open_run.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetjax.checkpoint.run_identity import RunIdentity, named
from hetjax.checkpoint.stores.store import Conflict
from hetjax.errors import BadInput, RunFailed
from hetjax.training.directory.rundir import CONFIG, read_identity


def was_removed(run_dir: Path, run: RunIdentity) -> bool:
    """Whether the directory of this run is not there any more.

    Raises RunFailed where it is another run's.
    """
    try:
        if not (run_dir / CONFIG).exists():
            return True
        found = read_identity(run_dir)
    except (BadInput, OSError):  # whoever changes the file, or a disk that is away
        return False  # is reported where the directory is used next
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
