# SPDX-License-Identifier: Apache-2.0
"""Finding the best plan: templates and copies, places, then the simulator's word.

Owns the order of the search and what is told of it. Does not own templates, copies and
bounds (`master.py`), places (`placement.py`), moves (`polish.py`) nor the judge
(`judge.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from hetjax.planner.objectives import Objective
from hetjax.planner.request import Request
from hetjax.schedule.predicted import Predicted

Progress = Callable[[str], None]  # told what is being done, a line at a time


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan as simulated, and what is known about better ones.

    `model_time_s` is the planner's own estimate of the plan that it began with,
    `model_bound_s` the bound by the same estimate. `lower_bound_s` is certified: no
    plan of the request's space simulates faster (1F1B family, fused backward, no
    interleaving, the modelled costs).
    """

    request: Request
    objective: Objective
    best: Predicted
    source: str  # which part of the search gave the plan
    lower_bound_s: float
    model_time_s: float | None
    model_bound_s: float | None
    search_s: float

    @property
    def model_gap(self) -> float | None:
        """How far the model's plan is above the model's bound, as a share of it."""
        if self.model_time_s is None or self.model_bound_s is None:
            return None
        return self.model_time_s / self.model_bound_s - 1

    @property
    def gap(self) -> float:
        """How far the simulated step is above the certified bound."""
        return max(self.best.simulation.step_time_s / self.lower_bound_s - 1, 0.0)


def find_plan(
    request: Request,
    objective: Objective | None = None,
    *,
    progress: Progress | None = None,
) -> Found:
    """Return the best plan that is found.

    NoFeasiblePlan names what binds, and the smallest change that would help.
    """
    raise NotImplementedError
