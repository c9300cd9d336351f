# SPDX-License-Identifier: Apache-2.0
"""A weight that turns infinite after the update of a step."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.stages import Stages
from hetjax.training import worker


def poison(stages: Stages) -> None:
    """Make a weight of the head infinite in all stages of this process that hold it."""
    for state in stages.stages.values():
        if not state.programs.function.last:
            continue
        *others, last = state.masters
        leaf, held = next(iter(last.items()))
        bad = held.at[(0,) * held.ndim].set(jnp.inf)
        masters = *others, last | {leaf: jax.device_put(bad, held.sharding)}
        stages._install(state, masters, state.opt_state, state.frozen)


def poisoned_worker(after_step: int, once: Path) -> None:
    """Run a worker whose head weight turns infinite after a step's update, once."""
    step = StageRuntime.step

    def step_and_poison(runtime: StageRuntime, *arguments: Any) -> Any:
        told = step(runtime, *arguments)
        num_steps[runtime] = num_steps.get(runtime, 0) + 1
        if num_steps[runtime] == after_step:
            with suppress(FileNotFoundError):  # another worker was quicker
                once.unlink()
                poison(runtime)
        return told

    num_steps: dict[StageRuntime, int] = {}
    StageRuntime.step = step_and_poison  # pyright: ignore
    worker.main()


if __name__ == "__main__":
    poisoned_worker(4, Path(os.environ["HETJAX_TEST_POISON"]))
