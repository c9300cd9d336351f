# SPDX-License-Identifier: Apache-2.0
"""The leases of a run: on its directory, and on its store.

Owns taking both before the run writes anything, and noticing that one is over. Does not
own what a lease is (`hetjax/checkpoint/lease.py`), nor the lock that keeps processes of
one machine apart at once (`rundir.py`).
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from hetjax.checkpoint.lease import Lease, take
from hetjax.checkpoint.storage import CheckpointStorage, lease_folder
from hetjax.training.rundir import CONFIG, LEASE, usable

_LOOK_S = 1.0  # between two looks at the run directory


class Leases:
    """What a run holds until `stack` is closed; raises Held, and as stores do.

    `told` hears of a lease that may be over, and has to be waited for.
    """

    def __init__(
        self,
        run_dir: Path,
        storage: CheckpointStorage,
        stack: ExitStack,
        told: Callable[[str], None],
    ) -> None:
        self._folder = (run_dir / LEASE).absolute()
        with usable(run_dir):
            where = f"run directory {str(run_dir)!r}"
            self._run = take(lease_folder(self._folder), where, told)
        stack.callback(self._leave_nothing, run_dir / CONFIG)
        stack.enter_context(self._run)
        self._store: Lease | None = None
        if (store := storage.store()) is not None:
            self._store = take(store, f"checkpoint store {store}", told)
            stack.enter_context(self._store)
        self._looked_s = time.monotonic()

    def _leave_nothing(self, config: Path) -> None:
        """Forget a lease under which no run has come to be."""
        if not config.exists():
            with suppress(OSError):
                self._run.forget()

    @property
    def start(self) -> int:
        """A number that is greater with each start of the run."""
        return self._run.number

    def of(self, storage: CheckpointStorage) -> CheckpointStorage:
        """The storage under these leases, so that workers look, too."""
        return replace(
            storage,
            lease=str(self._folder),
            number=self._run.number,
            store_number=0 if self._store is None else self._store.number,
        )

    def check(self) -> None:
        """Raise LeaseLost if one is over; not more than a second late."""
        if self._store is not None:
            self._store.check_seen()
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._run.fence.check()
