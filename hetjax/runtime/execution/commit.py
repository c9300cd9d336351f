# SPDX-License-Identifier: Apache-2.0
"""Defines the outcome of a step, which all its workers know at NORM.

Owns the commit and what follows from it alone. Does not own the agreement on it
(`gradient_sync.py`) nor its consequences.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.plans.plan import StageKey
from hetjax.runtime.execution.checking.checks import Disagreement

StageLoss = tuple[StageKey, float]  # summed over the microbatches of a last stage


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommit:
    """The outcome of a committed step, the same bits on all workers.

    `num_tokens` is the number of targets of the whole batch that count. `squares` is
    the squared norm of the summed gradients, unscaled; UPDATE's gradients still have
    the factor `loss_scale` if it is set. `losses` has all last stages. `is_finite` says
    whether the weights before the step are finite. `disagreements` says where holders'
    bits differ, if they were compared. `is_left_out` steps are skipped without being
    computed.
    """

    squares: float
    losses: Sequence[StageLoss]
    num_tokens: int
    loss_scale: float | None = None
    most_loss: float | None = None
    skips_spikes: bool = False
    is_finite: bool = True
    disagreements: Sequence[Disagreement] = ()
    is_left_out: bool = False

    @property
    def is_skipped(self) -> bool:
        """Whether UPDATE changes nothing but step counters."""
        if self.is_left_out or not math.isfinite(self.squares):
            return True
        return self.skips_spikes and self.is_spike

    @property
    def is_spike(self) -> bool:
        """Whether the loss is beyond `most_loss`."""
        if self.is_left_out or self.most_loss is None:
            return False
        return self.loss() > self.most_loss

    @property
    def grad_norm(self) -> float:
        """Global norm of the token-mean gradient, before clipping."""
        return self.squares**0.5 / self.num_tokens

    def loss(self) -> float:
        """Return the mean cross-entropy in nats per token."""
        return total_loss(self.losses) / self.num_tokens


def total_loss(losses: Iterable[StageLoss]) -> float:
    """Return the sum over last stages, in double precision, in order of the stages."""
    return float(np.sum([loss for _, loss in sorted(losses)]))
