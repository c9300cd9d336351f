# SPDX-License-Identifier: Apache-2.0
"""Writes a simulated worker's part of a checkpoint in the order of the real writer.

That is: leaves, a flush, the manifest in one piece, another flush, and only then the
removal of outdated parts. Owns this order in time. Does not own which parts are
outdated (`hetjax/checkpoint/disk.py`) nor the disk (`disk.py`).
"""

from collections.abc import Callable
from dataclasses import replace

from experiments.simulation.disk import Disk, Part, Written
from experiments.simulation.site import Site
from experiments.simulation.storage import SimStorage
from experiments.simulation.uploads import uploader_of
from experiments.simulation.world import Process
from hetjax.checkpoint.disk import is_overtaken, outdated
from hetjax.checkpoint.recovery_plan import Save
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stores.store import LAST_UPLOAD_S
from hetjax.checkpoint.uploader import Uploader
from hetjax.runtime.rpc.schema import SaveState

_WRITE_S = 0.01, 0.2
Then = Callable[[], None]


class Writer:
    """Writes one save at a time; `newest` is the last durable one."""

    def __init__(self, process: Process, disk: Disk, site: Site) -> None:
        self._process, self._disk, self._worker = process, disk, process.host
        self._keep, self._removed = site.keep, site.removed
        self._threads = site.threads
        self._uploader: Uploader | None = None
        self._waits_for_upload: int | None = None
        self.newest: Save | None = None
        self.busy = False
        self._waiting: list[Then] = []
        self._keeps_all = False
        for (_, owner), part in disk.parts.items():
            if owner == self._worker:
                part.building = {}

    def open(self, storage: CheckpointStorage) -> None:
        """Open this storage at the first request that needs it."""
        assert isinstance(storage, SimStorage)
        if storage.bucket is not None and self._uploader is None:
            with self._threads.of(self._process):
                self._uploader = uploader_of(storage, self._disk, self._worker)

    def save(self, order: SaveState, leaves: dict[str, int]) -> None:
        assert not self.busy, "the controller asks who is busy first"
        self.open(order.storage)
        self.busy, self._keeps_all = True, False
        save = order.step, str(order.host["attempt"])
        whole = Written(
            save=save,
            workers=tuple(order.workers),
            host=dict(order.host),
            leaves=dict(leaves),
            in_manifest=leaves,
        )
        part = self._disk.parts.setdefault((order.step, self._worker), Part())
        part.building, part.is_flushed = {}, False
        self._let_go_of_earlier(order.safe)
        if self._uploader is not None:
            self._uploader.keep_also(order.best, order.safe and order.safe[0])
        self._write([*leaves], whole, part, order)

    def _let_go_of_earlier(self, safe: Save | None) -> None:
        own = (
            part for (_, who), part in self._disk.parts.items() if who == self._worker
        )
        for part in own:
            if part.earlier is not None and part.earlier.save != safe:
                part.earlier = None

    def keep_all(self) -> None:
        """Keep all parts on this disk until the next save: others may need them."""
        self._keeps_all = True

    def discard_after(self, step: int) -> None:
        """Remove saves of later steps, including those of other workers."""
        if self._uploader is None:
            self._disk.discard_after(step)
        if self.newest is not None and self.newest[0] > step:
            self.newest = None
        if self._uploader is not None:
            if self._waits_for_upload is not None and self._waits_for_upload > step:
                self._waits_for_upload = None
            self._uploader.discard_after(step)
            self._disk.discard_after(step)

    @property
    def is_storing(self) -> bool:
        return self._uploader is not None and bool(self._uploader.in_flight)

    def close(self) -> None:
        """Upload the last save, too, and close the uploader."""
        if self._uploader is not None:
            if self._waits_for_upload is not None:
                self._uploader.enqueue(self._waits_for_upload)
            self._uploader.wait(LAST_UPLOAD_S)
            self._uploader.close()

    def wait(self, then: Then) -> None:
        """Call `then` once no save is being written."""
        self._waiting.append(then) if self.busy else then()

    def _write(
        self, left: list[str], whole: Written, part: Part, order: SaveState
    ) -> None:
        def next_leaf() -> None:
            if self._disk.refuses():
                return self._fail(part, order.step)
            if left:
                leaf = left.pop(0)
                part.building[leaf] = whole.leaves[leaf]
                return self._write(left, whole, part, order)
            self._flush(whole, part, order)

        self._later(next_leaf)

    def _flush(self, whole: Written, part: Part, order: SaveState) -> None:
        def flushed() -> None:
            part.is_flushed = True
            self._later(lambda: self._commit(whole, part, order))

        self._later(flushed)

    def _is_overtaken(self, save: Save) -> bool:
        """Whether a later start has saved on this disk meanwhile."""
        own = (p for (_, who), p in self._disk.parts.items() if who == self._worker)
        attempts = [part.committed.save[1] for part in own if part.committed]
        return is_overtaken(attempts, save[1])

    def _commit(self, whole: Written, part: Part, order: SaveState) -> None:
        if self._disk.refuses() or self._is_overtaken(whole.save):
            return self._fail(part, order.step)
        self._disk.parts[order.step, self._worker] = part
        if part.committed is not None and part.committed.save == order.safe:
            part.earlier = part.committed
        part.before, part.committed = part.committed, whole

        def durable() -> None:
            if part.committed is whole:
                part.committed = replace(whole, is_durable=True)
                part.before = None
            if self._uploader is not None:
                self._waits_for_upload = None if order.uploads_now else order.step
                if order.uploads_now:
                    self._uploader.enqueue(order.step)
            if not self._keeps_all and not self._is_overtaken(whole.save):
                self._retain(order)
            self._done(whole.save)

        self._later(durable)

    def _retain(self, order: SaveState) -> None:
        parts = self._disk.parts
        own = sorted(step for step, worker in parts if worker == self._worker)
        complete = [
            step
            for step in own
            if step <= order.step and parts[step, self._worker].committed is not None
        ]
        on_their_way = () if self._uploader is None else self._uploader.in_flight
        also = {order.safe and order.safe[0], order.best, *on_their_way}
        for step in outdated(own, complete, self._keep, also):
            del parts[step, self._worker]
        self._removed()

    def _fail(self, part: Part, step: int) -> None:
        part.building = {}
        if part.committed is None:
            self._disk.parts.pop((step, self._worker), None)
        self._done(self.newest)

    def _done(self, newest: Save | None) -> None:
        self.newest, self.busy = newest, False
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _later(self, do: Then) -> None:
        delay_s = self._process.world.random.uniform(*_WRITE_S) * self._disk.slowness
        self._process.after(delay_s, do)
