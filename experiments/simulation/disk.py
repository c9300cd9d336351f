# SPDX-License-Identifier: Apache-2.0
"""Simulates disks on which parts of checkpoints are written piece by piece.

Data that a process has written are visible to others at once, and outlive it. After a
loss of power, data that were not flushed may be gone or torn. A part counts by its
manifest, which is written last. Owns the contents. Does not own the order in which a
worker writes (`writer.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from experiments.simulation.world import World
from hetjax.checkpoint.recovery_plan import Save

TORN = -1  # replaces a leaf's value; its checksum shows the damage


@dataclass(frozen=True, kw_only=True)
class Written:
    """One worker's part of a save; it `is_durable` once its manifest was flushed.

    The manifest records the `leaves` as they were written.
    """

    save: Save
    workers: tuple[str, ...]
    host: dict[str, object]
    leaves: dict[str, int]
    in_manifest: Mapping[str, int]
    is_durable: bool = False


@dataclass
class Part:
    """The contents of a part's folder.

    `before` is what its previous manifest described, `earlier` what remains of an
    earlier save of the step.
    """

    committed: Written | None = None
    earlier: Written | None = None
    before: Written | None = None
    building: dict[str, int] = field(default_factory=dict)
    is_flushed: bool = False


@dataclass
class Disk:
    """Parts by step and worker, of one machine or of all."""

    world: World
    parts: dict[tuple[int, str], Part] = field(default_factory=dict)
    is_full: bool = False
    fails_one_in: float = 0.0  # one in so many writes fails; 0: none
    slowness: float = 1.0

    def committed(self) -> Iterator[tuple[int, str, Written]]:
        for (step, worker), part in self.parts.items():
            for found in (part.earlier, part.committed):
                if found is not None:
                    yield step, worker, found

    def refuses(self) -> bool:
        """Whether the disk refuses the next write."""
        is_bad = self.fails_one_in > 0 and self.world.one_in(self.fails_one_in)
        return self.is_full or is_bad

    def read(self, save: Save, leaf: str) -> int | None:
        """Return the leaf's value in this save; None if it is not as it was written."""
        for _, _, found in self.committed():
            if found.save == save and found.leaves.get(leaf, TORN) != TORN:
                return found.leaves[leaf]
        return None

    def damage(self) -> bool:
        """Make one leaf unreadable; return False if there is none."""
        found = [(key, part) for key, part in self.parts.items() if part.committed]
        if not found:
            return False
        _, part = self.world.random.choice(found)
        assert part.committed is not None
        leaf = self.world.random.choice(sorted(part.committed.leaves) or [""])
        leaves = {**part.committed.leaves, leaf: TORN}
        part.committed = replace(part.committed, leaves=leaves)
        return True

    def discard_after(self, step: int) -> None:
        for found, worker in [*self.parts]:
            if found > step:
                del self.parts[found, worker]

    def lose_power(self) -> None:
        """Keep, tear or remove each piece that was not flushed."""
        chance = self.world.random
        for key, part in [*self.parts.items()]:
            part.building = {}
            found = part.committed
            if found is not None and not found.is_durable:
                part.committed = chance.choice([found, part.before])
                if part.committed is found and not part.is_flushed:
                    leaves = {
                        leaf: chance.choice([value, TORN])
                        for leaf, value in found.leaves.items()
                    }
                    part.committed = replace(found, leaves=leaves)
            if part.committed is None:
                del self.parts[key]
