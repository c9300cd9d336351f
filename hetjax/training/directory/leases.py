# SPDX-License-Identifier: Apache-2.0
"""Takes and checks the leases of a run: on its directory, and on its store.

Owns taking both before the run writes anything, noticing that one has ended, and
distinguishing a copied run directory from a moved one. Does not own leases themselves
(`checkpoint/leases/lease.py`), those on workers' folders (`checkpoint/storage.py`), nor
the lock that excludes other processes of the same machine at once (`rundir.py`).
"""

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from hetjax.checkpoint.leases.lease import (
    Lease,
    LeaseHeld,
    Sighting,
    acquire,
    await_end,
    holder_of,
    is_free,
    last_number,
    look,
)
from hetjax.checkpoint.leases.lease_holder import HeldFor, Holder
from hetjax.checkpoint.run_identity import UNIDENTIFIED, RunId
from hetjax.checkpoint.storage import CheckpointStorage, lease_folder
from hetjax.errors import BadInput
from hetjax.training.directory.rundir import CONFIG, LEASE, usable

_LOOK_S = 1.0  # between two checks of the run directory's lease


class IsCopy(BadInput):
    """The run directory is a copy, and the run was resumed in the original."""


def home_of(run_dir: Path) -> str:
    """Return what tells this directory from a copy: machine, inode and path."""
    try:
        inode = run_dir.stat().st_ino
    except OSError:
        inode = 0
    return f"{socket.gethostname()} {inode} {run_dir.absolute()}"


def _check_is_no_copy(
    run_dir: Path,
    held_for: HeldFor,
    report_line: Callable[[str], None],
    takes_over: bool,
    number: int,
    holder: Holder,
) -> None:
    """Raise IsCopy or LeaseHeld if the run was resumed, or runs, in the original.

    The original is the directory for which `holder` took lease `number`; a copy has
    that lease, too. The check finds only an original that this machine sees. A
    directory that was moved has no original any more.
    """
    host, _, path = [*holder.home.split(" ", 2), "", ""][:3]
    if not path or holder.home == held_for.home:
        return
    original = Path(path)
    is_seen = host == socket.gethostname() and home_of(original) == holder.home
    if not is_seen or not original.exists() or original.samefile(run_dir):
        return
    there = lease_folder(original / LEASE)
    newest = holder_of(there, last_number(there))
    if newest is None or newest.run != held_for.run:
        return  # another run has started there
    what = f"run directory {str(run_dir)!r}, a copy of {path!r}"
    if last_number(there) > number and not takes_over:
        raise IsCopy(
            got=f"{what}; run {held_for.run} was started later in the original",
            allowed="the directory in which the run was started last",
            fix=f"give --run-dir {path}; or let the copy resume from its own newest "
            f"checkpoint (--adopt {held_for.run}), and stop using the original",
        )
    try:
        await_end(there, f"{what}, which", report_line, held_for)
    except LeaseHeld as held:
        fix = f"wait for it or stop it, then resume there (--run-dir {path})"
        raise LeaseHeld(got=held.got, allowed=held.allowed, fix=fix) from held


def _look_at_store(storage: CheckpointStorage) -> Sighting | None:
    """Return a sighting of the store's lease; None if there is no store to look at.

    The wait for that lease then overlaps with the wait for the directory's lease.
    """
    with suppress(OSError, BadInput):
        if (store := storage.store(is_tried=False)) is not None:
            return look(store)
    return None


class Leases:
    """The leases that a run holds until `stack` is closed.

    Raises LeaseHeld, and what stores raise. Raises IsCopy for a copied directory if the
    run was resumed in the original, unless it `takes_over`. `report_line` gets a line
    for each lease that may have ended and must be waited for.
    """

    def __init__(
        self,
        run_dir: Path,
        storage: CheckpointStorage,
        stack: ExitStack,
        report_line: Callable[[str], None],
        run: RunId = UNIDENTIFIED,
        takes_over: bool = False,
    ) -> None:
        self._folder = (run_dir / LEASE).absolute()
        held_for = HeldFor(run=run, home=home_of(run_dir))
        with usable(run_dir):
            where = f"run directory {str(run_dir)!r}"
            copied = partial(
                _check_is_no_copy, run_dir, held_for, report_line, takes_over
            )
            own = lease_folder(self._folder)
            seen = None if is_free(own) else _look_at_store(storage)
            self._run = acquire(
                own, where, report_line, held_for=held_for, check=copied
            )
        self._home = held_for.home
        stack.callback(self._leave_nothing, run_dir / CONFIG)
        stack.enter_context(self._run)
        self._store: Lease | None = None
        if (store := storage.store()) is not None:
            where = f"checkpoint store {store}"
            self._store = acquire(
                store, where, report_line, held_for=held_for, seen=seen
            )
            stack.enter_context(self._store)
        self._looked_s = time.monotonic()

    def _leave_nothing(self, config: Path) -> None:
        """Remove the directory's lease if no run was created under it."""
        if not config.exists():
            with suppress(OSError):
                self._run.forget()

    @property
    def start(self) -> int:
        """The number of this start, which grows with each start of the run."""
        return self._run.number

    def protecting(
        self, storage: CheckpointStorage, is_far: bool = False
    ) -> CheckpointStorage:
        """Return the storage with these leases, so that workers check them, too.

        If `is_far`, workers first check whether they see the directory.
        """
        return replace(
            storage,
            home=self._home,
            token=self._run.token if is_far else "",
            lease=str(self._folder),
            number=self._run.number,
            store_number=0 if self._store is None else self._store.number,
        )

    def assert_again(self) -> None:
        """Write the directory's lease again if the directory was removed."""
        self._run.assert_again()

    def check(self) -> None:
        """Raise LeaseLost if a lease has ended, at most a second late."""
        if self._store is not None:
            self._store.check_seen()
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._run.fence.check()
