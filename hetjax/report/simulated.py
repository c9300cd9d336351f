# SPDX-License-Identifier: Apache-2.0
"""A simulated step as a result: what it says, shows, draws and writes.

Owns that. Does not own the words and figures (`prediction.py`), the drawing
(`timeline.py`) nor the simulation (`schedule/`).
"""

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hetjax.plans.plan import Plan
from hetjax.report.picture import Picture
from hetjax.report.prediction import headline, tables, values, with_prediction
from hetjax.report.timeline import timeline_picture
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulation.spans import simulated_spans
from hetjax.schedule.simulation.trace import Span, perfetto


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One predicted step of a plan: `print(step)`, `step.draw()`.

    Times are seconds; `gap` and `lower_bound_s` are None where no bound is known.
    """

    predicted: Predicted

    @property
    def plan(self) -> Plan:
        """The plan as simulated, with the prediction in it."""
        return with_prediction(self.predicted)

    @property
    def step_time_s(self) -> float:
        return self.predicted.simulation.step_time_s

    @property
    def tokens_per_s(self) -> float:
        return self.predicted.tokens_per_s

    @property
    def lower_bound_s(self) -> float | None:
        return self.predicted.lower_bound_s

    @property
    def gap(self) -> float | None:
        return self.predicted.gap

    def values(self) -> dict[str, Any]:
        """Return all numbers under the names that `simulate --json` gives them."""
        return values(self.predicted)

    def draw(self) -> Picture:
        """Draw what every device does when; BadInput without matplotlib."""
        plan = self.predicted.plan
        title = f"{plan.model}, {plan.schedule}: {headline(self.predicted)}"
        return timeline_picture(self._spans(), plan, self.predicted.costs, title)

    def write_trace(self, path: str | Path) -> None:
        """Write the timeline to open in ui.perfetto.dev."""
        Path(path).write_text(json.dumps(perfetto(self._spans())))

    def _spans(self) -> list[Span]:
        found = self.predicted
        return simulated_spans(found.simulation, found.plan, found.costs, found.tied)

    def __str__(self) -> str:
        return tables(self.predicted)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
