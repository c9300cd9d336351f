# SPDX-License-Identifier: Apache-2.0
"""Collects what a page shows of any plan: its layout, a step, memory and stages.

Owns also what is shown without a prediction, as for a run whose devices are unknown.
Does not own the parts (`layout_rows.py`, `timeline_view.py`, `step_rows.py`) nor how
they look (`templates/parts.html`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.report.colours import MEMORY
from hetjax.report.html.timeline_view import TimelineView, timeline_view
from hetjax.report.layout_rows import Layout, layout_of
from hetjax.report.plans.step_rows import (
    MemoryBar,
    Row,
    memory_bars,
    stage_header,
    stage_rows,
)
from hetjax.schedule.predicted import Predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanView:
    """A plan as a template shows it.

    `memory` has name, shares and words of each bar; bars of one kind of device are
    neighbours. `kinds` is the kind by the name of a bar.
    """

    layout: Layout
    timeline: TimelineView | None
    memory: Sequence[tuple[str, Mapping[str, float], str]]
    memory_legend: Sequence[str]
    kinds: Mapping[str, str]
    stage_header: Row
    stages: Sequence[Row]


def plan_view(plan: Plan, cluster: Cluster, predicted: Predicted | None) -> PlanView:
    """Return all that is shown of a plan, and of its prediction if there is one."""
    known = predicted is not None
    bars = memory_bars(predicted, cluster) if known else []
    return PlanView(
        layout=layout_of(plan, cluster),
        timeline=timeline_view(predicted, cluster) if known else None,
        memory=[_bar(bar) for bar in bars],
        memory_legend=tuple(MEMORY),
        kinds={bar.name: bar.kind for bar in bars},
        stage_header=stage_header(plan) if known else plan.columns,
        stages=stage_rows(predicted, cluster) if known else plan.rows(),
    )


def _bar(bar: MemoryBar) -> tuple[str, Mapping[str, float], str]:
    scale = bar.scale_bytes or 1.0
    shares = {part: size / scale for part, size in bar.parts.items()}
    return bar.name, shares, bar.label
