# SPDX-License-Identifier: Apache-2.0
"""A global batch, handed out by replica and microbatch.

Owns which samples a microbatch gets: consecutive ones, replicas in order. Does not own
what is in a batch (`hetjax/data/`).
"""

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
