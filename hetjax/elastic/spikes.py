# SPDX-License-Identifier: Apache-2.0
"""When a loss is a spike: beyond a multiple of the median of those before it.

Owns this rule, a function of losses alone. Does not own what follows from a spike
(`hetjax/training/loop.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeRule:
    """`factor` times the median of the last `window` losses is no spike yet."""

    factor: float
    window: int

    def most(self, losses: Sequence[float]) -> float | None:
        """The largest loss that is none after these, oldest first.

        None while there are fewer than half a window: nobody knows what is usual.
        """
        recent = losses[-self.window :]
        if 2 * len(recent) < self.window:
            return None
        return self.factor * median(recent)
