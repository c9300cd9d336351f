# SPDX-License-Identifier: Apache-2.0
"""Computes the learning rate of each step of a run, for rules and for people.

Does not own how rules use it (one file each).
"""

import jax
import numpy as np
import optax

from hetjax.optimizers.settings import OptimizerConfig

_BLOCK = 4096  # steps


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the steps done.

    A linear rise over the warm-up, then the schedule's course to the last step.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, num_steps // 2)
    rest = num_steps - warmup
    if config.schedule == "cosine":
        course = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    elif config.schedule == "linear":
        course = optax.linear_schedule(peak, peak * config.final_fraction, rest)
    else:
        course = optax.constant_schedule(peak)
    if not warmup:
        return course
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, course], [warmup])


class LearningRates:
    """The learning rate of each step, by its index, for people to read.

    Computed for a block of steps at a time: a single value would wait for busy devices.
    """

    def __init__(self, config: OptimizerConfig, num_steps: int, first: int = 0) -> None:
        """Compute the block that holds step `first`."""
        self._of_steps = jax.jit(jax.vmap(schedule(config, num_steps)))
        self._start, self._block = self._made(first)

    def __getitem__(self, step: int) -> float:
        if not self._start <= step < self._start + len(self._block):
            self._start, self._block = self._made(step)
        return float(self._block[step - self._start])

    def _made(self, step: int) -> tuple[int, np.ndarray]:
        start = step - step % _BLOCK
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return start, np.asarray(self._of_steps(np.arange(start, start + _BLOCK)))
