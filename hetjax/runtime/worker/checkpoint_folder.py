# SPDX-License-Identifier: Apache-2.0
"""Manages a worker's folder of checkpoints: its own saves, and copies of its peers'.

Owns the lease that keeps other runs out, the writer and the copies; each is created
when it is first needed and kept to the end. Does not own the content (`checkpoint/`),
nor what is found there (`state_inventory.py`).
"""

from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from hetjax.checkpoint.disk import read_manifest
from hetjax.checkpoint.format import Entry, attempt, part_directory
from hetjax.checkpoint.leases.lease import Lease
from hetjax.checkpoint.replication import GATHERER, PeerReplication
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.writer import CheckpointWriter
from hetjax.plans.worker_map import file_name
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.gathering_schema import (
    PartSent,
    PartSize,
    SendPart,
    TellPartSize,
)
from hetjax.runtime.worker.bootstrap import WorkerBootstrap


class CheckpointFolder:
    """The folder of one worker; `hold` and all writes raise if another run has it."""

    def __init__(self, worker: str) -> None:
        self._name = file_name(worker)
        self._lease: Lease | None = None
        self._held: Path | None = None  # the folder of the lease
        self._writer: CheckpointWriter | None = None
        self._copies: PeerReplication | None = None  # of peers' saves

    def close(self) -> None:
        """Finish pending writes; hold the folder to the very end."""
        with ExitStack() as stack:
            if self._lease is not None:
                stack.callback(self._lease.release)
            for part in (self._copies, self._writer):
                if part is not None:
                    stack.callback(part.close)

    def path(self, storage: CheckpointStorage) -> Path:
        """Return where this worker's checkpoints are."""
        return storage.here().at(self._name)

    def own_path(self, storage: CheckpointStorage) -> str:
        """Return that path if the run's directory is not visible here; else empty."""
        here = storage.here()
        return "" if here.directory == storage.directory else str(here.at(self._name))

    def hold(self, storage: CheckpointStorage) -> None:
        """Keep other runs out of the folder, until the end.

        If the run turns out to be another, hold that run's folder instead.
        """
        path = self.path(storage)
        if path != self._held:
            if self._lease is not None:
                self._lease.release()
            self._lease = storage.here().hold(self._name)
            self._held = path

    def keep_all(self) -> None:
        """Remove no checkpoint until another one is whole."""
        if self._writer is not None:
            self._writer.keep_all()

    def discard_after(self, storage: CheckpointStorage, kept: int) -> None:
        """Remove all saves of steps after `kept`."""
        self._writer_to(storage).discard_after(kept)

    def state(self, saves: bool) -> schema.SavingState:
        """Return how far saving is; `saves` says whether this worker takes part."""
        writer = self._writer
        if writer is None:
            return schema.SavingState(saves=saves)
        return schema.SavingState(
            saves=saves,
            busy=writer.busy,
            storing=writer.is_storing,
            newest=writer.newest,
            not_finite=writer.not_finite,
        )

    def keep_copies(self, storage: CheckpointStorage, own: WorkerBootstrap) -> str:
        """Take copies of what peers save; return the address to send them to."""
        if self._copies is None:
            self._copies = self._replication(own)
        self.hold(storage)
        self._copies.store_in(self.path(storage), storage.keep, storage.run)
        return self._copies.address

    def send_copies(self, request: schema.SendCopies) -> None:
        """Send copies of what this worker saves to a peer."""
        assert self._copies is not None, "keep copies first"
        self._copies.send_to(request.to)

    def part_size(self, request: TellPartSize) -> PartSize:
        """Return the size and the attempt of this worker's part of a step."""
        found = read_manifest(self._part(request.storage, request.step))
        if found is None:
            return PartSize(num_bytes=0, attempt="")
        size = sum(file.size_bytes for file in found.files.values())
        return PartSize(num_bytes=size, attempt=attempt(found.host))

    def send_part(self, request: SendPart, own: WorkerBootstrap) -> PartSent:
        """Send this worker's part of a step to the controller's machine."""
        with closing(self._replication(own)) as sender:
            try:
                sender.send_to({GATHERER: own.gatherer})
                part = self._part(request.storage, request.step)
                sender.replicate(part, request.step, request.also)
            except OSError as error:
                return PartSent(failure=str(error))
        return PartSent(failure="")

    def save(
        self, request: schema.SaveState, entries: Iterable[tuple[Entry, np.ndarray]]
    ) -> None:
        """Start writing a checkpoint, if this worker takes part in it."""
        if self._name not in request.workers:
            return
        started = self._writer_to(request.storage).save(
            request.step,
            entries,
            host=request.host,
            workers=request.workers,
            safe=request.safe,
            best=request.best,
            uploads_now=request.uploads_now,
        )
        assert started, "the controller asks who is busy first"

    def wait(self) -> None:
        """Wait until everything is written."""
        if self._writer is not None:
            self._writer.wait()

    def _part(self, storage: CheckpointStorage, step: int) -> Path:
        return part_directory(self.path(storage), step, self._name)

    def _replication(self, own: WorkerBootstrap) -> PeerReplication:
        return PeerReplication(
            self._name, own.host, own.secret, own.silence_s, own.incarnation, own.tls
        )

    def _writer_to(self, storage: CheckpointStorage) -> CheckpointWriter:
        if self._writer is None:
            self.hold(storage)
            here = storage.here()
            self._writer = here.writer(self._name, self._copies, self._lease)
        return self._writer
