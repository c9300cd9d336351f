# SPDX-License-Identifier: Apache-2.0
"""Holds what a worker still has of the state, and exchanges leaves with others.

Owns copies of its last state by leaf, what its disk holds and what it fetches from the
store, and the exchange of leaves between workers: each leaf is read where it lies,
checked, sent by link and checked again. Does not own the choice of senders
(`hetjax/checkpoint/recovery_plan.py`), nor the use of the leaves
(`runtime/execution/`).
"""

import math
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c
import numpy as np

from hetjax.checkpoint.fetching import StoredStep
from hetjax.checkpoint.format import Entry, join_leaves, leaf_names, split_leaves
from hetjax.checkpoint.other_runs import untrusted_on_disk
from hetjax.checkpoint.reader import Checkpoint, DamagedCheckpoint, partial_checkpoints
from hetjax.checkpoint.recovery_plan import Save, Tier
from hetjax.checkpoint.run_identity import RunIdentity, is_ours
from hetjax.checkpoint.stores.store import Store
from hetjax.comm.connections import Key
from hetjax.comm.peers import Peers
from hetjax.comm.wire import LEAVES
from hetjax.runtime.rpc.schema import Collected, CollectLeaves, FoundSave

_CHECKSUM = struct.Struct("<I")
_NOTHING = np.zeros(0, np.uint8)  # sent in place of a leaf that cannot be read
_NUM_READERS = 8  # threads: reading from a store is mostly waiting


@dataclass(slots=True)
class StateInventory:
    """Leaves of this worker by place; it will continue with those in `taken`."""

    taken: dict[str, np.ndarray] = field(default_factory=dict)
    flaws: list[str] = field(default_factory=list)  # why leaves were not read
    memory_step: int | None = None
    _memory: dict[str, tuple[Entry, Callable[[], np.ndarray]]] = field(
        default_factory=dict
    )
    _disk: dict[Save, Checkpoint] = field(default_factory=dict)
    _stored: StoredStep | None = None
    _fetched: tempfile.TemporaryDirectory[str] | None = None

    def keep(
        self, step: int, entries: Iterable[tuple[Entry, Callable[[], np.ndarray]]]
    ) -> None:
        """Keep the state after this step, where it is, until `let_go`."""
        self._memory = {
            name: (entry, read) for entry, read in entries for name in leaf_names(entry)
        }
        self.memory_step = step

    def let_go(self) -> None:
        """Release the kept state to free the devices; needed leaves were taken."""
        self._memory, self.memory_step = {}, None

    @property
    def memory(self) -> list[str]:
        """The leaves of the kept state."""
        return sorted(self._memory)

    def look(
        self,
        directory: Path,
        needed: Mapping[str, Entry],
        key: bytes | None = None,
        run: RunIdentity | None = None,
    ) -> Iterator[FoundSave]:
        """Yield the saves on the disk, signed with the key if there is one.

        Saves of runs other than `run` are named, but not read. Raises BadInput if saves
        of this run are of a model with other `needed` entries.
        """
        self._disk = {}
        for found in partial_checkpoints(directory, key):
            save = found.step, found.attempt
            if is_ours(run, found.run):
                found.check_same_kind({e.name: e for e in needed.values()}.values())
                self._disk[save] = found
            yield FoundSave(
                run=found.run,
                save=save,
                leaves=sorted(found.leaves),
                host=found.host,
                absent=sorted(found.absent),
            )
        for other in untrusted_on_disk(directory, key):
            if not is_ours(run, other.run):
                yield FoundSave(
                    run=other.run,
                    save=(other.step, other.attempt),
                    leaves=[],
                    host={},
                    is_trusted=False,
                )

    def fetch_from(
        self,
        store: Store,
        step: int,
        directory: Path,
        key: bytes | None = None,
        run: RunIdentity | None = None,
    ) -> None:
        """Let the tier "cloud" read what the store has of this step."""
        directory.mkdir(parents=True, exist_ok=True)
        self._fetched = tempfile.TemporaryDirectory(prefix=".fetched-", dir=directory)
        self._stored = StoredStep(store, step, Path(self._fetched.name), key, run)

    def forget(self) -> None:
        """Release everything except the disk."""
        self.let_go()
        self.taken, self._stored = {}, None
        if self._fetched is not None:
            self._fetched.cleanup()
            self._fetched = None

    def tell_flaws(self) -> None:
        """Warn of what could not be read, once."""
        flaws, self.flaws = self.flaws, []
        if flaws:
            others = f", and {len(flaws) - 1} more" if len(flaws) > 1 else ""
            warnings.warn(
                f"some saved state here cannot be used: {flaws[0]}{others}",
                stacklevel=2,
            )

    def read(self, tier: Tier, save: Save, leaf: str) -> np.ndarray | None:
        """Return one leaf; None, and a flaw, if it cannot be read as it was written."""
        try:
            if tier == "memory":
                entry, read = self._memory[leaf]
                return dict(split_leaves(entry, read()))[leaf]
            if tier == "disk":
                return self._disk[save].read_leaves([leaf])[0]
            assert self._stored is not None
            return self._stored.read(leaf)
        except (DamagedCheckpoint, OSError, ValueError) as error:
            self.flaws.append(str(error).splitlines()[0].removeprefix("got: "))
            return None


