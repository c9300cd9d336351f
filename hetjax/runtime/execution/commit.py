# SPDX-License-Identifier: Apache-2.0
"""What a step has come to, which all its workers know at NORM.

Owns the commit and what follows from it alone. Does not own how it is agreed on
(`gradient_sync.py`) nor what is done about it.
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
    """What all workers know once a step is committed, the same bits for each.

    `num_tokens` are the targets of the whole batch that count, `squares` is the squared
    norm of the summed gradients, which UPDATE finds multiplied by `loss_scale`, if that
    is there; `losses` has all last stages. Of the weights that the step began with
    `is_finite` says whether they are, `disagreements` where holders have unlike bits,
    if they were compared. What `is_left_out` was decided before it was computed.
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
        """Whether UPDATE does nothing."""
        if self.is_left_out or not math.isfinite(self.squares):
            return True
        return self.skips_spikes and self.is_spike

    @property
    def is_spike(self) -> bool:
        """Whether the loss is beyond what was said to be the most."""
        if self.is_left_out or self.most_loss is None:
            return False
        return self.loss() > self.most_loss

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
