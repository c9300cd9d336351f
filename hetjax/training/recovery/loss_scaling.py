# SPDX-License-Identifier: Apache-2.0
"""Adapts the loss scale, which keeps the gradients of float16 stages representable.

Owns the rule that updates the scale after each step, and its form in checkpoints. The
scale is a power of two, so that it rounds nothing. Does not own where it is multiplied
(`hetjax/stage/`) and divided out (`hetjax/runtime/execution/`).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetjax.cluster.cluster import Cluster
from hetjax.files.tables import read_fields
from hetjax.plans.plan import Plan
from hetjax.runtime.control.recovery_decisions import Restored
from hetjax.runtime.execution.commit import StepCommit

_MOST = 2.0**40  # gradients of float32 stages are scaled too, and squared in float32
_NAME = "loss_scale"  # in the values of a checkpoint besides its arrays


@dataclass(frozen=True, slots=True)
class LossScale:
    """A scale and the step, counted from 0, that it was first used for.

    All steps since then were good: a bad step changes the scale.
    """

    value: float
    since: int

    def after(self, step: int, is_good: bool, growth_interval: int) -> "LossScale":
        """Return the scale of the step after this one.

        It is halved after gradients that are not finite, and doubled after
        `growth_interval` good steps in a row.
        """
        if not is_good:
            return LossScale(self.value / 2, step + 1)
        if step + 1 - self.since >= growth_interval:
            return LossScale(min(2 * self.value, _MOST), step + 1)
        return self


class LossScaling:
    """The scale of a run: `now` is that of its next step, and starts as `first`.

    `precise` returns a plan with the precision of its stages on a cluster.
    """

    def __init__(
        self,
        first: float,
        growth_interval: int,
        precise: Callable[[Cluster, Plan], Plan],
    ) -> None:
        self._first, self._growth_interval = first, growth_interval
        self._precise = precise
        self.now = LossScale(first, 0)

    def scale(self, cluster: Cluster, plan: Plan) -> float | None:
        """Return the scale of the next step; None if no stage is in float16."""
        stages = self._precise(cluster, plan).stages()
        is_needed = any(stage.precision == "float16" for _, _, stage in stages)
        return self.now.value if is_needed else None

    def on_step(self, step: int, commit: StepCommit) -> None:
        """Update the scale after a committed step."""
        if commit.loss_scale is None:  # no stage computes in float16: do not count it
            self.now = LossScale(self.now.value, step + 1)
            return
        is_good = not commit.is_skipped
        self.now = self.now.after(step, is_good, self._growth_interval)

    def on_restored(self, restored: Restored) -> None:
        """Take the scale of a restored state; state from memory has the current one."""
        if _NAME in restored.host:
            fields = read_fields(restored.host[_NAME], LossScale, where=_NAME)
            self.now = LossScale(**fields)
        elif restored.host or not restored.step:
            self.now = LossScale(self._first, restored.step)

    def host_values(self) -> Mapping[str, Any]:
        """Return the current scale as a checkpoint stores it, as JSON values."""
        return {_NAME: asdict(self.now)}