def collect_leaves(
    order: CollectLeaves,
    inventory: StateInventory,
    peers: Peers | None,
    needed: Mapping[str, Entry],
) -> Collected:
    """Give and take leaves; report missing ones, and bytes and seconds by tier.

    `needed` has the entry of each leaf. A worker without peers gives and takes nothing.
    Raises PeerLost.
    """
    start_s = time.perf_counter()
    giving = threading.Thread(target=_give, args=(order, inventory, peers), daemon=True)
    if peers is not None:
        giving.start()
    missing: list[str] = []
    num_bytes: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for tier, leaf, value, at_s in _taken(order, inventory, peers, needed):
        if value is None:
            missing.append(leaf)
            continue
        inventory.taken[leaf] = value
        num_bytes[tier] = num_bytes.get(tier, 0) + value.nbytes
        seconds[tier] = max(seconds.get(tier, 0.0), at_s - start_s)
    inventory.tell_flaws()
    if peers is not None:
        giving.join()
        peers.mailbox.check()
    return Collected(missing=missing, num_bytes=num_bytes, seconds=seconds)


def from_leaves(values: Mapping[str, np.ndarray], entry: Entry) -> np.ndarray:
    """Return the whole value of an entry from its leaves."""
    return join_leaves(entry, [values[name] for name in leaf_names(entry)])


def _give(order: CollectLeaves, inventory: StateInventory, peers: Peers) -> None:
    """Send all requested leaves; errors reach whoever waits here."""
    try:
        for worker, tier, leaves in order.give:
            for leaf in leaves:
                parts = _with_checksum(inventory.read(tier, order.save, leaf))
                with suppress(KeyError):  # a worker that has gone since
                    peers.send(worker, _key(order, leaf), parts)
    except Exception as error:
        peers.mailbox.lose(peers.own, f"failed: {error}")


def _with_checksum(value: np.ndarray | None) -> Sequence[np.ndarray]:
    if value is None:
        return [_NOTHING]
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    checksum = _CHECKSUM.pack(google_crc32c.value(data))
    return [np.frombuffer(checksum, np.uint8), data]


def _taken(
    order: CollectLeaves,
    inventory: StateInventory,
    peers: Peers | None,
    needed: Mapping[str, Entry],
) -> Iterator[tuple[str, str, np.ndarray | None, float]]:
    """Yield tier, leaf, value and time of all leaves, from all places at once."""

    def timed(tier: Tier, leaf: str) -> tuple[np.ndarray | None, float]:
        return inventory.read(tier, order.save, leaf), time.perf_counter()

    pool = ThreadPoolExecutor(_NUM_READERS)
    own = [
        (tier, leaf, pool.submit(timed, tier, leaf))
        for tier, leaves in order.own.items()
        for leaf in leaves
    ]
    try:
        for worker, leaves in order.take:
            for leaf in leaves:
                assert peers is not None, "no peers to take from"
                message = peers.mailbox.receive(worker, _key(order, leaf))
                yield "peer", leaf, _value(message, needed[leaf]), time.perf_counter()
        for tier, leaf, reading in own:
            yield tier, leaf, *reading.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _value(message: np.ndarray, entry: Entry) -> np.ndarray | None:
    if not message.size:
        return None
    (checksum,) = _CHECKSUM.unpack(message[: _CHECKSUM.size].tobytes())
    data = message[_CHECKSUM.size :].copy()  # aligned
    if google_crc32c.value(data) != checksum:
        return None
    return data.view(entry.dtype).reshape(_leaf_shape(entry))


def leaf_bytes(entry: Entry) -> int:
    """Return the size of each of the entry's slices, in bytes."""
    return math.prod(_leaf_shape(entry)) * entry.dtype.itemsize


def _leaf_shape(entry: Entry) -> tuple[int, ...]:
    dim, number = entry.slices
    return tuple(n // number if d == dim else n for d, n in enumerate(entry.shape))


def _key(order: CollectLeaves, leaf: str) -> Key:
    return order.turn, order.save[0], LEAVES, order.numbers[leaf], 0, 0
