# SPDX-License-Identifier: Apache-2.0
"""Runs steps on the stages of one worker, alone or together with peers.

Owns how far each node's program can be enqueued before it has to wait, for another one
here or for a peer. Does not own the stages (`stages.py`), the meaning of actions
(`executor.py`), connections (`hetjax/comm/peers.py`), nor when a step runs
(`runtime/worker/service.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.comm.peers import PeerLost, Peers
from hetjax.comm.pull import PullServer, TransferTransport
from hetjax.comm.transport import InProcess, Routed, Tag, Transport
from hetjax.comm.wire import HostWorkPool, SocketTransport
from hetjax.data.batches import Batch, num_targets
from hetjax.mesh.multihost import leads, to_mesh, value_here
from hetjax.models.model import Model
from hetjax.plans.plan import Plan
from hetjax.plans.worker_map import EMBEDDED, WorkerMap, node_of
from hetjax.runtime.execution.checking.checks import NO_CHECKS, StepChecks
from hetjax.runtime.execution.commit import StageLoss, StepCommit
from hetjax.runtime.execution.executor import (
    ActionObserver,
    BatchFeed,
    Executor,
    StepContext,
)
from hetjax.runtime.execution.gradient_sync import GradientSync, LocalSync, PeerSync
from hetjax.runtime.execution.stage_state import StageState
from hetjax.runtime.execution.stages import Stages
from hetjax.runtime.execution.state import Read, Weights
from hetjax.schedule.programs.action import Programs, StageKey
from hetjax.stage.function import Packed

_NUM_SENDING = 4  # threads that wait for data to send


@dataclass(frozen=True, slots=True)
class _Joined:
    """The peers of an epoch, and the transport to them."""

    epoch: int
    peers: Peers
    pool: HostWorkPool
    transport: Transport
    server: PullServer | None


class StageRuntime(Stages):
    """The stages of a worker of the plan, on local devices, with peers for the rest.

    `devices` are those of its nodes, by node. One worker alone has all nodes of a plan:
    `StageRuntime(plan, model, devices, optimizer)` runs it in this process. Otherwise
    `members` maps stages to workers. A node may have several hosts: `devices` are then
    those of all of them, stages may span them, and each host's worker does its part of
    every program. Gradients travel to peers in the dtype `gradient_wire`.

    After a PeerLost the state is as it was before the step. If others have committed
    it, `finish` commits it here, too. The next step needs peers of another epoch
    (`join`).
    """

    def __init__(
        self,
        plan: Plan,
        model: Model,
        devices: Mapping[str, Sequence[jax.Device]],
        optimizer: optax.GradientTransformation,
        *,
        dtype: str = "float32",
        weights: Weights | None = None,
        kinds: Mapping[str, str] | None = None,
        deterministic: bool = False,
        clip_norm: float = float("inf"),
        gradient_wire: str = "float32",
        worker: str = EMBEDDED,
        members: WorkerMap | None = None,
    ) -> None:
        super().__init__(
            plan,
            model,
            devices,
            optimizer,
            dtype=dtype,
            weights=weights,
            kinds=kinds,
            deterministic=deterministic,
        )
        self.worker, self.clip_norm = worker, clip_norm
        self._wire = np.dtype(jnp.dtype(gradient_wire))
        self._joined: _Joined | None = None
        self._unfinished: tuple[list[Iterator[int]], StepContext] | None = None
        self._take_part(members or WorkerMap(plan, only=worker))

    def reroute(self, num_microbatches: Sequence[int]) -> None:
        """Reroute like `Stages`, and discard an aborted step.

        The state stays as it was before that step. The next step needs peers of another
        epoch, those whose replicas are not idle.
        """
        super().reroute(num_microbatches)
        self.leave()
        self._unfinished = None
        for state in self._built.values():
            state.drop_step()
        self._take_part(replace(self.members, plan=self.plan))

    def _take_part(self, members: WorkerMap) -> None:
        """Derive this worker's part of the plan: which stages it runs, and how."""
        self.members, worker = members, self.worker
        here = {key for key, of in self.members.members.items() if worker in of}
        assert here == self.stages.keys(), (worker, here, list(self.stages))
        self._within = self.members.within(worker)
        self._spans = bool(here - self._within)
        self._nodes = nodes = {(r, s): stage.node for r, s, stage in self.plan.stages()}
        own_nodes = {nodes[key] for key in here}
        self._executors = {
            node: Executor({k: v for k, v in self.stages.items() if nodes[k] == node})
            for node in self.training
            if node in own_nodes
        }
        self._training, self._evaluation = map(
            self._own, (self.training, self.evaluation)
        )
        self._layouts = {
            key: state.programs.outputs.sharding for key, state in self.stages.items()
        }

    def join(self, peers: Peers, epoch: int, server: PullServer | None = None) -> None:
        """Continue with these peers; leave the previous ones.

        Activations travel by the transfer server, if there is one, otherwise by link.
        """
        self.leave()
        # a sum occupies a thread until all its holders have sent
        pool = HostWorkPool(peers, len(self.partition.holders) + 1 + _NUM_SENDING)
        transport = self._by(peers, pool, server)
        self._joined = _Joined(epoch, peers, pool, transport, server)

    def leave(self) -> None:
        """End the connections and everything that waits for them."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.peers.close()
            if joined.server is not None:
                joined.server.drop()
            joined.pool.close()

    def close(self) -> None:
        """Leave the peers, and drop all state that no one else holds."""
        self.leave()
        for state in self._built.values():
            state.clear()

    def step(
        self,
        number: int,
        batch: Batch,
        observer: ActionObserver | None = None,
        loss_scale: float | None = None,
        checks: StepChecks = NO_CHECKS,
    ) -> StepCommit:
        """Train on one global batch; return once NORM is known and UPDATE enqueued.

        `loss_scale` is a power of two if the loss `is_scaled`, otherwise None. Raises
        PeerLost.
        """
        assert self.is_scaled == (loss_scale is not None), loss_scale
        step = self._step(number, batch, observer, loss_scale, checks)
        runs = self._runs(self._training, step)
        self._unfinished = runs, step
        if not self.stages:
            step.sync.attend()
        self._run(runs, step)
        version = self._version
        while (commit := step.sync.commit) is None:
            version = self._wait(version)
        self._done()
        return commit

    @property
    def is_aborted(self) -> bool:
        """Whether a step was aborted, and the state is still that of before it."""
        return self._unfinished is not None

    def restore(self, read: Read) -> None:
        """Restore like `Stages`; an aborted step is not part of this state."""
        super().restore(read)
        self._unfinished = None

    def finish(self, commit: StepCommit) -> StepCommit:
        """Commit the step that a PeerLost has aborted, as others have.

        No worker would have the commit if this one had not done its part: only UPDATE
        is left to do. A left-out step changes only step counters.
        """
        if commit.is_left_out:
            self.skip()
            return commit
        assert self._unfinished is not None, "no step was aborted"
        runs, step = self._unfinished
        step.sync.settle(commit)
        left = [at for run in runs if (at := next(run, None)) is not None]
        assert not left, "others have the commit without our part"
        self._done()
        return commit

    def _done(self) -> None:
        self._unfinished = None
        self._leave_idle_behind()

    def evaluate(self, number: int, batch: Batch) -> list[StageLoss]:
        """Return the summed losses of last stages that are led from here; no update.

        `number` distinguishes this evaluation from others. Raises PeerLost.
        """
        step = self._step(number, batch)
        self._run(self._runs(self._evaluation, step), step)
        found = self._last_losses()
        return [(stage, float(value_here(loss))) for stage, loss in found.items()]

    def next_logits(self, number: int, tokens: Sequence[int]) -> np.ndarray | None:
        """Return logits_V after the (last seq_len) tokens, by the first active replica.

        None except from the worker that leads its last stage. Raises PeerLost.
        """
        inputs_BL, position = _window(self.plan, tokens)
        found: list[np.ndarray] = []

        def call(key: StageKey, x: Any) -> jax.Array | None:
            state, programs = self.stages[key], self.stages[key].programs
            if programs.is_packed:
                document_BL = np.ones(x.shape[:2], np.int32)
                x = Packed(x, to_mesh(document_BL, programs.tokens.sharding))
            params = state.evaluation_params()
            if not programs.function.last:
                return programs.evaluate(params, x)
            logits_V = programs.last_logits(params, x, position)
            if leads(programs.mesh):
                found.append(logits_V)
            return None

        step = self._step(number, (inputs_BL, inputs_BL))
        self._run([self._along(step, inputs_BL, self.stages, call)], step)
        return found[0] if found else None

    def _along(
        self,
        step: StepContext,
        tokens_BL: np.ndarray,
        stages: Mapping[StageKey, StageState],
        call: Callable[[StageKey, Any], jax.Array | None],
    ) -> Iterator[int]:
        """Call this worker's stages of the first active replica, one after the other.

        Yield whenever the next stage has to wait for the one before. A stage's input
        and output are as its programs say; `call` returns None for the last stage.
        """
        r = self.plan.first_replica
        tag = partial(Tag, step.epoch, step.number, "F", r, microbatch=0)
        for s in range(len(self.plan.replicas[r].stages)):
            if (r, s) not in stages:
                continue
            programs = stages[r, s].programs
            if s == 0:
                x = to_mesh(tokens_BL, programs.tokens.sharding)
            else:
                while not step.transport.arrived(tag(s)):
                    yield s
                x = step.transport.receive(tag(s), programs.inputs)
            y = call((r, s), x)
            if y is not None:
                step.transport.send(tag(s + 1), y)

    def _step(
        self,
        number: int,
        batch: Batch,
        observer: ActionObserver | None = None,
        loss_scale: float | None = None,
        checks: StepChecks = NO_CHECKS,
    ) -> StepContext:
        joined, num_tokens = self._joined, num_targets(batch)
        transport: Transport = InProcess(self._layouts)
        sync: GradientSync
        if joined is None:
            holders, stages = self.partition.holders, len(self.members.members)
            assert len(self.stages) == stages, "join first"
            sync = LocalSync(
                holders, stages, num_tokens, self._last_losses, loss_scale, checks
            )
        else:
            # a new InProcess per step drops messages that an aborted step left
            transport = Routed(self._within, transport, joined.transport)
            sync = PeerSync(
                joined.peers,
                joined.pool,
                self.partition.holders,
                self.members,
                at=(joined.epoch, number),
                num_tokens=num_tokens,
                wire=self._wire,
                losses=self._last_losses,
                loss_scale=loss_scale,
                checks=checks,
            )
        return StepContext(
            number=number,
            feed=BatchFeed(self.plan, batch),
            transport=transport,
            sync=sync,
            clip_norm=self.clip_norm,
            loss_scale=loss_scale,
            checks=checks,
            observer=observer,
            epoch=0 if joined is None else joined.epoch,
        )

    def _by(
        self, peers: Peers, pool: HostWorkPool, server: PullServer | None
    ) -> Transport:
        if server is None:
            return SocketTransport(peers, pool, self.members.ranks)
        degrees = {(r, s): stage.mesh.data for r, s, stage in self.plan.stages()}
        return TransferTransport(peers, pool, self._nodes, server, degrees)

    def _own(self, programs: Programs) -> Programs:
        """Return the nodes' programs without stages that have no device here."""
        return {
            node: tuple(a for a in programs[node] if a.key in self.stages)
            for node in self._executors
        }

    def _runs(self, programs: Programs, step: StepContext) -> list[Iterator[int]]:
        return [self._executors[node].run(p, step) for node, p in programs.items()]

    def _run(self, runs: Sequence[Iterator[int]], step: StepContext) -> None:
        """Run round robin: each run enqueues until it must wait, here or for a peer."""
        try:
            before: list[tuple[Iterator[int], int]] = []
            left = runs
            while left:
                version = self._version
                waiting = [(r, at) for r in left if (at := next(r, None)) is not None]
                if waiting and waiting == before:
                    self._wait(version)
                before, left = waiting, [run for run, _ in waiting]
        except PeerLost as lost:
            mates = {node_of(worker) for worker in (self.worker, lost.peer)}
            if self._spans and len(mates) > 1:
                self._run_out(runs, step)
            raise

    def _run_out(self, runs: Sequence[Iterator[int]], step: StepContext) -> None:
        """Enqueue everything up to UPDATE on NaN inputs, since other hosts may have.

        A program that spans hosts waits for all of them. If some hosts learnt of the
        loss before they enqueued it, it would be paired with their next step's program.
        """
        assert self._joined is not None and isinstance(
            self._joined.transport, SocketTransport
        )
        assert isinstance(step.sync, PeerSync)
        self._joined.transport.give_up()
        step.sync.give_up()
        for run in runs:
            next(run, None)

    @property
    def _version(self) -> int:
        return 0 if self._joined is None else self._joined.peers.mailbox.version

    def _wait(self, version: int) -> int:
        """Sleep until something has arrived since; without peers nothing ever will."""
        assert self._joined is not None, "stalled: no stage here can continue"
        return self._joined.peers.mailbox.wait(version)

    def _last_losses(self) -> dict[StageKey, jax.Array]:
        """Return the losses of last stages that this worker leads."""
        last = {k: s for k, s in self.stages.items() if s.programs.function.last}
        return {k: s.loss for k, s in last.items() if leads(s.programs.mesh)}


def _window(plan: Plan, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
    """Return (inputs_BL, position): the last tokens as the first sequence of a
    microbatch of that replica, and the index of the last token in it."""
    last, replica = list(tokens)[-plan.seq_len :], plan.replicas[plan.first_replica]
    inputs_BL = np.zeros((replica.microbatch_size, plan.seq_len), np.int32)
    inputs_BL[0, : len(last)] = last
    return inputs_BL, len(last) - 1
