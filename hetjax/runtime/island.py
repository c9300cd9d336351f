# SPDX-License-Identifier: Apache-2.0
"""One worker among others: the stages of one node, in a process of its own.

Owns running a step of its own program together with peers, and what is told of it.
Does not own connections (`hetjax/mesh/peers.py`), nor when a step is run: a controller
says so (`serving.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.mesh.axes import batch_sharding
from hetjax.mesh.peers import Peers
from hetjax.mesh.pull import Pull, PullServer
from hetjax.mesh.transport import InProcess, Routed, Tag, Transport
from hetjax.mesh.wire import Ship, Wire
from hetjax.models.model import Model
from hetjax.plans.plan import Plan
from hetjax.runtime.feeding import Batch, BatchFeed, window
from hetjax.runtime.meeting import Meeting
from hetjax.runtime.stages import Stages
from hetjax.runtime.worker import Observer, Step, Worker, gradient_norm
from hetjax.schedule.action import Program, StageKey

_DONE = object()
_NUM_SENDING = 4  # threads that wait for what is to be sent


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a worker knows of a step: the same norm everywhere, its own losses."""

    grad_norm: float
    loss_sums: Mapping[StageKey, float]


class Island(Stages):
    """The stages of one node of the plan, on local devices, with peers for the rest.

    Gradients travel to peers in the dtype `gradient_wire`.

    After a PeerLost the state is as it was before the step, or after it if NORM had
    come; the next step needs peers of another generation (`join`).
    """

    def __init__(
        self,
        plan: Plan,
        model: Model,
        node: str,
        devices: Sequence[jax.Device],
        optimizer: optax.GradientTransformation,
        *,
        dtype: str = "float32",
        clip_norm: float = float("inf"),
        gradient_wire: str = "float32",
    ) -> None:
        super().__init__(plan, model, {node: devices}, optimizer, dtype=dtype)
        self.node, self.clip_norm = node, clip_norm
        self._wire = np.dtype(jnp.dtype(gradient_wire))
        self._worker = Worker(self.stages)
        self._nodes = {(r, s): stage.node for r, s, stage in plan.stages()}
        self._layouts = {
            key: batch_sharding(state.programs.mesh)
            for key, state in self.stages.items()
        }
        self._peers: Peers | None = None
        self._ship: Ship | None = None
        self._server: PullServer | None = None
        self._across: Transport | None = None
        self._generation = 0

    def join(
        self, peers: Peers, generation: int, server: PullServer | None = None
    ) -> None:
        """Go on with these peers; those of before are left.

        Activations travel by the transfer server, if there is one, else by link.
        """
        self.leave()
        self._server = server
        # a sum keeps a thread until all its holders have come
        num_threads = len(self.layout.holders) + 1 + _NUM_SENDING
        self._peers, self._ship = peers, Ship(peers, num_threads)
        self._across = self._by(peers, self._ship, server)
        self._generation = generation

    def leave(self) -> None:
        """End the connections and what waits for them."""
        if self._peers is not None and self._ship is not None:
            self._peers.close()
            if self._server is not None:
                self._server.drop()
            self._ship.close()
        self._peers = self._ship = self._across = None

    def step(self, number: int, batch: Batch, observer: Observer | None = None) -> Told:
        """Train on one global batch; returns once NORM is known and UPDATE enqueued.

        Raises PeerLost.
        """
        step = self._step(number, batch, observer)
        self._run(self.training[self.node], step)
        return Told(
            grad_norm=gradient_norm(step.collectives, step.num_tokens),
            loss_sums=self._losses(),
        )

    def evaluate(self, number: int, batch: Batch) -> Mapping[StageKey, float]:
        """Summed losses by last stage of a global batch, no update.

        `number` tells this evaluation from others. Raises PeerLost.
        """
        self._run(self.evaluation[self.node], self._step(number, batch, None))
        return self._losses()

    def next_logits(self, number: int, tokens: Sequence[int]) -> np.ndarray | None:
        """logits_V that follow the (last seq_len) tokens, by the first replica.

        From the worker that has its last stage. Raises PeerLost.
        """
        inputs_BL, position = window(self.plan, tokens)
        transport = self._step(number, (inputs_BL, inputs_BL), None).transport
        last = len(self.plan.replicas[0].stages) - 1
        for s in range(last + 1):
            state = self.stages.get((0, s))
            if state is None:
                continue
            tag = partial(Tag, self._generation, number, "F", 0, microbatch=0)
            programs = state.programs
            if s == 0:
                x = jax.device_put(inputs_BL, programs.tokens.sharding)
            else:
                x = self._received(transport, tag(s), programs.outputs)
            if s == last:
                return programs.last_logits(state.params, x, position)
            transport.send(tag(s + 1), programs.evaluate(state.params, x))
        return None

    def _received(
        self, transport: Transport, tag: Tag, expected: jax.ShapeDtypeStruct
    ) -> jax.Array:
        assert self._peers is not None
        version = self._peers.mailbox.version
        while not transport.arrived(tag):
            version = self._peers.mailbox.wait(version)
        return transport.receive(tag, expected)

    def _step(self, number: int, batch: Batch, observer: Observer | None) -> Step:
        assert self._peers is not None and self._ship is not None, "join first"
        assert self._across is not None
        within = InProcess(self._layouts)  # what a broken step left goes with its own
        return Step(
            number=number,
            feed=BatchFeed(self.plan, batch),
            num_tokens=batch[1].size,
            transport=Routed(self.stages, within, self._across),
            collectives=Meeting(
                self._peers,
                self._ship,
                self.layout.holders,
                self._nodes,
                generation=self._generation,
                step=number,
                wire=self._wire,
            ),
            clip_norm=self.clip_norm,
            observer=observer,
            generation=self._generation,
        )

    def _by(self, peers: Peers, ship: Ship, server: PullServer | None) -> Transport:
        if server is None:
            return Wire(peers, ship, self._nodes)
        degrees = {(r, s): stage.mesh.data for r, s, stage in self.plan.stages()}
        return Pull(peers, ship, self._nodes, server, degrees)

    def _run(self, program: Program, step: Step) -> None:
        """Enqueue what can be, then sleep until something has come."""
        assert self._peers is not None
        mailbox = self._peers.mailbox
        run, version = self._worker.run(program, step), mailbox.version
        while next(run, _DONE) is not _DONE:
            version = mailbox.wait(version)

    def _losses(self) -> dict[StageKey, float]:
        """Of last stages here; once NORM has come, nothing is waited for."""
        return {
            key: float(np.asarray(state.loss))
            for key, state in self.stages.items()
            if state.programs.graph.last
        }
