# SPDX-License-Identifier: Apache-2.0
"""A search as a result: the plan that was found, and how others would have planned.

Owns what results say, show, draw and write. Does not own the words and figures
(`plan_tables.py`, `plan_html.py`), the drawing (`layout.py`) nor the search
(`planner/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.planner.search.comparison import Planned
from hetjax.plans.plan import Plan
from hetjax.plans.table import aligned, html_table
from hetjax.report.layout import layout_picture
from hetjax.report.picture import Picture
from hetjax.report.plan_html import page, pictures, write_report
from hetjax.report.plan_rows import BASELINES, baseline_rows, planners, step_line
from hetjax.report.plan_tables import plan_of, plan_values, tables
from hetjax.report.simulated import SimulatedStep

Ended = Literal["interrupted", "search_s"]


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """The best plan that was found: `print(found)`, `found.draw()`, `found.plan`.

    `ended` says what ended the search before it was done, None if nothing did.
    """

    planned: Planned
    ended: Ended | None = None

    @property
    def plan(self) -> Plan:
        """The plan, with the prediction and the certified bound in it."""
        return plan_of(self.planned)

    @property
    def step(self) -> SimulatedStep:
        """One simulated step of the plan."""
        return SimulatedStep(self.planned.best)

    @property
    def step_time_s(self) -> float:
        return self.planned.best.simulation.step_time_s

    @property
    def tokens_per_s(self) -> float:
        return self.planned.best.tokens_per_s

    @property
    def lower_bound_s(self) -> float | None:
        """No plan of the choices has a shorter step; None where none is known."""
        return self.planned.found.lower_bound_s

    @property
    def gap(self) -> float | None:
        """How far the step is above the bound, as a share of it."""
        return self.planned.found.gap

    def values(self) -> dict[str, Any]:
        """Return all numbers under the names that `plan --json` gives them."""
        return plan_values(self.planned) | {"ended": self.ended}

    def draw(self) -> Picture:
        """Draw which node holds which layers; BadInput without matplotlib."""
        plan = self.plan
        title = f"{plan.model}, {plan.schedule}: {step_line(self.planned.best)}"
        return layout_picture(plan, self.planned.request.cluster, title)

    def write_report(self, path: str | Path, command: str = "") -> None:
        """Write one page of HTML; `command` is what made it."""
        write_report(Path(path), self.planned, command)

    def __str__(self) -> str:
        return tables(self.planned)

    def _repr_html_(self) -> str:
        """The page of the report, in a frame of its own for the sake of its style."""
        try:
            drawn = pictures(self.planned)
        except BadInput:  # matplotlib is missing
            return f"<pre>{escape(str(self))}</pre>"
        content = escape(page(self.planned, "", *drawn))
        return f'<iframe srcdoc="{content}" width="100%" height="600"></iframe>'


@dataclass(frozen=True, slots=True)
class ComparedPlanners:
    """What several planners make of the same request, on the same simulator."""

    planned: Planned

    @property
    def steps(self) -> Mapping[str, SimulatedStep]:
        """A simulated step of each planner that found a plan; ours is "hetjax"."""
        return {
            name: SimulatedStep(judged)
            for name, judged, _ in planners(self.planned)
            if not isinstance(judged, NoFeasiblePlan)
        }

    @property
    def best(self) -> FoundPlan:
        """Our own plan, with all that is known of it."""
        return FoundPlan(self.planned)

    def __str__(self) -> str:
        return "\n".join(aligned(BASELINES, baseline_rows(self.planned)))

    def _repr_html_(self) -> str:
        return "\n".join(html_table(BASELINES, baseline_rows(self.planned)))
