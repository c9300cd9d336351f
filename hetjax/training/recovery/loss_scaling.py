# SPDX-License-Identifier: Apache-2.0
"""The factor on the loss that keeps the gradients of float16 stages representable.

Owns the rule by which it follows the steps, and what checkpoints say of it. It is a
power of two, so that it rounds nothing. Does not own where it is multiplied
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
_NAME = "loss_scale"  # in what a checkpoint says besides its arrays


@dataclass(frozen=True, slots=True)
class LossScale:
    """A scale and the step, counted from 0, that it was first used for.

    All steps since then were good: a bad one brings another scale.
    """

    value: float
    since: int

    def after(self, step: int, is_good: bool, growth_interval: int) -> "LossScale":
        """Return what the step after this one is scaled by.

        Half of it after gradients that are not finite, twice it after so many good
        steps in a row.
        """
        if not is_good:
            return LossScale(self.value / 2, step + 1)
        if step + 1 - self.since >= growth_interval:
            return LossScale(min(2 * self.value, _MOST), step + 1)
        return self


class LossScaling:
    """The scale of a run: `now` is that of its next step, and begins with `first`.

    `precise` says what the stages of a plan compute in on a cluster.
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
        """Return what to scale the next step by; None if no stage is in float16."""
        stages = self._precise(cluster, plan).stages()
        is_needed = any(stage.precision == "float16" for _, _, stage in stages)
        return self.now.value if is_needed else None

    def on_step(self, step: int, commit: StepCommit) -> None:
        """Follow a step that was committed."""
        if commit.loss_scale is None:  # no stage computes in float16: none is counted
            self.now = LossScale(self.now.value, step + 1)
            return
        is_good = not commit.is_skipped
        self.now = self.now.after(step, is_good, self._growth_interval)

    def on_restored(self, restored: Restored) -> None:
        """Follow a restored state; what workers had in memory has the present scale."""
        if _NAME in restored.host:
            fields = read_fields(restored.host[_NAME], LossScale, where=_NAME)
            self.now = LossScale(**fields)
        elif restored.host or not restored.step:
            self.now = LossScale(self._first, restored.step)

    def host_values(self) -> Mapping[str, Any]:
        """Return what a checkpoint of now says of it, as JSON values."""
        return {_NAME: asdict(self.now)}
