# SPDX-License-Identifier: Apache-2.0
"""A process that exchanges arrays with another one, on request.

Each line of its standard input is a call in JSON, and gets one line as its answer.
`east` has stage 0, `west` stage 1.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.comm.peers import PeerLost, Peers
from hetjax.comm.pull import PullServer, TransferTransport
from hetjax.comm.transport import Tag
from hetjax.comm.wire import HostWorkPool
from hetjax.mesh.axes import batch_sharding, stage_mesh
from tests.jax_settings import strict_simulation

STAGES = {"east": 0, "west": 1}
KINDS: Mapping[str, Literal["F", "B"]] = {"east": "F", "west": "B"}  # what they send
SHAPE_BLD = (8, 6, 40)  # sequences, positions, width
TENSOR = 2
THREADS = 4


class Side:
    def __init__(self, own: str, secret: bytes, silence_s: float) -> None:
        self.own, self.secret, self.silence_s = own, secret, silence_s
        (self.other,) = STAGES.keys() - {own}
        self.server = PullServer("127.0.0.1", secret)
        self.generation = 0

    def listen(self, generation: int) -> str:
        self.generation = generation
        self.peers = Peers(self.own, "127.0.0.1:0", self.secret, self.silence_s)
        return self.peers.address

    def connect(self, address: str) -> str:
        self.peers.connect({self.other: address}, 20.0)
        self.ship = HostWorkPool(self.peers, THREADS)
        return self.server.address

    def leave(self) -> None:
        """Leave in the order that never waits for what does not come."""
        self.peers.close()
        self.server.drop()
        self.ship.close()

    def prepare(self, degrees: Sequence[int], dtype: str, step: int) -> None:
        self.step, self.dtype = step, np.dtype(dtype)
        degree = degrees[STAGES[self.own]]
        devices = jax.devices()[: degree * TENSOR]
        mesh = stage_mesh(devices, data=degree, tensor=TENSOR)
        self.sharding = batch_sharding(mesh)
        nodes = {(0, stage): node for node, stage in STAGES.items()}
        cuts = {(0, stage): degree for stage, degree in enumerate(degrees)}
        self.transport = TransferTransport(
            self.peers, self.ship, nodes, self.server, cuts
        )

    def exchange(
        self, degrees: Sequence[int], dtype: str, rounds: int, step: int
    ) -> None:
        """Send all unfinished arrays, then receive the other's in reverse order."""
        self.prepare(degrees, dtype, step)
        for number in range(rounds):
            self.send(number)
        for number in reversed(range(rounds)):
            expected = self.content(number, self.other)
            np.testing.assert_array_equal(_bits(self.receive(number)), _bits(expected))
        self.acknowledged()

    def send(self, number: int) -> None:
        x_BLD = jax.device_put(-self.content(number, self.own), self.sharding)
        self.transport.send(self.tag(number, self.own), jax.jit(jnp.negative)(x_BLD))

    def receive(self, number: int) -> jax.Array:
        tag, version = self.tag(number, self.other), self.peers.mailbox.version
        while not self.transport.arrived(tag):
            version = self.peers.mailbox.wait(version)
        wanted = jax.ShapeDtypeStruct(SHAPE_BLD, self.dtype, sharding=self.sharding)
        x_BLD = self.transport.receive(tag, wanted)
        assert x_BLD.sharding == self.sharding and x_BLD.dtype == self.dtype
        return x_BLD

    def acknowledged(self) -> None:
        """Wait until nothing is held for the other."""
        until_s = time.monotonic() + 10
        while self.server._held:
            assert time.monotonic() < until_s, f"still held: {self.server._held.keys()}"
            time.sleep(0.01)
        assert self.peers.mailbox._messages.keys() == set()

    def offer(self, rounds: int) -> None:
        self.prepare([2, 1], "float32", 0)
        for number in range(rounds):
            self.send(number)

    def arrivals(self, rounds: int) -> None:
        """Wait for offers without pulling any; compile what pulling needs."""
        self.prepare([2, 1], "float32", 0)
        jax.jit(jnp.negative)(
            jax.device_put(self.content(0, self.other), self.sharding)
        )
        version = self.peers.mailbox.version
        tags = [self.tag(number, self.other) for number in range(rounds)]
        while not all(map(self.transport.arrived, tags)):
            version = self.peers.mailbox.wait(version)

    def pull(self, rounds: int) -> None:
        """Begin to pull what a stopped process has offered, and send results of it."""
        self.own_array = jax.jit(jnp.negative)(jnp.arange(5))
        self.pulled = [self.receive(number) for number in range(rounds)]
        self.made = [jax.jit(jnp.negative)(x_BLD) for x_BLD in self.pulled]
        for number, x_BLD in enumerate(self.made):
            self.transport.send(self.tag(number, self.own), x_BLD)
        time.sleep(0.2)
        assert not any(x_BLD.is_ready() for x_BLD in self.made)
        self.peers.mailbox.check()

    def loss(self) -> list[Any]:
        """Return who was lost and when, and when all dependent arrays had failed."""
        version = self.peers.mailbox.version
        try:
            while True:
                version = self.peers.mailbox.wait(version)
        except PeerLost as lost:
            told_s, peer = time.monotonic(), lost.peer
        failed = [_fails(x_BLD) for x_BLD in (*self.pulled, *self.made)]
        assert all(failed) and len(failed) > 2, failed
        np.testing.assert_array_equal(self.own_array, -np.arange(5))
        np.testing.assert_array_equal(self.own_array + 1, 1 - np.arange(5))
        return [peer, told_s, time.monotonic()]

    def tag(self, number: int, sender: str) -> Tag:
        (receiver,) = STAGES.keys() - {sender}
        stage, kind = STAGES[receiver], KINDS[sender]
        return Tag(self.generation, self.step, kind, 0, stage, number)

    def content(self, number: int, sender: str) -> np.ndarray:
        seed = (self.generation, self.step, number, STAGES[sender])
        random = np.random.default_rng(seed)
        return random.standard_normal(SHAPE_BLD).astype(self.dtype)


def _bits(x: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def _fails(x: jax.Array) -> bool:
    try:
        jax.block_until_ready(x)
    except jax.errors.JaxRuntimeError:
        return True
    return False


def main() -> None:
    strict_simulation()
    own, secret, silence_s = json.loads(sys.stdin.readline())
    side = Side(own, bytes.fromhex(secret), silence_s)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(side, name)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
