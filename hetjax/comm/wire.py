# SPDX-License-Identifier: Apache-2.0
"""Transfers arrays between stages of different processes, over links.

Owns the conversion of arrays to bytes and back. The whole array crosses once, cut where
the sender's data ranks cut it; the receiver makes the copies for its tensor ranks. If
stages span workers, each receiver gets only the rows that its own devices hold. Does
not own connections (`connections.py`, `peers.py`).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import jax
import numpy as np

from hetjax.comm.connections import Key
from hetjax.comm.peers import Peers
from hetjax.comm.transport import KINDS, Tag
from hetjax.mesh.host_copies import start_copy
from hetjax.mesh.multihost import to_mesh

Ranks = tuple[tuple[str, ...], ...]  # by data rank, the workers that have its rows
RowRange = tuple[int, int]  # of dim 0: start, stop

_GRACE_S = 0.2
SUMS, SQUARES, LEAVES = 2, 3, 4  # kinds of messages other than transfers between stages


@cache
def who_sends(
    senders: Ranks, receivers: Ranks
) -> dict[tuple[str, str], list[RowRange]]:
    """Return the rows that go from worker to worker, ascending, in `unit_rows` units.

    A worker that has rows it needs takes them from itself. Other rows come from the
    workers that have them, in turn.
    """
    found: dict[tuple[str, str], list[RowRange]] = {}
    size = math.lcm(len(senders), len(receivers))
    for unit in range(size):
        having = senders[unit * len(senders) // size]
        for turn, needing in enumerate(receivers[unit * len(receivers) // size]):
            giving = needing if needing in having else having[turn % len(having)]
            rows = found.setdefault((giving, needing), [])
            joins = bool(rows) and rows[-1][1] == unit
            rows.append((rows.pop()[0] if joins else unit, unit + 1))
    return found


def unit_rows(num_rows: int, senders: Ranks, receivers: Ranks) -> int:
    """Return the largest number of rows that no data rank of either side cuts."""
    size = math.lcm(len(senders), len(receivers))
    assert num_rows % size == 0, (num_rows, size)
    return num_rows // size


def host_parts(x: jax.Array, rows: RowRange) -> list[np.ndarray]:
    """Copy rows of an array to the host, cut along dim 0 as its devices are.

    Waits for the devices. Only dim 0 may be cut.
    """
    shards = {
        shard.index[0].indices(x.shape[0])[:2]: shard.data
        for shard in x.addressable_shards
    }
    return parts_of(shards, rows)


def parts_of(
    held: Mapping[RowRange, jax.Array | np.ndarray], rows: RowRange
) -> list[np.ndarray]:
    """Return rows out of the held ones, as consecutive parts; copy nothing."""
    parts = []
    for start, stop in sorted(held):
        first, last = max(start, rows[0]), min(stop, rows[1])
        if first < last:
            parts.append(np.asarray(held[start, stop])[first - start : last - start])
    assert sum(map(len, parts)) == rows[1] - rows[0], (sorted(held), rows)
    return parts


class HostWorkPool:
    """Threads that wait for devices, so that links only send data that is ready."""

    def __init__(self, peers: Peers, num_threads: int) -> None:
        self._peers = peers
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pool")

    def run(self, work: Callable[[], None]) -> None:
        """Do the work soon; an error in it reaches all who wait."""

        def reporting_failure() -> None:
            try:
                work()
            except Exception as error:
                time.sleep(_GRACE_S)  # a lost peer that caused it is reported first
                self._peers.mailbox.lose(self._peers.own, f"failed: {error}")

        self._pool.submit(reporting_failure)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class SocketTransport:
    """The transport of one worker to stages of others, by link.

    `ranks` says which workers have a stage, by (replica, stage).
    """

    def __init__(
        self, peers: Peers, pool: HostWorkPool, ranks: Mapping[tuple[int, int], Ranks]
    ) -> None:
        self._peers, self._pool, self._ranks = peers, pool, ranks
        self._given_up = False

    def give_up(self) -> None:
        """From now on send nothing, and receive NaN at once."""
        self._given_up = True

    def send(self, tag: Tag, x: jax.Array) -> None:
        if self._given_up:
            return
        ends = self._ends(tag)
        unit = unit_rows(x.shape[0], *ends)
        own = self._peers.own
        ours = [(n, units) for (g, n), units in who_sends(*ends).items() if g == own]
        there = start_copy(x) if ours else x
        for needing, units in ours:
            rows = [(start * unit, stop * unit) for start, stop in units]
            self._pool.run(partial(self._send, needing, tag, there, rows))

    def arrived(self, tag: Tag) -> bool:
        mailbox, key = self._peers.mailbox, key_of(tag)
        there = (mailbox.has(giving, key) for giving in self._coming(tag))
        return self._given_up or all(there)

    def receive(self, tag: Tag, expected: jax.ShapeDtypeStruct) -> jax.Array:
        if self._given_up:
            return no_value(expected)
        num_rows, *others = expected.shape
        unit = unit_rows(num_rows, *self._ends(tag))
        held: dict[RowRange, np.ndarray] = {}
        for giving, units in self._coming(tag).items():
            data = self._peers.mailbox.pop(giving, key_of(tag))
            rest = data.view(expected.dtype).reshape(-1, *others)
            for start, stop in units:
                size = (stop - start) * unit
                held[start * unit, stop * unit], rest = rest[:size], rest[size:]
        return laid_out(held, expected)

    def _send(
        self, needing: str, tag: Tag, x: jax.Array, rows: Sequence[RowRange]
    ) -> None:
        parts = [part for some in rows for part in host_parts(x, some)]
        if needing != self._peers.own:
            return self._peers.send(needing, key_of(tag), parts)
        data = np.concatenate(parts).reshape(-1).view(np.uint8)
        self._peers.mailbox.put(needing, key_of(tag), data)

    def _ends(self, tag: Tag) -> tuple[Ranks, Ranks]:
        return self._ranks[tag.sender], self._ranks[tag.receiver]

    def _coming(self, tag: Tag) -> dict[str, list[RowRange]]:
        """Return who sends which rows of this worker, in units."""
        pairs = who_sends(*self._ends(tag)).items()
        return {by: rows for (by, to), rows in pairs if to == self._peers.own}


def no_value(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array of NaN, for a receiver that cannot wait for the value."""
    return to_mesh(np.full(like.shape, np.nan, like.dtype), like.sharding)


def laid_out(
    held: Mapping[RowRange, np.ndarray], expected: jax.ShapeDtypeStruct
) -> jax.Array:
    """Lay out rows of this process on its devices, of which each needs only some.

    One call serves all layouts. It takes half the time of `jax.device_put`, a
    difference that matters for messages of 1 MiB.
    """

    def joined(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[0].indices(expected.shape[0])
        parts = parts_of(held, (start, stop))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    assert expected.sharding is not None
    return jax.make_array_from_callback(
        expected.shape, expected.sharding, joined, dtype=expected.dtype
    )


def key_of(tag: Tag, kinds: Mapping[str, int] = KINDS) -> Key:
    """Return the tag as six numbers; `kinds` gives the third."""
    kind = kinds[tag.kind]
    return tag.generation, tag.step, kind, tag.replica, tag.stage, tag.microbatch
