# SPDX-License-Identifier: Apache-2.0
"""The embedded controller: every worker in this process, over the local devices.

Owns running steps by letting each worker enqueue until it has to wait for another. Does
not own the stages (`stages.py`) nor the training loop (`hetjax/training/`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import numpy as np
import optax

from hetjax.checkpoint.entry import Entry
from hetjax.comm.transport import InProcess
from hetjax.mesh.axes import batch_sharding
from hetjax.mesh.reshard import reshard
from hetjax.models.model import Model
from hetjax.plans.plan import Plan
from hetjax.runtime.collectives import InProcessCollectives
from hetjax.runtime.feeding import Batch, BatchFeed, window
from hetjax.runtime.stages import Stages
from hetjax.runtime.worker import Observer, Step, Worker, gradient_norm
from hetjax.schedule.action import Programs


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one committed step; `loss` waits for the devices when it is asked."""

    step: int
    grad_norm: float
    loss_sums: tuple[jax.Array, ...]
    num_tokens: int

    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return total(self.loss_sums) / self.num_tokens


class Embedded(Stages):
    """A plan on the devices of this process: one worker per node."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        devices: Mapping[str, Sequence[jax.Device]],
        optimizer: optax.GradientTransformation,
        *,
        dtype: str = "float32",
        clip_norm: float = float("inf"),
    ) -> None:
        super().__init__(plan, model, devices, optimizer, dtype=dtype)
        self.clip_norm = clip_norm
        nodes = {(r, s): stage.node for r, s, stage in plan.stages()}
        self.workers = {
            node: Worker({k: v for k, v in self.stages.items() if nodes[k] == node})
            for node in dict.fromkeys(nodes.values())
        }
        self._inputs = {
            key: batch_sharding(state.programs.mesh)
            for key, state in self.stages.items()
        }

    def step(
        self, number: int, batch: Batch, observer: Observer | None = None
    ) -> StepResult:
        """Train on one global batch; returns once NORM is known and UPDATE enqueued."""
        step = self._step(number, batch, observer)
        self._run(self.training, step)
        return StepResult(
            step=number,
            grad_norm=gradient_norm(step.collectives, step.num_tokens),
            loss_sums=self.loss_sums(),
            num_tokens=step.num_tokens,
        )

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean cross-entropy in nats per token over global batches, no update."""
        sums, num_tokens = 0.0, 0
        for batch in batches:
            self._run(self.evaluation, self._step(0, batch, None))
            sums += total(self.loss_sums())
            num_tokens += batch[1].size
        return sums / num_tokens

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """logits_V that follow the (last seq_len) tokens, by the first replica."""
        inputs_BL, position = window(self.plan, tokens)
        num_stages = len(self.plan.replicas[0].stages)
        states = [self.stages[0, s] for s in range(num_stages)]
        x = jax.device_put(inputs_BL, states[0].programs.tokens.sharding)
        for state, after in pairwise(states):
            y = state.programs.evaluate(state.params, x)
            x = reshard(y, after.programs.inputs.sharding)
        return states[-1].programs.last_logits(states[-1].params, x, position)

    def take_over(self, other: "Embedded") -> int:
        """Go on with the state of another plan's runtime, which has none afterwards.

        By way of the host, which holds each value until the last stage that needs it
        has it: no device ever has both. Returns the bytes that were placed.
        """
        values = {entry.name: value for entry, value in other.give_up()}
        needed = Counter(entry.name for entry in self.needed())
        num_bytes = 0

        def read(entry: Entry) -> np.ndarray:
            nonlocal num_bytes
            num_bytes += values[entry.name].nbytes
            needed[entry.name] -= 1
            return values[entry.name] if needed[entry.name] else values.pop(entry.name)

        self.restore(read)
        jax.block_until_ready([state.params for state in self.stages.values()])
        return num_bytes

    def _step(self, number: int, batch: Batch, observer: Observer | None) -> Step:
        return Step(
            number=number,
            feed=BatchFeed(self.plan, batch),
            num_tokens=batch[1].size,
            transport=InProcess(self._inputs),
            collectives=InProcessCollectives(self.partition.holders, len(self.stages)),
            clip_norm=self.clip_norm,
            observer=observer,
        )

    def _run(self, programs: Programs, step: Step) -> None:
        """Round robin: each worker enqueues until it waits for another one."""
        active = [self.workers[n].run(program, step) for n, program in programs.items()]
        while active:
            active = [run for run in active if next(run, _DONE) is not _DONE]


_DONE = object()


def total(sums: Sequence[jax.Array]) -> float:
    """The sum of scalars in double precision; waits for their devices."""
    return float(np.sum(jax.device_get(sums), dtype=np.float64))
