# SPDX-License-Identifier: Apache-2.0
"""Decides what each step of a run is checked for, and which steps are left out.

Owns the rule for spikes, a function of the last losses, and the steps that are left out
after a spike. Does not own the checks themselves (`hetjax/runtime/execution/`) nor what
follows from them (`hetjax/training/loop.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hetjax.runtime.control.recovery_decisions import Restored
from hetjax.runtime.execution.checking.checks import StepChecks
from hetjax.runtime.execution.commit import StepCommit


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeRule:
    """A loss is a spike above `factor` times the median of the last `window` losses."""

    factor: float
    window: int

    def most(self, losses: Sequence[float]) -> float | None:
        """Return the largest loss that is no spike after these losses, oldest first.

        None while there are fewer than half a window: these do not show what is usual.
        """
        recent = losses[-self.window :]
        if 2 * len(recent) < self.window:
            return None
        return self.factor * median(recent)


class StepChecking:
    """The checks of a run; `losses` are those known so far, by step counted from 0.

    Holders compare digests at every step whose number `digest_every` divides, and at
    the last step before a save (`save_every`); never if `digest_every` is 0.
    """

    def __init__(
        self,
        rule: SpikeRule,
        losses: Mapping[int, float],
        *,
        digest_every: int = 0,
        save_every: int = 0,
        skips_spikes: bool = False,
    ) -> None:
        self._rule, self._losses = rule, dict(losses)
        self._digest_every, self._save_every = digest_every, save_every
        self._skips_spikes = skips_spikes
        self._left_out = set[int]()

    @property
    def compares(self) -> bool:
        """Whether holders of the same layers compare their state."""
        return bool(self._digest_every)

    def checks(self, step: int) -> StepChecks:
        """Return what this step, counted from 0, is checked for."""
        before = [self._losses[s] for s in sorted(self._losses) if s < step]
        return StepChecks(
            most_loss=self._rule.most(before),
            skips_spikes=self._skips_spikes,
            digests=self._compares_at(step),
        )

    def _compares_at(self, step: int) -> bool:
        if not self.compares:
            return False
        is_saved = bool(self._save_every) and (step + 1) % self._save_every == 0
        return is_saved or step % self._digest_every == 0

    def on_step(self, step: int, commit: StepCommit) -> None:
        """Keep the loss of a committed step, unless the step changed nothing."""
        if not commit.is_skipped and math.isfinite(commit.loss()):
            self._losses[step] = commit.loss()
        for old in [s for s in self._losses if s < step - self._rule.window]:
            del self._losses[old]

    def on_restored(self, restored: Restored) -> None:
        """Forget the losses of steps after a restored state."""
        self._losses = {s: x for s, x in self._losses.items() if s < restored.step}

    def leave_out(self, steps: range) -> None:
        """Leave these steps out when they come."""
        self._left_out.update(steps)

    def is_left_out(self, step: int) -> bool:
        return step in self._left_out
