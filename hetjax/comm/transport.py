# SPDX-License-Identifier: Apache-2.0
"""Tagged point-to-point transfers between stages.

Owns the tag, the in-process transport (device to device between meshes), and the count
of what is sent. Does not own transports between processes (`wire.py`, `pull.py`).
"""

import threading
from collections import Counter
from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
from jax.sharding import Sharding

from hetjax.mesh.reshard import Parcel, delivered, moved_bytes, parcel

KINDS = {"F": 0, "B": 1}  # of messages, in the words of tags


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
        """The stage before it, or of gradients the stage after."""
        return self.replica, self.stage + (-1 if self.kind == "F" else 1)


class Transport(Protocol):
    """Moves arrays between stages; all calls return before the data has moved.

    A message takes memory where it is sent until it is received, and where it is
    received only from then on: a fast sender cannot fill the devices of a slow
    receiver, whose memory is as its own program has it
    (`schedule/simulation/memory.py`).
    """

    def send(self, tag: Tag, x: jax.Array) -> None:
        """Offer `x` to the stage that receives `tag`."""
        ...

    def arrived(self, tag: Tag) -> bool:
        """Whether `receive` can be called without waiting for the sender's program."""
        ...

    def receive(self, tag: Tag, expected: jax.ShapeDtypeStruct) -> jax.Array:
        """Start moving the array sent under `tag` here, and give it as it will be.

        Its shape and dtype must be the expected.
        """
        ...


class InProcess:
    """Meshes in one process: the receiver starts the copy out of the sender's memory.

    What has to be cut for that is cut by the sender, in its own order. `layouts` says
    how a stage, by (replica, stage), wants what it receives to be laid out. `sent`
    counts what devices send each other, by (from stage, to stage).
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
    """Transfers between stages that are `here`, both of them, go one way, all others
    another."""

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
    """Bytes that were sent, by link and kind, the third number of a message's key.

    Counted from any thread, without headers and signs of life: what costs charge is
    held against this. A link is what tells the ends: among workers the receiver, in one
    process both.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[Hashable, int]] = Counter()

    def add(self, link: Hashable, kind: int, num_bytes: int) -> None:
        with self._lock:
            self._bytes[link, kind] += num_bytes

    def by_link_and_kind(self) -> dict[tuple[Hashable, int], int]:
        """All that was counted so far."""
        with self._lock:
            return dict(self._bytes)
