# SPDX-License-Identifier: Apache-2.0
"""Interprets the program of one node, action by action.

Owns the meaning of every action on arrays: which compiled program runs, and which
buffers it reads, makes and frees. Does not own the order (the program's), the transfer
of arrays (`hetjax/comm/transport.py`) nor the exchange between stages
(`gradient_sync.py`).

Nothing here waits for a device except NORM, the commit point.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np

from hetjax.comm.reduction import Rows
from hetjax.comm.transport import Tag, Transport
from hetjax.data.batches import Batch, aux_weight
from hetjax.errors import BadInput
from hetjax.mesh.axes import replicated
from hetjax.mesh.multihost import to_mesh
from hetjax.plans.plan import Group, Plan, StageKey, first_sample
from hetjax.runtime.execution.checking.checks import NO_CHECKS, StepChecks
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.execution.gradient_sync import GradientSync
from hetjax.runtime.execution.shares import StageShare
from hetjax.runtime.execution.stage_state import StageState
from hetjax.schedule.programs.action import Action, Op, Program, Programs
from hetjax.stage.function import Given, LossScales, Packed, Scale


@dataclass(frozen=True, slots=True)
class BatchFeed:
    """Hands each microbatch its consecutive samples of a global batch."""

    plan: Plan
    batch: Batch

    def inputs(self, replica: int, microbatch: int) -> np.ndarray:
        return self.batch[0][self.rows(replica, microbatch)]

    def targets(self, replica: int, microbatch: int) -> np.ndarray:
        return self.batch[1][self.rows(replica, microbatch)]

    def documents(self, replica: int, microbatch: int) -> np.ndarray:
        return self.batch[2][self.rows(replica, microbatch)]

    def rows(self, replica: int, microbatch: int) -> slice:
        size = self.plan.replicas[replica].microbatch_size
        start = first_sample(self.plan, replica) + microbatch * size
        return slice(start, start + size)


class ActionObserver(Protocol):
    """Called after each enqueued action, with an array that the action produced."""

    def enqueued(
        self, action: Action, start_s: float, end_s: float, made: Any
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """The inputs of one pass over the program."""

    number: int
    feed: BatchFeed
    transport: Transport
    sync: GradientSync
    clip_norm: float
    loss_scale: float | None = None
    checks: StepChecks = NO_CHECKS
    observer: ActionObserver | None = None
    epoch: int = 0
    rows: dict[Action, jax.Array] | None = None  # receives the losses of each row


class Executor:
    """Runs the actions of one node's stages; buffers live until their FREE."""

    def __init__(self, stages: Mapping[StageKey, StageState]) -> None:
        self.stages = stages
        self._buffers: dict[tuple[str, int, int, int], Any] = {}

    def run(self, program: Program, step: StepContext) -> Iterator[int]:
        """Enqueue the whole program; yield the position of an action that must wait."""
        self._buffers.clear()  # left over from an aborted step
        for state in self.stages.values():
            state.drop_step()
            state.loss_scale = _placed(step, state)
        for at, action in enumerate(program):
            while not self._ready(action, step):
                yield at
            start_s = time.perf_counter()
            made = _MEANING[action.op](self, action, step)
            if step.observer is not None:
                end_s = time.perf_counter()
                step.observer.enqueued(action, start_s, end_s, made)
        assert not self._buffers, f"never freed: {sorted(self._buffers)}"

    def _ready(self, action: Action, step: StepContext) -> bool:
        if action.op is Op.RECV:
            return step.transport.arrived(_tag(action, step, action.stage))
        if action.op is Op.NORM:  # once all shared groups have been summed
            return all(
                step.sync.summed(group.name, action.key) is not None
                for group in self._state(action).updates.groups
                if step.sync.is_shared(group.name)
            )
        if action.op is Op.UPDATE:
            return step.sync.commit is not None
        return True

    def _forward(self, action: Action, step: StepContext) -> Any:
        state = self._state(action)
        x = self._input(action, step)
        if state.programs.function.last:
            self._acc(state)  # creates the loss, too
            targets = self._targets(action, step)
            state.loss, saved = state.programs.forward(
                state.params, x, targets, state.loss
            )
            made = saved[:1]
        else:
            made, saved = state.programs.forward(state.params, x)
            self._put("y", action, made)
        self._put("saved", action, (x, saved))
        return made

    def _backward(self, action: Action, step: StepContext) -> Any:
        state = self._state(action)
        x, saved = self._get("saved", action)
        dy = self._get("dy", action)
        state.acc, dx = state.programs.backward(
            state.params, x, saved, dy, state.loss_scale, self._acc(state)
        )
        if action.stage > 0:
            self._put("dx", action, dx)
        return dx

    def _input_gradient(self, action: Action, step: StepContext) -> Any:
        state = self._state(action)
        x, saved = self._get("saved", action)
        dy = None if state.programs.function.last else self._get("dy", action)
        given = x, saved, dy, state.loss_scale
        dx, crossing = state.programs.input_gradient(state.params, *given)
        self._put("half", action, state.programs.kept(given, crossing))
        if action.stage > 0:
            self._put("dx", action, dx)
        return dx

    def _weight_gradient(self, action: Action, step: StepContext) -> Any:
        state, half = self._state(action), self._get("half", action)
        state.acc, done = state.programs.weight_gradient(
            state.params, half, self._acc(state)
        )
        return done

    def _fused(self, action: Action, step: StepContext) -> Any:
        state = self._state(action)
        acc = self._acc(state)
        state.acc, state.loss, dx = state.programs.fused(
            state.params,
            self._input(action, step),
            self._targets(action, step),
            state.loss_scale,
            acc,
            state.loss,
        )
        if action.stage > 0:
            self._put("dx", action, dx)
        return dx

    def _evaluate(self, action: Action, step: StepContext) -> Any:
        state = self._state(action)
        x, params = self._input(action, step), state.evaluation_params()
        if not state.programs.function.last:
            y = state.programs.evaluate(params, x)
            self._put("y", action, y)
            return y
        targets = self._targets(action, step)
        if step.rows is not None:
            made = state.programs.row_losses(params, x, targets)
            return step.rows.setdefault(action, made)
        if state.loss is None:
            state.loss = to_mesh(np.float32(0), state.programs.scalar.sharding)
        state.loss = state.programs.evaluate(params, x, targets, state.loss)
        return state.loss

    def _send(self, action: Action, step: StepContext) -> Any:
        assert action.buffer is not None and action.peer is not None
        array = self._get(action.buffer, action)
        step.transport.send(_tag(action, step, action.peer), array)

    def _receive(self, action: Action, step: StepContext) -> Any:
        assert action.buffer is not None
        programs = self._state(action).programs
        is_forward = action.buffer == "x"
        expected = programs.inputs if is_forward else programs.output_gradients
        tag = _tag(action, step, action.stage)
        array = step.transport.receive(tag, expected)
        self._put(action.buffer, action, array)
        return array

    def _reduce(self, action: Action, step: StepContext) -> Any:
        state = self._state(action)
        if action.group not in {group.name for group in state.updates.groups}:
            return None  # all its parameters are tied, in another group
        rows = self._packed(state, action.group)
        step.sync.post(action.group, action.key, rows)
        return rows

    def _norm(self, action: Action, step: StepContext) -> Any:
        state, stage = self._state(action), action.key
        for group in state.updates.groups:
            summed = step.sync.summed(group.name, stage)
            if summed is None and group.rows:
                summed = self._packed(state, group.name)
            elif summed is None:
                summed = [state.acc[run][leaf] for run, leaf in group.leaf_ids]
            state.gradients[group.name] = summed
        state.acc = None
        gradients = tuple(state.gradients.values())
        if action.replica == step.feed.plan.first_replica:
            squares = state.updates.square_sum(gradients)
        else:  # other replicas have the same sums
            squares = to_mesh(np.float32(0), state.programs.scalar.sharding)
        if state.is_finite is None:
            state.is_finite = state.checks.is_finite(state.masters)
        share = StageShare(squares=squares, is_finite=state.is_finite)
        if step.checks.digests:
            groups, digests = state.checks.digests(state.masters, gradients)
            share = replace(share, groups=groups, digests=digests)
        step.sync.post_share(stage, share)
        return squares

    def _update(self, action: Action, step: StepContext) -> Any:
        state = self._state(action)
        commit = step.sync.commit
        assert commit is not None
        if commit.is_skipped:
            state.gradients.clear()
            state.skip()
            return jax.tree.leaves(state.masters)[:1]
        scale = gradient_scale(commit, step.clip_norm)
        whole = replicated(state.programs.mesh)
        state.masters, state.opt_state, copies = state.updates.update(
            state.masters,
            state.opt_state,
            tuple(state.gradients.values()),
            to_mesh(np.float32(scale), whole),
        )
        state.params = state.updates.with_copies(state.masters, copies, state.frozen)
        state.is_finite = state.checks.is_finite(state.masters)
        state.gradients.clear()
        return jax.tree.leaves(state.masters)[:1]

    def _free(self, action: Action, step: StepContext) -> Any:
        del self._buffers[_key(action.buffer, action)]

    def _packed(self, state: StageState, name: Group) -> Rows:
        group = next(g for g in state.updates.groups if g.name == name)
        leaves = [state.acc[run].pop(leaf) for run, leaf in group.leaf_ids]
        return state.programs.pack(group.leaf_ids, group.rows)(leaves)

    def _acc(self, state: StageState) -> Any:
        if state.acc is None:
            state.evaluated = None
            state.acc, state.loss = state.programs.zeros()
        return state.acc

    def _input(self, action: Action, step: StepContext) -> Given:
        if action.stage > 0:
            x = self._get("x", action)
        else:
            x = self._fed(action, step.feed.inputs)
        if not self._state(action).programs.is_packed:
            return x
        return Packed(x, self._fed(action, step.feed.documents))

    def _targets(self, action: Action, step: StepContext) -> jax.Array:
        return self._fed(action, step.feed.targets)

    def _fed(self, action: Action, feed: Callable[[int, int], np.ndarray]) -> jax.Array:
        assert action.microbatch is not None
        rows_BL = feed(action.replica, action.microbatch)
        return to_mesh(rows_BL, self._state(action).programs.outputs.sharding)

    def _state(self, action: Action) -> StageState:
        return self.stages[action.key]

    def _get(self, buffer: str, action: Action) -> Any:
        return self._buffers[_key(buffer, action)]

    def _put(self, buffer: str, action: Action, value: Any) -> None:
        self._buffers[_key(buffer, action)] = value


