# SPDX-License-Identifier: Apache-2.0
"""The settings of an optimizer, for all rules.

Owns the settings and their help texts. Does not own which rules there are (`table.py`),
which settings each reads (one file per rule), nor what is allowed (`checks.py`).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """How gradients become updates. Weight decay applies to matrices only."""

    name: str = "adamw"
    """The rule: adamw, adafactor, lion, muon, schedule-free or sgd. It cannot change
    when a run resumes. muon updates the matrices inside blocks, adamw the rest."""
    state_bits: Literal[32, 8] = 32
    """Bits of each moment in the state of adamw, lion and sgd; 8: codes with a scale
    for each row of a matrix. It cannot change when a run resumes."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate from the end of the warm-up to the last step; schedule-free takes
    constant."""
    warmup_steps: int = 100
    """Steps of linear warm-up to the peak, capped at half of all steps."""
    final_fraction: float = 0.1
    """Learning rate of the last step as a fraction of the peak (not for constant)."""
    weight_decay: float = 0.1
    """Weight decay, which is multiplied by the learning rate."""
    beta1: float = 0.9
    """Decay of the mean of gradients (momentum of sgd and muon); adafactor has none.
    For schedule-free: how close to its weight average it evaluates gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients; for lion, of its mean of gradients.
    adafactor derives its own. adamw and muon need at least beta1 squared."""
    clip_norm: float = 1.0
    """Largest global gradient norm; inf: no clipping."""
    ema: float = 0.0
    """Decay of a moving average of the weights, 0.999 for instance, which can be
    exported; 0: no average. It cannot change when a run resumes."""
