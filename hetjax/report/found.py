# SPDX-License-Identifier: Apache-2.0
"""Defines the results of a search: the plan that was found, and other planners' plans.

Owns what results say, show, draw and write: the order of the tables, the bars of text
and the keys of JSON. Does not own the words and figures (`plan_rows.py`), the page
(`html/plan_page.py`), the drawing (`pictures/layout.py`) nor the search (`planner/`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetjax.errors import NoFeasiblePlan
from hetjax.files.parsing import json_value
from hetjax.files.writing import write_whole
from hetjax.planner.model.objectives import expected_goodput
from hetjax.planner.model.seating import idle_devices
from hetjax.planner.search.comparison import Planned
from hetjax.planner.search.find import Found
from hetjax.planner.search.idle import Idle
from hetjax.planner.search.worth import Instead, Worth
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import plan_json
from hetjax.plans.table import aligned, html_table
from hetjax.report.html.pages import framed
from hetjax.report.html.plan_page import plan_page
from hetjax.report.pictures.layout import layout_picture
from hetjax.report.pictures.picture import Picture
from hetjax.report.plans.binding import binding
from hetjax.report.plans.plan_rows import (
    BASELINES,
    CHANGES,
    WISHES,
    baseline_rows,
    change_rows,
    num_devices,
    planners,
    sentences,
    step_line,
    warning_lines,
    wish_rows,
)
from hetjax.report.plans.step_rows import (
    MemoryBar,
    memory_bars,
    stage_header,
    stage_rows,
)
from hetjax.report.plans.worth_rows import PARTS, part_notes, part_rows
from hetjax.report.prediction import SimulatedStep, found_plan
from hetjax.schedule.predicted import Predicted

Ended = Literal["interrupted", "search_s", "search_work"]
_BAR = 40  # width in letters
_LETTERS = {"static": "#", "residuals": "=", "activations": "+", "workspace": "-"}


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """The best plan that was found: `print(found)`, `found.draw()`, `found.plan`.

    `ended` is what ended the search early, or None. After a time limit, `search_work`
    makes another search end at the same point.
    """

    planned: Planned
    ended: Ended | None = None
    search_work: tuple[int, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan, with its prediction and the certified bound."""
        return found_plan(self.planned.found)

    @property
    def step(self) -> SimulatedStep:
        """One simulated step of the plan."""
        return SimulatedStep(self.planned.best, lambda: self.planned.certainty)

    @property
    def step_time_s(self) -> float:
        return self.planned.best.simulation.step_time_s

    @property
    def tokens_per_s(self) -> float:
        return self.planned.best.tokens_per_s

    @property
    def lower_bound_s(self) -> float | None:
        """The lower bound on the step of any plan of the choices; None if unknown."""
        return self.planned.found.lower_bound_s

    @property
    def gap(self) -> float | None:
        """The excess of the step over the bound, as a share of the bound."""
        return self.planned.found.gap

    def values(self) -> dict[str, Any]:
        """Return all numbers under the names that `plan --json` gives them."""
        planned, best = self.planned, self.planned.best
        cluster, found, bound = planned.request.cluster, planned.found, binding(best)
        alone = planned.alone
        values = self.step.values() | {
            "cluster": cluster.name,
            "objective": planned.objective.wish,
            "goodput": expected_goodput(best, cluster, planned.objective),
            "usd_per_hour": best.usd_per_hour,
            "lower_bound_s": found.lower_bound_s,
            "gap": found.gap,
            "h1f1b_step_time_s": found.best_h1f1b.simulation.step_time_s,
            "h1f1b_lower_bound_s": found.whole_bound.step_s,
            "h1f1b_gap": found.whole_gap,
            "lower_bound_without_interleaving_s": found.split_bound
            and found.split_bound.step_s,
            "least_usd_per_million_tokens": found.least_usd,
            "cost_gap": found.cost_gap,
            "why_no_bound": found.bound.why or None,
            "model_time_s": found.model_time_s,
            "model_bound_s": found.model_bound_s,
            "model_gap": found.model_gap,
            "gradient_wire": planned.request.gradient_wire,
            "bfloat16_step_time_s": planned.bfloat16_step_s,
            "source": found.source,
            "step_time_alone_s": None
            if isinstance(alone, NoFeasiblePlan)
            else alone.best.simulation.step_time_s,
            "search_s": found.search_s,
            "cut_short": planned.cut_short,
            "left_out": list(planned.left_out),
            "binds": {
                "what": bound.what,
                "busiest": bound.busiest,
                "busy_share": bound.busy_share,
                "waiting_share": bound.waiting_share,
                "link": bound.link,
                "link_share": bound.link_share,
                "tight_devices": list(bound.tight_devices),
            },
            "idle_devices": {
                name: list(devices)
                for name, devices in idle_devices(best.plan, cluster).items()
            },
            "idle": [_idle_values(idle) for idle in planned.idle],
            "parts": [_worth_values(worth) for worth in planned.parts],
            "plan": json_value(plan_json(self.plan), finite=False),
        }
        return (
            values
            | _answers(planned)
            | {
                "ended": self.ended,
                "search_work": list(self.search_work),
            }
        )

    def draw(self) -> Picture:
        """Draw which node holds which layers; BadInput without matplotlib."""
        plan = self.plan
        title = f"{plan.model}, {plan.schedule}: {step_line(self.planned.best)}"
        return layout_picture(plan, self.planned.request.cluster, title)

    def write_report(self, path: str | Path, command: str = "") -> None:
        """Write one page of HTML; `command` is the command that made it."""
        write_whole(Path(path), plan_page(self.planned, command))

    def __str__(self) -> str:
        planned = self.planned
        lines = [planned.best.plan.title, f"times: {planned.best.times_from}"]
        lines += [*warning_lines(planned), ""]
        rows = stage_rows(planned.best, planned.request.cluster)
        lines += [*aligned(stage_header(planned.best.plan), rows), ""]
        lines += [*_memory(planned), ""]
        lines += [step_line(planned.best), *sentences(planned)]
        if planned.parts:
            parts = aligned(PARTS, part_rows(planned))
            lines += ["", *parts, *part_notes(planned)]
        rest = (
            (BASELINES, baseline_rows(planned)),
            (WISHES, wish_rows(planned)),
            (CHANGES, change_rows(planned)),
        )
        for header, rows in rest:
            if rows:
                lines += ["", *aligned(header, rows)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the page of the report."""
        return framed(plan_page(self.planned))


@dataclass(frozen=True, slots=True)
class ComparedPlanners:
    """The plans of several planners for the same request, on the same simulator."""

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
        """Our own plan, with all that is known about it."""
        return FoundPlan(self.planned)

    def __str__(self) -> str:
        return "\n".join(aligned(BASELINES, baseline_rows(self.planned)))

    def _repr_html_(self) -> str:
        return html_table(BASELINES, baseline_rows(self.planned))


def _answers(planned: Planned) -> dict[str, Any]:
    """Return what was requested besides the plan."""
    values: dict[str, Any] = {}
    if planned.moved is not None:
        values["moved_bytes"] = planned.moved.moved_bytes
        values["move_s"] = planned.moved.move_s
    if planned.baselines is not None:
        values["baselines"] = {
            name: _judged_values(judged) for name, judged in planned.baselines.items()
        }
    if planned.pareto:
        values["pareto"] = {
            found.objective.wish: _wish_values(found) for found in planned.pareto
        }
    if planned.what_if:
        values["what_if"] = {
            name: {
                "step_time_s": best and best.simulation.step_time_s,
                "tokens_per_s": best and best.tokens_per_s,
            }
            for name, best in planned.what_if.items()
        }
    return values


def _idle_values(idle: Idle) -> dict[str, Any]:
    """Return the idle devices of a kind, and the best plan with more of the kind."""
    instead = idle.instead
    return {
        "kind": idle.node_class,
        "devices": {name: list(devices) for name, devices in idle.devices.items()},
        "worse": idle.worse,
        "searched": idle.is_searched,
        "instead": None if instead is None else _judged_values(instead),
    }


def _worth_values(worth: Worth) -> dict[str, Any]:
    """Return the best plans without a part, and on that part alone."""
    return {
        "part": worth.part,
        "devices": worth.num_devices,
        "used": worth.num_used,
        "without": _instead_values(worth.without),
        "alone": _instead_values(worth.alone),
    }


def _instead_values(instead: Instead | None) -> dict[str, Any] | None:
    if instead is None:
        return None
    judged = _judged_values(instead.predicted)
    return judged | {"worse": instead.worse, "searched": instead.is_searched}


def _judged_values(judged: Predicted | NoFeasiblePlan) -> dict[str, Any]:
    if isinstance(judged, NoFeasiblePlan):
        return {"step_time_s": None, "why": judged.got}
    return {
        "step_time_s": judged.simulation.step_time_s,
        "tokens_per_s": judged.tokens_per_s,
        "usd_per_million_tokens": judged.usd_per_million_tokens,
        "num_devices": num_devices(judged.plan),
        "plan": json_value(plan_json(SimulatedStep(judged).plan), finite=False),
    }


def _wish_values(found: Found) -> dict[str, Any]:
    best = found.best
    return _judged_values(best) | {
        "usd_per_hour": best.usd_per_hour,
        "goodput": expected_goodput(best, found.request.cluster, found.objective),
        "gap": found.gap,
        "cost_gap": found.cost_gap,
        "plan": json_value(plan_json(found_plan(found)), finite=False),
    }


def _memory(planned: Planned) -> Iterator[str]:
    """Yield the legend of the bars, then the bars."""
    legend = ", ".join(f"{letter} {part}" for part, letter in _LETTERS.items())
    bars = memory_bars(planned.best, planned.request.cluster)
    rows = [(bar.name, f"|{bar_letters(bar)}|", bar.label) for bar in bars]
    yield from aligned(("memory", legend, ""), rows)


def bar_letters(bar: MemoryBar, width: int = _BAR) -> str:
    """Return a bar of text; each part ends where the sum of parts rounds to."""
    letters, held = "", 0
    for part, size in bar.parts.items():
        held += size
        end = math.floor(width * held / bar.scale_bytes + 0.5)
        letters += _LETTERS[part] * (min(end, width) - len(letters))
    return letters.ljust(width, ".")
