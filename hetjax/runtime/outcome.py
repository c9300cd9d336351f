# SPDX-License-Identifier: Apache-2.0
"""What is known of a committed step, to its workers and to whoever asked for it.

Owns the values alone. Does not own how they come about (`meeting.py`, `worker.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.plans.plan import StageKey

StageLoss = tuple[StageKey, float]  # summed over the microbatches of a last stage


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommit:
    """What all workers know once a step is committed.

    `squares` is the squared norm of the summed gradients; `losses` has all last stages.
    """

    squares: float
    losses: Sequence[StageLoss]

    def outcome(self, num_tokens: int) -> "StepOutcome":
        """The step as its caller sees it, of a batch of so many tokens."""
        return StepOutcome(
            grad_norm=self.squares**0.5 / num_tokens,
            loss_sum=total_loss(self.losses),
            num_tokens=num_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """A committed step; `grad_norm` is of the token mean, before clipping."""

    grad_norm: float
    loss_sum: float
    num_tokens: int

    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return self.loss_sum / self.num_tokens


def total_loss(losses: Iterable[StageLoss]) -> float:
    """The sum over last stages, in double precision, in the order of the stages."""
    return float(np.sum([loss for _, loss in sorted(losses)]))
