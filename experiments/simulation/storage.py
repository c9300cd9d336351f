# SPDX-License-Identifier: Apache-2.0
"""Defines where a simulated run keeps its checkpoints: on disks, perhaps in a store."""

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
    """`CheckpointStorage` whose store is a bucket and whose lease is in `folder`.

    `folder` is None if workers do not see it.
    """

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
    """A stand-in for the path of a run directory that exists."""

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
    """Let the simulated processes, not this machine's, hold leases in this context."""

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
        """Whether the holder is dead; known only for processes of the same machine."""
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
        # the folder is never removed here, so no number is taken twice
        never = lambda _: False  # noqa: E731
        stack.enter_context(patch.object(lease.Lease, "_has_another_holder", never))
        in_folder = lambda path: SimStore(folder)  # noqa: E731
        stack.enter_context(patch.object(leases, "lease_folder", in_folder))
        dead = property(is_known_dead)
        stack.enter_context(patch.object(Holder, "is_known_dead", dead))
        yield