def gradient_scale(commit: StepCommit, clip_norm: float) -> float:
    """Return the factor from summed gradients to clipped token means (global norm)."""
    clipped = min(1.0, clip_norm / max(commit.grad_norm, 1e-12))
    return clipped / commit.num_tokens / (commit.loss_scale or 1.0)


def _placed(step: StepContext, state: StageState) -> Scale:
    def placed(scale: float) -> jax.Array:
        return to_mesh(np.float32(scale), state.programs.scalar.sharding)

    if state.programs.is_packed:
        loss = step.loss_scale or 1.0
        return LossScales(placed(loss), placed(loss * aux_weight(step.feed.batch)))
    return None if step.loss_scale is None else placed(step.loss_scale)


def _key(buffer: str | None, action: Action) -> tuple[str, int, int, int]:
    assert buffer is not None and action.microbatch is not None
    return buffer, action.replica, action.stage, action.microbatch


def _tag(action: Action, step: StepContext, receiver: int) -> Tag:
    assert action.microbatch is not None
    return Tag(
        generation=step.epoch,
        step=step.number,
        kind="F" if action.buffer in ("x", "y") else "B",
        replica=action.replica,
        stage=receiver,
        microbatch=action.microbatch,
    )


_MEANING = {
    Op.F: Executor._forward,
    Op.B: Executor._backward,
    Op.FB: Executor._fused,
    Op.I: Executor._input_gradient,
    Op.W: Executor._weight_gradient,
    Op.E: Executor._evaluate,
    Op.SEND: Executor._send,
    Op.RECV: Executor._receive,
    Op.REDUCE: Executor._reduce,
    Op.NORM: Executor._norm,
    Op.UPDATE: Executor._update,
    Op.FREE: Executor._free,
}


def check_runnable(programs: Programs) -> None:
    """Raise BadInput for actions of the IR that this runtime cannot run.

    Programs may be written by hand.
    """
    for node, program in programs.items():
        for action in program:
            if action.op not in _MEANING:
                raise BadInput(
                    got=f"programs[{node!r}]: {action}",
                    allowed=f"actions {', '.join(map(str, _MEANING))}",
                    fix=f"leave {action.op} out of the program",
                )
