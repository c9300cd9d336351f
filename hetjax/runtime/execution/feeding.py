# SPDX-License-Identifier: Apache-2.0
"""A global batch, handed out by replica and microbatch.

Owns which samples a microbatch gets: consecutive ones, replicas in order. Does not own
what is in a batch (`hetjax/data/`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.plans.plan import Plan, first_sample

Batch = tuple[np.ndarray, np.ndarray]  # inputs_GL, targets_GL (int32)


@dataclass(frozen=True, slots=True)
class BatchFeed:
    """Hands each microbatch its consecutive samples of a global batch."""

    plan: Plan
    batch: Batch

    def inputs(self, replica: int, microbatch: int) -> np.ndarray:
        return self.batch[0][self._rows(replica, microbatch)]

    def targets(self, replica: int, microbatch: int) -> np.ndarray:
        return self.batch[1][self._rows(replica, microbatch)]

    def _rows(self, replica: int, microbatch: int) -> slice:
        size = self.plan.replicas[replica].microbatch_size
        start = first_sample(self.plan, replica) + microbatch * size
        return slice(start, start + size)


def window(plan: Plan, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
    """(inputs_BL, position): the last tokens as the first sequence of a microbatch of
    the first replica, and where in it the last one is."""
    last = list(tokens)[-plan.seq_len :]
    inputs_BL = np.zeros((plan.replicas[0].microbatch_size, plan.seq_len), np.int32)
    inputs_BL[0, : len(last)] = last
    return inputs_BL, len(last) - 1
