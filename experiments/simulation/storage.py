# SPDX-License-Identifier: Apache-2.0
"""Where a simulated run keeps its checkpoints: on disks, and in a store if it has one.

Owns opening what it has, and who holds leases: a process of the machine on which
controllers run. Does not own leases (`hetjax/checkpoint/leases/lease.py`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from experiments.simulation.object_store import Bucket, SimStore
from experiments.simulation.threads import Threads
from hetjax.checkpoint.leases import lease
from hetjax.checkpoint.leases.lease import Fence
from hetjax.checkpoint.leases.lease_holder import HeldFor, Holder
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stores.store import Store
from hetjax.training.directory import leases

DIRECTORY = Path("simulated")


@dataclass(frozen=True, kw_only=True)
class SimStorage(CheckpointStorage):
    """`CheckpointStorage` whose store is a bucket, and whose lease is in a folder that
    workers see or, if it is None, do not."""

    bucket: Bucket | None
    folder: Bucket | None = None

    def store(self, is_tried: bool = True) -> Store | None:
        return None if self.bucket is None else SimStore(self.bucket)

    def store_fence(self) -> Fence:
        store = self.store()
        assert store is not None
        return Fence(store, "the store", self.store_number)

    def fence(self) -> Fence | None:
        if self.folder is None:
            return None
        return Fence(SimStore(self.folder), "the run directory", self.number)


def storage_of(keep: int, bucket: Bucket | None, folder: Bucket | None) -> SimStorage:
    return SimStorage(
        directory=str(DIRECTORY),
        keep=keep,
        cloud=None if bucket is None else "simulated",
        bucket=bucket,
        folder=folder,
    )


class RunDirectory:
    """What stands for the path of the run's directory, in which there is a run."""

    def __truediv__(self, name: str) -> "RunDirectory":
        return self

    def absolute(self) -> "RunDirectory":
        return self

    def exists(self) -> bool:
        return True

    def stat(self) -> NoReturn:
        raise FileNotFoundError

    def __str__(self) -> str:
        return "the run directory"

    __repr__ = __str__


@contextmanager
def leases_in(threads: Threads, folder: Bucket) -> Iterator[None]:
    """Processes of a run, in place of this machine's, hold leases within this.

    Those on the run's directory are in the folder.
    """

    def own(held_for: HeldFor) -> Holder:
        process = threads.process
        return Holder(
            token=process.name,
            host=process.host,
            pid=0,
            machine=process.host,
            started=process.name,
            run=held_for.run,
            home=held_for.home,
        )

    def is_known_dead(holder: Holder) -> bool:
        """One can tell of a process of the same machine alone."""
        is_here = holder.machine == threads.process.host
        alive = {process.name for process in threads.processes if process.is_alive}
        return is_here and holder.started not in alive

    with ExitStack() as stack:
        for name, other in (
            ("holder_here", own),
            ("threading", threads),
            ("time", threads),
        ):
            stack.enter_context(patch.object(lease, name, other))
        stack.enter_context(patch.object(leases, "time", threads))
        # nobody removes the folder here, so no number is taken twice
        never = lambda _: False  # noqa: E731
        stack.enter_context(patch.object(lease.Lease, "_has_another_holder", never))
        in_folder = lambda path: SimStore(folder)  # noqa: E731
        stack.enter_context(patch.object(leases, "lease_folder", in_folder))
        dead = property(is_known_dead)
        stack.enter_context(patch.object(Holder, "is_known_dead", dead))
        yield
