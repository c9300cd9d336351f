# SPDX-License-Identifier: Apache-2.0
"""Transfers between stages of different processes, over links.

Owns how an array becomes bytes and an array again. What crosses is the whole array
once, cut where the sender's data ranks cut it: copies for tensor ranks are made on
arrival. Does not own connections (`links.py`, `peers.py`).
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from hetjax.mesh.links import Key
from hetjax.mesh.peers import Peers
from hetjax.mesh.transport import Tag

_KINDS = {"F": 0, "B": 1}
_GRACE_S = 0.2
SUMS, SQUARES = 2, 3  # kinds of messages that are no transfers between stages


def host_parts(x: jax.Array) -> list[np.ndarray]:
    """Copy an array to the host, whole, cut along dim 0 as its devices are.

    Waits for the devices. Dim 0 may be cut and no other.
    """
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    ordered = [shards[start] for start in sorted(shards)]
    assert sum(part.shape[0] for part in ordered) == x.shape[0], x.sharding
    return [np.asarray(part) for part in ordered]


class Ship:
    """Threads that wait for devices, so that links only ever send what is there."""

    def __init__(self, peers: Peers, num_threads: int) -> None:
        self._peers = peers
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ship")

    def run(self, work: Callable[[], None]) -> None:
        """Do it soon; what goes wrong is told to all who wait."""

        def told() -> None:
            try:
                work()
            except Exception as error:
                time.sleep(_GRACE_S)  # a lost peer may be why: then it is told of first
                self._peers.mailbox.lose(self._peers.own, f"failed: {error}")

        self._pool.submit(told)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Wire:
    """The transport of one worker to stages of others, by link.

    `nodes` says which worker has a stage, by (replica, stage).
    """

    def __init__(
        self, peers: Peers, ship: Ship, nodes: Mapping[tuple[int, int], str]
    ) -> None:
        self._peers, self._ship, self._nodes = peers, ship, nodes

    def send(self, tag: Tag, x: jax.Array) -> None:
        node = self._nodes[tag.receiver]
        x.copy_to_host_async()
        self._ship.run(lambda: self._peers.send(node, key_of(tag), host_parts(x)))

    def arrived(self, tag: Tag) -> bool:
        return self._peers.mailbox.has(self._nodes[tag.sender], key_of(tag))

    def receive(self, tag: Tag, expected: jax.ShapeDtypeStruct) -> jax.Array:
        data = self._peers.mailbox.pop(self._nodes[tag.sender], key_of(tag))
        x = data.view(expected.dtype).reshape(expected.shape)
        return jax.device_put(x, expected.sharding)


def key_of(tag: Tag) -> Key:
    """The tag in six numbers."""
    kind = _KINDS[tag.kind]
    return tag.generation, tag.step, kind, tag.replica, tag.stage, tag.microbatch
