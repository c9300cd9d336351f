# SPDX-License-Identifier: Apache-2.0
"""Weighs another plan against the current one for a run in which something is slow.

Owns how much faster it is predicted to be, and how certain that is. Errors that affect
both plans alike cancel. The error of a slow node's factor counts as far as the two
plans depend on it differently. Does not own the search (`planner/search/replan.py`),
the requests (`weighing_process.py`) nor whether to move
(`costs/certainty/worth_moving.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.beliefs import CredibleInterval
from hetjax.costs.slowness.known import Slowness
from hetjax.models.model import Model
from hetjax.plans.plan import Plan
from hetjax.schedule.certainty import Certainty, CostsOn
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulated import simulated
from hetjax.training.layout.plan_choice import searched_again
from hetjax.training.observers.step_comparison import predict_at
from hetjax.training.settings.config import RunConfig

# Error of the logarithm of a factor under another plan: a node is only about as slow at
# other work; throttled memory, for example, affects matrix products differently
OTHER_WORK = 0.05
# Error of the logarithm of a ratio of step times that remains once all modelled errors
# cancel: measured in two of our runs
NOT_MODELLED = 0.03
_STEP = 1.25  # by which factors are varied

Errors = Mapping[str, float]  # of the logarithms of slow nodes' factors


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """The best other `plan`: current steps take `gain` times as long as its steps.

    `present_s` and `other_s` are the two predicted step times. After `move_s` the state
    is where the plan needs it.
    """

    plan: Plan
    gain: CredibleInterval
    present_s: float
    other_s: float
    move_s: float


def weigh(
    config: RunConfig,
    model: Model,
    cluster: Cluster,
    current: Plan,
    slow: Slowness,
    errors: Errors,
    horizon_s: float,
) -> Weighed | None:
    """Search for another plan; return how it compares, or None if it is no better.

    None for planner even, which ignores speeds. Raises BadInput and NoFeasiblePlan as
    any prediction does.
    """
    if config.planner == "even":
        return None
    plan, move_s = searched_again(config, model, cluster, current, slow, horizon_s)
    plans = [_Weighing(config, model, cluster, slow, each) for each in (current, plan)]
    present, other = plans
    if other.step_s >= present.step_s:
        return None
    gain = present.certainty.ratio(other.certainty).widened(NOT_MODELLED)
    for node, factor in slow.nodes:
        slope = present.slope(node, factor) - other.slope(node, factor)
        gain = gain.widened(slope * math.hypot(errors.get(node, 0.1), OTHER_WORK))
    return Weighed(
        plan=plan,
        gain=gain,
        present_s=present.step_s,
        other_s=other.step_s,
        move_s=move_s,
    )


class _Weighing:
    """A plan's predicted step on a cluster in which something is slow."""

    def __init__(
        self,
        config: RunConfig,
        model: Model,
        cluster: Cluster,
        slow: Slowness,
        plan: Plan,
    ) -> None:
        found = predict_at(config, model, plan, cluster, slow)
        self._predicted: Predicted = found.predicted
        self._costs_on: CostsOn = found.costs_on
        self._slow, self._usual = slow, found.calibration.applied(cluster)
        self.certainty: Certainty = found.certainty

    @property
    def step_s(self) -> float:
        return self._predicted.simulation.step_time_s

    def slope(self, node: str, factor: float) -> float:
        """Return d log(time) / d log(factor) of a node that is slow."""
        slow_s, fast_s = (
            self._on({**dict(self._slow.nodes), node: factor * by})
            for by in (_STEP, 1 / _STEP)
        )
        return math.log(slow_s / fast_s) / (2 * math.log(_STEP))

    def _on(self, factors: Mapping[str, float]) -> float:
        there = replace(self._slow, nodes=tuple(factors.items())).applied(self._usual)
        predicted = self._predicted
        costs = self._costs_on(there)
        return simulated(predicted.plan, costs, predicted.tied).step_time_s
