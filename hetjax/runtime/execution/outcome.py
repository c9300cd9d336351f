# SPDX-License-Identifier: Apache-2.0
"""What is known of a committed step, to its workers and to whoever asked for it.

Owns the values alone. Does not own how they come about (`gradient_sync.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.plans.plan import StageKey

StageLoss = tuple[StageKey, float]  # summed over the microbatches of a last stage


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommit:
    """What all workers know once a step is committed, the same bits for each.

    `squares` is the squared norm of the summed gradients; `losses` has all last stages.
    """

    squares: float
    losses: Sequence[StageLoss]
    num_tokens: int

    @property
    def grad_norm(self) -> float:
        """Global norm of the token-mean gradient, before clipping."""
        return self.squares**0.5 / self.num_tokens

    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return total_loss(self.losses) / self.num_tokens


def total_loss(losses: Iterable[StageLoss]) -> float:
    """The sum over last stages, in double precision, in the order of the stages."""
    return float(np.sum([loss for _, loss in sorted(losses)]))
