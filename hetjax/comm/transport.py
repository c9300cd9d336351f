# SPDX-License-Identifier: Apache-2.0
"""Transfers tagged arrays point to point between stages.

Owns the tag, the in-process transport (device to device between meshes), and the count
of bytes sent. Does not own transports between processes (`wire.py`, `pull.py`).
"""

import threading
from collections import Counter
from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
from jax.sharding import Sharding

from hetjax.mesh.reshard import Parcel, delivered, moved_bytes, parcel

KINDS = {"F": 0, "B": 1}  # the number of each kind of a Tag


@dataclass(frozen=True, slots=True)
class Tag:
    """Names one transfer of a run; `stage` is the one that receives."""

    generation: int
    step: int
    kind: Literal["F", "B"]
    replica: int
    stage: int
    microbatch: int

    @property
    def receiver(self) -> tuple[int, int]:
        """The (replica, stage) that receives."""
        return self.replica, self.stage

    @property
    def sender(self) -> tuple[int, int]:
        """The stage before the receiver; for gradients, the stage after it."""
        return self.replica, self.stage + (-1 if self.kind == "F" else 1)


class Transport(Protocol):
    """Moves arrays between stages; all calls return before the data has moved.

    A message occupies memory at the sender until it is received, and at the receiver
    only from then on. So a fast sender cannot fill the devices of a slow receiver,
    whose memory use follows from its own program alone
    (`schedule/simulation/memory.py`).
    """

    def send(self, tag: Tag, x: jax.Array) -> None:
        """Offer `x` to the stage that receives `tag`."""
        ...

    def arrived(self, tag: Tag) -> bool:
        """Return whether `receive` would not wait for the sender's program."""
        ...

    def receive(self, tag: Tag, expected: jax.ShapeDtypeStruct) -> jax.Array:
        """Start moving the array sent under `tag` here; return it before it arrives.

        Its shape and dtype must be the expected ones.
        """
        ...


class InProcess:
    """Meshes in one process: the receiver starts the copy out of the sender's memory.

    The sender makes the cuts that the copy needs, in its own order. `layouts` maps a
    stage, (replica, stage), to the layout of what it receives. `sent` counts the bytes
    that devices send each other, by (from stage, to stage).
    """

    def __init__(self, layouts: Mapping[tuple[int, int], Sharding]) -> None:
        self._layouts = layouts
        self._offered: dict[Tag, Parcel] = {}
        self.sent = Tally()

    def send(self, tag: Tag, x: jax.Array) -> None:
        assert tag not in self._offered, f"{tag} was sent twice"
        self._offered[tag] = parcel(x, self._layouts[tag.receiver])

    def arrived(self, tag: Tag) -> bool:
        return tag in self._offered

    def receive(self, tag: Tag, expected: jax.ShapeDtypeStruct) -> jax.Array:
        sent = self._offered.pop(tag)
        found, wanted = ((a.shape, a.dtype) for a in (sent.abstract, expected))
        assert found == wanted, f"{tag} carried {found}, expected {wanted}"
        link = tag.sender, tag.receiver
        self.sent.add(link, KINDS[tag.kind], moved_bytes(sent))
        return delivered(sent)


class Routed:
    """Routes a transfer `within` if both its stages are `here`, otherwise `across`."""

    def __init__(
        self, here: Container[tuple[int, int]], within: Transport, across: Transport
    ) -> None:
        self._here, self._within, self._across = here, within, across

    def send(self, tag: Tag, x: jax.Array) -> None:
        self._by(tag).send(tag, x)

    def arrived(self, tag: Tag) -> bool:
        return self._by(tag).arrived(tag)

    def receive(self, tag: Tag, expected: jax.ShapeDtypeStruct) -> jax.Array:
        return self._by(tag).receive(tag, expected)

    def _by(self, tag: Tag) -> Transport:
        here = tag.sender in self._here and tag.receiver in self._here
        return self._within if here else self._across


class Tally:
    """Bytes sent, by link and kind (the third number of a message's key).

    Any thread may count. Headers and heartbeats do not count, so that the counts can be
    compared with the bytes that the cost model predicts. The caller chooses a link's
    name: workers use the receiver, a process that has all stages uses both ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[Hashable, int]] = Counter()

    def add(self, link: Hashable, kind: int, num_bytes: int) -> None:
        with self._lock:
            self._bytes[link, kind] += num_bytes

    def by_link_and_kind(self) -> dict[tuple[Hashable, int], int]:
        """Return all counts so far."""
        with self._lock:
            return dict(self._bytes)
