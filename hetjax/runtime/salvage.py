# SPDX-License-Identifier: Apache-2.0
"""What a worker still has after a failure, and how it gives it to others.

Owns copies of its last state by leaf, what its disk holds, and the exchange of leaves
between workers: each is read where it lies, checked, sent by link and checked again.
Does not own who gives what to whom (`hetjax/checkpoint/holdings.py`), nor what becomes
of the leaves (`stages.py`).
"""

import math
import struct
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from hetjax.checkpoint import layout
from hetjax.checkpoint.entry import Entry
from hetjax.checkpoint.restore import Checkpoint, DamagedCheckpoint, parts
from hetjax.mesh.links import Key
from hetjax.mesh.peers import Peers
from hetjax.mesh.wire import LEAVES

_CHECKSUM = struct.Struct("<I")
_NOTHING = np.zeros(0, np.uint8)  # sent for what cannot be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What one worker does in one round, at one step.

    `own` are leaves by tier that it has itself, `give` are (to whom, tier, leaves),
    `take` are (from whom, leaves). `numbers` are the same for all workers.
    """

    step: int
    turn: int
    own: Mapping[str, Sequence[str]]
    give: Sequence[tuple[str, str, Sequence[str]]]
    take: Sequence[tuple[str, Sequence[str]]]
    numbers: Mapping[str, int]


@dataclass(slots=True)
class Salvage:
    """Leaves of this worker by place; `taken` are those that it will go on with."""

    taken: dict[str, np.ndarray] = field(default_factory=dict)
    _memory: dict[str, np.ndarray] = field(default_factory=dict)
    _memory_step: int | None = None
    _disk: dict[int, Checkpoint] = field(default_factory=dict)

    def keep(self, step: int, entries: Iterable[tuple[Entry, np.ndarray]]) -> None:
        """Keep the state after this step, whatever becomes of the devices' copy."""
        self._memory = {
            name: value
            for entry, whole in entries
            for name, value in layout.leaves(entry, whole)
        }
        self._memory_step = step

    def look(self, directory: Path) -> None:
        """Find out what the disk holds."""
        self._disk = {found.step: found for found in parts(directory)}

    def forget(self) -> None:
        """Let go of all but the disk."""
        self.taken, self._memory, self._memory_step = {}, {}, None

    def holdings(self) -> Iterator[tuple[str, int, list[str]]]:
        """Tier, step and leaves of each place."""
        if self._memory_step is not None:
            yield "memory", self._memory_step, sorted(self._memory)
        for step, found in self._disk.items():
            yield "disk", step, sorted(found.leaves)

    def read(self, tier: str, step: int, leaf: str) -> np.ndarray:
        """One leaf; raises DamagedCheckpoint if the disk has it no more as written."""
        if tier == "memory":
            assert step == self._memory_step, (step, self._memory_step)
            return self._memory[leaf]
        return self._disk[step].read_leaves([leaf])[0]


def carry_out(
    order: Order, salvage: Salvage, peers: Peers, needed: Mapping[str, Entry]
) -> dict[str, Any]:
    """Give and take; tell which leaves did not come, and what came by tier.

    `needed` has the entry of each leaf. Raises PeerLost.
    """
    start_s = time.perf_counter()
    giving = threading.Thread(target=_give, args=(order, salvage, peers), daemon=True)
    giving.start()
    missing: list[str] = []
    num_bytes: dict[str, int] = {}
    for tier, leaf, value in _taken(order, salvage, peers, needed):
        if value is None:
            missing.append(leaf)
        else:
            salvage.taken[leaf] = value
            num_bytes[tier] = num_bytes.get(tier, 0) + value.nbytes
    giving.join()
    peers.mailbox.check()
    seconds = time.perf_counter() - start_s
    return {"missing": missing, "bytes": num_bytes, "seconds": seconds}


def from_leaves(values: Mapping[str, np.ndarray], entry: Entry) -> np.ndarray:
    """The whole value of an entry from its leaves."""
    return layout.assemble(entry, [values[name] for name in layout.leaf_names(entry)])


def _give(order: Order, salvage: Salvage, peers: Peers) -> None:
    """Send all that is asked for; what goes wrong is told to who waits here."""
    try:
        _send(order, salvage, peers)
    except Exception as error:
        peers.mailbox.lose(peers.own, f"failed: {error}")


def _send(order: Order, salvage: Salvage, peers: Peers) -> None:
    for worker, tier, leaves in order.give:
        for leaf in leaves:
            parts_ = _readable(order, salvage, tier, leaf)
            with suppress(KeyError):  # one that has gone since
                peers.send(worker, _key(order, leaf), parts_)


def _readable(
    order: Order, salvage: Salvage, tier: str, leaf: str
) -> Sequence[np.ndarray]:
    value = _read(order, salvage, tier, leaf)
    if value is None:
        return [_NOTHING]
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    checksum = _CHECKSUM.pack(google_crc32c.value(data))
    return [np.frombuffer(checksum, np.uint8), data]


def _taken(
    order: Order, salvage: Salvage, peers: Peers, needed: Mapping[str, Entry]
) -> Iterator[tuple[str, str, np.ndarray | None]]:
    for tier, leaves in order.own.items():
        for leaf in leaves:
            yield tier, leaf, _read(order, salvage, tier, leaf)
    for worker, leaves in order.take:
        for leaf in leaves:
            message = peers.mailbox.take(worker, _key(order, leaf))
            yield "peer", leaf, _value(message, needed[leaf])


def _read(order: Order, salvage: Salvage, tier: str, leaf: str) -> np.ndarray | None:
    try:
        return salvage.read(tier, order.step, leaf)
    except (DamagedCheckpoint, OSError, ValueError) as error:
        warnings.warn(f"{leaf} is not used from here: {error}", stacklevel=2)
        return None


def _value(message: np.ndarray, entry: Entry) -> np.ndarray | None:
    if not message.size:
        return None
    (checksum,) = _CHECKSUM.unpack(message[: _CHECKSUM.size].tobytes())
    data = message[_CHECKSUM.size :].copy()  # aligned
    if google_crc32c.value(data) != checksum:
        return None
    return data.view(entry.dtype).reshape(_leaf_shape(entry))


def leaf_bytes(entry: Entry) -> int:
    """Size of each of the entry's slices."""
    return math.prod(_leaf_shape(entry)) * entry.dtype.itemsize


def _leaf_shape(entry: Entry) -> tuple[int, ...]:
    dim, number = entry.slices
    return tuple(n // number if d == dim else n for d, n in enumerate(entry.shape))


def _key(order: Order, leaf: str) -> Key:
    return order.turn, order.step, LEAVES, order.numbers[leaf], 0, 0
