# SPDX-License-Identifier: Apache-2.0
"""One worker among others: the stages of one node, in a process of its own.

Owns running a step of its own program together with peers, and what is told of it.
Does not own connections (`hetjax/comm/peers.py`), nor when a step is run: a controller
says so (`serving.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.cluster.cluster import Node
from hetjax.comm.peers import PeerLost, Peers
from hetjax.comm.pull import Pull, PullServer
from hetjax.comm.transport import InProcess, Routed, Tag, Transport
from hetjax.comm.wire import Ship, Wire
from hetjax.mesh.axes import batch_sharding
from hetjax.mesh.spanning import leads, to_mesh, value_here
from hetjax.models.model import Model
from hetjax.plans.members import Members, node_of
from hetjax.plans.plan import Plan
from hetjax.runtime.feeding import Batch, BatchFeed, window
from hetjax.runtime.meeting import Meeting
from hetjax.runtime.outcome import StageLoss, StepCommit
from hetjax.runtime.stages import Stages
from hetjax.runtime.worker import Observer, Step, Worker
from hetjax.schedule.action import Program, Programs, StageKey

_DONE = object()
_NUM_SENDING = 4  # threads that wait for what is to be sent


class Island(Stages):
    """The stages of a worker of the plan, on local devices, with peers for the rest.

    `devices` are those of its whole node: where `nodes` says that it has several hosts,
    stages may span them, and each host's worker does its part of every program.
    Gradients travel to peers in the dtype `gradient_wire`.

    After a PeerLost the state is as it was before the step: if others have its norm,
    `finish` commits it here, too. The next step needs peers of another generation
    (`join`).
    """

    def __init__(
        self,
        plan: Plan,
        model: Model,
        worker: str,
        devices: Sequence[jax.Device],
        optimizer: optax.GradientTransformation,
        *,
        dtype: str = "float32",
        clip_norm: float = float("inf"),
        gradient_wire: str = "float32",
        nodes: Sequence[Node] = (),
    ) -> None:
        node = node_of(worker)
        super().__init__(plan, model, {node: devices}, optimizer, dtype=dtype)
        self.worker, self.node, self.clip_norm = worker, node, clip_norm
        self.members = Members(plan, tuple(nodes))
        here = {key for key, of in self.members.members.items() if worker in of}
        assert here == self.stages.keys(), (worker, here, list(self.stages))
        self._within = self.members.within(worker)
        self._spans = bool(here - self._within)
        self._wire = np.dtype(jnp.dtype(gradient_wire))
        self._worker = Worker(self.stages)
        self._layouts = {
            key: batch_sharding(state.programs.mesh)
            for key, state in self.stages.items()
        }
        self._peers: Peers | None = None
        self._ship: Ship | None = None
        self._server: PullServer | None = None
        self._across: Transport | None = None
        self._generation = 0
        self._unfinished: tuple[Iterator[None], Step] | None = None

    def join(
        self, peers: Peers, generation: int, server: PullServer | None = None
    ) -> None:
        """Go on with these peers; those of before are left.

        Activations travel by the transfer server, if there is one, else by link.
        """
        self.leave()
        self._server = server
        # a sum keeps a thread until all its holders have come
        num_threads = len(self.partition.holders) + 1 + _NUM_SENDING
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

    def step(
        self, number: int, batch: Batch, observer: Observer | None = None
    ) -> StepCommit:
        """Train on one global batch; returns once NORM is known and UPDATE enqueued.

        Raises PeerLost.
        """
        step = self._step(number, batch, observer)
        meeting = step.collectives
        assert isinstance(meeting, Meeting)
        run = self._worker.run(self._own(self.training), step)
        self._unfinished = run, step
        if not self.stages:
            meeting.attend()
        self._run(run, step)
        self._wait_until(lambda: meeting.commit is not None)
        return self._committed(step)

    def finish(self, commit: StepCommit) -> StepCommit:
        """Commit the step that a PeerLost has broken off, with the norm of others.

        Who knows it has had our part of it: nothing but UPDATE is left to do.
        """
        assert self._unfinished is not None, "no step was broken off"
        run, step = self._unfinished
        assert isinstance(step.collectives, Meeting)
        step.collectives.settle(commit)
        assert next(run, _DONE) is _DONE, "others have the norm without our part"
        return self._committed(step)

    def _committed(self, step: Step) -> StepCommit:
        self._unfinished = None
        meeting = step.collectives
        assert isinstance(meeting, Meeting) and meeting.commit is not None
        return meeting.commit

    def evaluate(self, number: int, batch: Batch) -> list[StageLoss]:
        """Summed losses by last stage of a global batch, no update.

        `number` tells this evaluation from others. Raises PeerLost.
        """
        step = self._step(number, batch, None)
        self._run(self._worker.run(self._own(self.evaluation), step), step)
        return self._losses()

    def next_logits(self, number: int, tokens: Sequence[int]) -> np.ndarray | None:
        """logits_V that follow the (last seq_len) tokens, by the first replica.

        From the worker that leads its last stage. Raises PeerLost.
        """
        inputs_BL, position = window(self.plan, tokens)
        step = self._step(number, (inputs_BL, inputs_BL), None)
        found: list[np.ndarray] = []
        self._run(self._sample(step, position, found), step)
        return found[0] if found else None

    def _sample(
        self, step: Step, position: int, found: list[np.ndarray]
    ) -> Iterator[None]:
        """Yield whenever the next stage here has to wait for the one before."""
        last = len(self.plan.replicas[0].stages) - 1
        tag = partial(Tag, self._generation, step.number, "F", 0, microbatch=0)
        for s in range(last + 1):
            state = self.stages.get((0, s))
            if state is None:
                continue
            programs = state.programs
            if s == 0:
                x = to_mesh(step.feed.inputs(0, 0), programs.tokens.sharding)
            else:
                while not step.transport.arrived(tag(s)):
                    yield
                x = step.transport.receive(tag(s), programs.outputs)
            if s < last:
                y = programs.evaluate(state.params, x)
                step.transport.send(tag(s + 1), y)
                continue
            logits_V = programs.last_logits(state.params, x, position)
            if leads(programs.mesh):
                found.append(logits_V)

    def _wait_until(self, there: Callable[[], bool]) -> None:
        assert self._peers is not None
        version = self._peers.mailbox.version
        while not there():
            version = self._peers.mailbox.wait(version)

    def _step(self, number: int, batch: Batch, observer: Observer | None) -> Step:
        assert self._peers is not None and self._ship is not None, "join first"
        assert self._across is not None
        within = InProcess(self._layouts)  # what a broken step left goes with its own
        return Step(
            number=number,
            feed=BatchFeed(self.plan, batch),
            num_tokens=batch[1].size,
            transport=Routed(self._within, within, self._across),
            collectives=Meeting(
                self._peers,
                self._ship,
                self.partition.holders,
                self.members,
                generation=self._generation,
                step=number,
                wire=self._wire,
                losses=self._last_losses,
            ),
            clip_norm=self.clip_norm,
            observer=observer,
            generation=self._generation,
        )

    def _by(self, peers: Peers, ship: Ship, server: PullServer | None) -> Transport:
        if server is None:
            return Wire(peers, ship, self.members.ranks)
        nodes = {(r, s): stage.node for r, s, stage in self.plan.stages()}
        degrees = {(r, s): stage.mesh.data for r, s, stage in self.plan.stages()}
        return Pull(peers, ship, nodes, server, degrees)

    def _own(self, programs: Programs) -> Program:
        """The node's program without stages that have no device here."""
        program = programs[self.node]
        return tuple(action for action in program if action.key in self.stages)

    def _run(self, run: Iterator[None], step: Step) -> None:
        """Enqueue what can be, then sleep until something has come."""
        try:
            self._wait_until(lambda: next(run, _DONE) is _DONE)
        except PeerLost as lost:
            if self._spans and node_of(lost.peer) != self.node:
                self._run_out(run, step)
            raise

    def _run_out(self, run: Iterator[None], step: Step) -> None:
        """Enqueue all up to UPDATE on what has no value, since other hosts may have.

        A program that spans hosts waits for all of them: what only some were given to
        do before they heard of the loss would meet the next step on the others.
        """
        assert isinstance(self._across, Wire)
        assert isinstance(step.collectives, Meeting)
        self._across.give_up()
        step.collectives.give_up()
        next(run, _DONE)

    def _losses(self) -> list[StageLoss]:
        found = self._last_losses().items()
        return [(stage, float(value_here(loss))) for stage, loss in found]

    def _last_losses(self) -> dict[StageKey, jax.Array]:
        """Of last stages that this worker leads."""
        return {
            key: state.loss
            for key, state in self.stages.items()
            if state.programs.function.last and leads(state.programs.mesh)
        }
