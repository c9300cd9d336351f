# SPDX-License-Identifier: Apache-2.0
"""One flipped bit: in a stage's weights, or in gradients before or after a sum."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from hetjax.comm.reduction import Rows
from hetjax.plans.plan import Group, StageKey
from hetjax.runtime.execution.gradient_sync import GradientSync, LocalSync
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.stages import Stages
from hetjax.training import worker
from hetjax.training.worker import TrainingWork

BIT = 21  # of the mantissa's 23: a quarter more or less, which no loss shows


def flipped(array: jax.Array) -> jax.Array:
    """Return the array with a flipped bit in its largest element, where it matters."""
    value = np.array(array)
    at = np.abs(value).argmax()
    value.reshape(-1).view(np.uint32)[at] ^= np.uint32(1 << BIT)
    return jax.device_put(value, array.sharding)


def flip_weight(stages: Stages, stage: StageKey) -> None:
    """Flip a bit in the stage's last stack: in its masters and all copies of them."""
    state = stages.stages[stage]
    *others, last = state.masters
    leaf, held = next(iter(last.items()))
    masters = *others, last | {leaf: flipped(held)}
    stages._install(state, masters, state.opt_state, state.frozen)


class Injected:
    """Steps of a run in this process, some of which are disturbed.

    `now` is the current step, counted from 1; `left` is how many disturbances remain.
    """

    def __init__(self, patched: pytest.MonkeyPatch, step: int, times: int = 1) -> None:
        self._patched, self._step, self.left, self.now = patched, step, times, 0
        batch = TrainingWork.batch

        def noted_batch(work: TrainingWork, number: int) -> Any:
            self.now = number + 1
            return batch(work, number)

        patched.setattr(TrainingWork, "batch", noted_batch)

    def is_due(self) -> bool:
        """Return whether to disturb now; if so, count it."""
        due = self.now == self._step and self.left > 0
        self.left -= due
        return due

    def in_weights(self, stage: StageKey) -> None:
        """Flip a bit after the update of the step."""
        train = StageRuntime.step

        def step_and_flip(runtime: StageRuntime, *arguments: Any) -> Any:
            result = train(runtime, *arguments)
            if stage in runtime.stages and self.is_due():
                flip_weight(runtime, stage)
            return result

        self._patched.setattr(StageRuntime, "step", step_and_flip)

    def in_summed(self, stage: StageKey) -> None:
        """Flip a bit in this holder's result of the first finished sum."""
        start = LocalSync._start_sum

        def start_and_flip(
            sync: LocalSync, group: Group, posted: Mapping[StageKey, Rows]
        ) -> None:
            start(sync, group, posted)
            if (group, stage) in sync._sums and self.is_due():
                first, *others = sync._sums[group, stage]
                sync._sums[group, stage] = (flipped(first), *others)

        self._patched.setattr(LocalSync, "_start_sum", start_and_flip)

    def in_contribution(self, stage: StageKey) -> None:
        """Flip a bit in the stage's contribution to the sum."""
        post = GradientSync.post

        def flip_and_post(
            sync: GradientSync, group: Group, key: StageKey, rows: Rows
        ) -> None:
            if key == stage and self.is_due():
                rows = flipped(rows[0]), *rows[1:]
            post(sync, group, key, rows)

        self._patched.setattr(GradientSync, "post", flip_and_post)


def flipping_worker(after_step: int, once: Path) -> None:
    """Run a worker that flips one bit of its weights after a step, once."""
    step = StageRuntime.step
    num_steps: dict[StageRuntime, int] = {}

    def step_and_flip(runtime: StageRuntime, *arguments: Any) -> Any:
        told = step(runtime, *arguments)
        num_steps[runtime] = num_steps.get(runtime, 0) + 1
        if num_steps[runtime] == after_step:
            with suppress(FileNotFoundError):  # another worker was quicker
                once.unlink()
                flip_weight(runtime, next(iter(runtime.stages)))
        return told

    StageRuntime.step = step_and_flip  # pyright: ignore
    worker.main()


if __name__ == "__main__":
    flipping_worker(3, Path(os.environ["HETJAX_TEST_FLIP"]))
