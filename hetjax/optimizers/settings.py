# SPDX-License-Identifier: Apache-2.0
"""The settings of an optimizer, for all rules.

Owns the settings and their help texts. Does not own which rules there are (`table.py`),
which settings each reads (one file per rule), nor what is allowed (`checks.py`).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """How gradients become updates; matrices decay, not biases and norms."""

    name: str = "adamw"
    """The rule: adamw, adafactor, lion, muon, schedule-free or sgd. A run keeps the one
    that it began with, as it has the state for it. muon is for matrices inside blocks,
    and the rest are adamw's."""
    state_bits: Literal[32, 8] = 32
    """Bits of each moment in the state of adamw, lion and sgd: 8 for codes with a scale
    for each row of a matrix. A run keeps those that it began with."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate from the end of the warm-up to the last step;
    constant for schedule-free."""
    warmup_steps: int = 100
    """Steps of linear rise to the peak, but at most half of all steps."""
    final_fraction: float = 0.1
    """Learning rate of the last step as a fraction of the peak (not for constant)."""
    weight_decay: float = 0.1
    """Weight decay, which is multiplied by the learning rate."""
    beta1: float = 0.9
    """Decay of the mean of gradients (momentum of sgd and muon); adafactor has none. Of
    schedule-free: how near to its average of weights gradients are taken."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients; of lion: of its mean of gradients.
    adafactor has a course of its own. adamw and muon need beta1 squared or more."""
    clip_norm: float = 1.0
    """Limit of the global gradient norm; inf for none."""
    ema: float = 0.0
    """Decay of an average of the weights, as in 0.999, which is kept beside them and
    can be exported; 0: none. A run keeps the one that it began with."""
