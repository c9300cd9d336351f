# SPDX-License-Identifier: Apache-2.0
"""Tagged point-to-point transfers between stages.

Owns the tag and the in-process transport (device to device between meshes). Does not
own the transports between processes, which a later room adds behind `Transport`.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import jax
from jax.sharding import Sharding

from hetjax.mesh.reshard import reshard


@dataclass(frozen=True, slots=True)
class Tag:
    """Names one transfer of a run; `stage` is the one that receives."""

    generation: int
    step: int
    kind: Literal["F", "B"]
    replica: int
    stage: int
    microbatch: int


class Transport(Protocol):
    """Moves arrays between stages; both calls return before the data has moved."""

    def send(self, tag: Tag, x: jax.Array, sharding: Sharding) -> None:
        """Start moving `x` to where `tag` is received, laid out as `sharding`."""
        ...

    def arrived(self, tag: Tag) -> bool:
        """Whether `receive` can be called without waiting for the sender's program."""
        ...

    def receive(self, tag: Tag, expected: jax.ShapeDtypeStruct) -> jax.Array:
        """The array sent under `tag`; its shape and dtype must be the expected."""
        ...


class InProcess:
    """All meshes in one process: the receiver's copy is started by the sender."""

    def __init__(self) -> None:
        self._mailbox: dict[Tag, jax.Array] = {}

    def send(self, tag: Tag, x: jax.Array, sharding: Sharding) -> None:
        assert tag not in self._mailbox, f"{tag} was sent twice"
        self._mailbox[tag] = reshard(x, sharding)

    def arrived(self, tag: Tag) -> bool:
        return tag in self._mailbox

    def receive(self, tag: Tag, expected: jax.ShapeDtypeStruct) -> jax.Array:
        x = self._mailbox.pop(tag)
        found, wanted = (x.shape, x.dtype), (expected.shape, expected.dtype)
        assert found == wanted, f"{tag} carried {found}, expected {wanted}"
        return x
