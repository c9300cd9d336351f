# SPDX-License-Identifier: Apache-2.0
"""What a page shows of any plan: its layout, a step, memory and stages.

Owns what there is without a prediction, too: of a run whose devices nobody describes,
say. Does not own the parts (`layout_rows.py`, `timeline_view.py`, `step_rows.py`) nor
how they look (`templates/parts.html`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.report.html.timeline_view import TimelineView, timeline_view
from hetjax.report.layout_rows import Layout, layout_of
from hetjax.report.step_rows import (
    MemoryBar,
    Row,
    memory_bars,
    stage_header,
    stage_rows,
)
from hetjax.schedule.predicted import Predicted

_MEMORY = ("static", "residuals", "activations", "workspace")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanView:
    """A plan as a template shows it; `memory` has name, shares and words of bars."""

    layout: Layout
    timeline: TimelineView | None
    memory: Sequence[tuple[str, Mapping[str, float], str]]
    memory_legend: Sequence[str]
    stage_header: Row
    stages: Sequence[Row]


def plan_view(plan: Plan, cluster: Cluster, predicted: Predicted | None) -> PlanView:
    """Return all that is shown of a plan, with what is predicted of it if anything."""
    known = predicted is not None
    return PlanView(
        layout=layout_of(plan, cluster),
        timeline=timeline_view(predicted, cluster) if known else None,
        memory=[_bar(bar) for bar in memory_bars(predicted)] if known else (),
        memory_legend=_MEMORY,
        stage_header=stage_header(plan) if known else plan.columns,
        stages=stage_rows(predicted, cluster) if known else plan.rows(),
    )


def _bar(bar: MemoryBar) -> tuple[str, Mapping[str, float], str]:
    scale = bar.scale_bytes or 1.0
    shares = {part: size / scale for part, size in bar.parts.items()}
    return bar.name, shares, bar.told
