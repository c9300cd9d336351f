# SPDX-License-Identifier: Apache-2.0
"""Decides which documents share a sequence, so that little of it is padding.

Owns best-fit-decreasing packing, in time that grows with the number of different
lengths and hardly with that of documents. Does not own documents nor their windows
(`windows.py`).

Legend: N documents, P packs.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Packs:
    """Pack p has the documents order[starts[p]] up to order[starts[p + 1]]."""

    order_N: np.ndarray
    starts_P: np.ndarray  # P + 1

    def __len__(self) -> int:
        return len(self.starts_P) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.order_N[self.starts_P[index] : self.starts_P[index + 1]]


@dataclass(frozen=True, slots=True)
class _Alike:
    """Packs that hold equally many documents of each length."""

    number: int
    holds: tuple[tuple[int, int], ...] = ()  # (length, number of documents)

    def with_more(self, number: int, length: int, times: int) -> "_Alike":
        """Return `number` such packs, each with `times` documents of `length` more."""
        return _Alike(number, (*self.holds, (length, times)))


def packed(lengths_N: np.ndarray, size: int) -> Packs:
    """Pack documents of 1 to `size` positions, the longest first.

    Each goes where it leaves the least room, or into a new pack (best-fit decreasing).
    """
    assert np.all((lengths_N >= 1) & (lengths_N <= size)), "cut them first"
    by_length_N = np.argsort(-lengths_N, kind="stable")
    lengths, starts = np.unique(-lengths_N[by_length_N], return_index=True)
    waiting = {
        -length: group
        for length, group in zip(
            lengths.tolist(), np.split(by_length_N, starts[1:]), strict=True
        )
    }
    orders, sizes = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for alike in _filled({n: len(group) for n, group in waiting.items()}, size):
        parts = []
        for length, times in alike.holds:
            taken, waiting[length] = np.split(waiting[length], [alike.number * times])
            parts.append(taken.reshape(alike.number, times))
        orders.append(np.concatenate(parts, axis=1).ravel())
        sizes.append(np.full(alike.number, sum(times for _, times in alike.holds)))
    return Packs(np.concatenate(orders), np.cumsum(np.concatenate(sizes)))


def _filled(counts: dict[int, int], size: int) -> list[_Alike]:
    """Return the packs, grouped by content; `counts` are by length, longest first."""
    rooms: list[int] = []  # that some packs have left, ascending
    with_room: dict[int, list[_Alike]] = {}

    def put(room: int, alike: _Alike) -> None:
        if alike.number and room not in with_room:
            insort(rooms, room)
        if alike.number:
            with_room.setdefault(room, []).append(alike)

    def taken(at: int) -> tuple[int, _Alike]:
        room = rooms[at]
        alike = with_room[room].pop()
        if not with_room[room]:
            del with_room[room], rooms[at]
        return room, alike

    for length, left in counts.items():
        while left:
            at = bisect_left(rooms, length)
            room, alike = taken(at) if at < len(rooms) else (size, _Alike(left))
            times = room // length  # a pack takes all these before another is tried
            full = min(alike.number, left // times)
            put(room - times * length, alike.with_more(full, length, times))
            left -= full * times
            untouched = alike.number - full
            if left and untouched:
                put(room - left * length, alike.with_more(1, length, left))
                left, untouched = 0, untouched - 1
            if alike.holds:
                put(room, _Alike(untouched, alike.holds))
    return [alike for packs in with_room.values() for alike in packs]
