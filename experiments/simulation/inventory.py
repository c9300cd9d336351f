# SPDX-License-Identifier: Apache-2.0
"""Holds the parts of the state that a simulated worker still has or received.

Owns the copy in memory, the disk's part of each save, and reading from either. Does not
own which worker gives what to which (`hetjax/checkpoint/recovery_plan.py`).
"""

from experiments.simulation.disk import Disk, Written
from experiments.simulation.object_store import Bucket
from experiments.simulation.uploads import Fetched
from hetjax.checkpoint.recovery_plan import Save
from hetjax.runtime.rpc import schema


class Inventory:
    """Leaves by place; `taken` are those that the worker will continue with."""

    def __init__(self, disk: Disk, bucket: Bucket | None) -> None:
        self._disk, self._bucket = disk, bucket
        self._fetched: dict[str, int | None] = {}
        self._held: tuple[int, dict[str, int]] | None = None
        self.taken: dict[str, int] = {}

    def forget(self) -> None:
        """Discard everything except the disk's contents."""
        self._held, self.taken, self._fetched = None, {}, {}

    def keep(self, at: int, state: dict[str, int]) -> None:
        self._held = at, dict(state)

    def in_memory(self) -> schema.HeldState:
        if self._held is None:
            return schema.HeldState(at=None, leaves=[])
        return schema.HeldState(at=self._held[0], leaves=sorted(self._held[1]))

    def on_disk(self) -> schema.FoundSaves:
        found: dict[Save, list[tuple[str, Written]]] = {}
        for _, worker, written in self._disk.committed():
            found.setdefault(written.save, []).append((worker, written))
        return schema.FoundSaves(
            saves=[_found(save, parts) for save, parts in found.items()]
        )

    def fetch(self, request: schema.CollectLeaves) -> None:
        """Fetch the requested leaves from the store. Raises OSError."""
        assert self._bucket is not None
        found = Fetched(self._bucket, request.save[0])
        self._fetched = {leaf: found.read(leaf) for leaf in request.own["cloud"]}

    def own(self, request: schema.CollectLeaves) -> dict[str, int | None]:
        """Return the leaves that this worker needs and has itself."""
        return {
            leaf: self.read(tier, request.save, leaf)
            for tier, leaves in request.own.items()
            for leaf in leaves
        }

    def read(self, tier: str, save: Save, leaf: str) -> int | None:
        """Return a leaf's value; None if it cannot be read as it was written."""
        if tier == "disk":
            return self._disk.read(save, leaf)
        if tier == "cloud":
            return self._fetched[leaf]
        assert tier == "memory" and self._held is not None, (tier, save)
        assert self._held[0] == save[0], "what is kept is of another step"
        return self._held[1][leaf]


def _found(save: Save, parts: list[tuple[str, Written]]) -> schema.FoundSave:
    first = parts[0][1]
    return schema.FoundSave(
        save=save,
        leaves=sorted({leaf for _, part in parts for leaf in part.leaves}),
        host=first.host,
        absent=sorted({*first.workers} - {worker for worker, _ in parts}),
    )
