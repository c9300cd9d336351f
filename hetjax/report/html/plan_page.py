# SPDX-License-Identifier: Apache-2.0
"""Makes the page of a plan that was found.

Owns its order and its headline numbers. Does not own the words and figures
(`plan_rows.py`), what is shown of any plan (`plan_view.py`) nor how it looks
(`templates/plan.html`).
"""

from collections.abc import Iterator

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.search.comparison import Planned
from hetjax.report.html.pages import page
from hetjax.report.html.plan_view import plan_view
from hetjax.report.metrics import ms
from hetjax.report.plans.assumed_links import link_lines
from hetjax.report.plans.binding import binding, binding_line
from hetjax.report.plans.plan_rows import (
    BASELINES,
    CHANGES,
    WISHES,
    change_rows,
    dtype_lines,
    hours_line,
    mfu_of,
    num_devices,
    planner_row,
    planners,
    search_lines,
    sure_lines,
    warning_lines,
    wish_rows,
)
from hetjax.report.plans.step_rows import Row
from hetjax.report.plans.worth_rows import (
    PARTS,
    idle_lines,
    part_notes,
    part_rows,
)


def plan_page(planned: Planned, command: str = "") -> str:
    """Return the page; `command` is the command that made the plan."""
    best, cluster = planned.best, planned.request.cluster
    return page(
        "plan.html",
        title=f"Plan for {best.plan.model} on {cluster.name}",
        subtitle=[best.plan.title, f"times: {best.times_from}"],
        command=command,
        figures=list(_figures(planned)),
        warnings=list(warning_lines(planned)),
        sentences=[
            *sure_lines(planned),
            hours_line(planned),
            *search_lines(planned),
            binding_line(binding(best)),
            *link_lines(cluster),
        ],
        idle=[*idle_lines(planned), *dtype_lines(planned)],
        plan=plan_view(best.plan, cluster, best),
        parts_header=PARTS,
        parts_rows=part_rows(planned),
        parts_notes=part_notes(planned),
        runners_up_header=BASELINES[:-1],
        runners_up=list(_runners_up(planned)),
        wishes_header=WISHES,
        wishes=wish_rows(planned),
        changes_header=CHANGES,
        changes=change_rows(planned),
    )


def _figures(planned: Planned) -> Iterator[tuple[str, str | None]]:
    """Yield the headline numbers; None for an unknown one."""
    best, found = planned.best, planned.found
    least_s, gap, usd = found.lower_bound_s, found.gap, best.usd_per_million_tokens
    yield "step time", f"{ms(best.simulation.step_time_s)} ms"
    yield "tokens/s", f"{best.tokens_per_s:,.0f}"
    yield "USD per million tokens", None if usd is None else f"{usd:.3g}"
    mfu = mfu_of(planned)
    yield "MFU", None if mfu is None else f"{mfu:.1%}"
    yield "lower bound", None if least_s is None else f"{ms(least_s)} ms"
    yield "gap to the bound", None if gap is None else f"{gap:.1%}"
    if planned.objective.wish == "cost":
        cost_gap = found.cost_gap
        yield "cost gap", None if cost_gap is None else f"{cost_gap:.1%}"
    yield "bubble", f"{best.simulation.bubble:.1%}"
    yield (
        "devices",
        f"{num_devices(best.plan)} of {planned.request.cluster.num_devices}",
    )


def _runners_up(planned: Planned) -> Iterator[tuple[Row, float]]:
    """Yield rows of plans, with the step time of each as a share of the longest."""
    found = planners(planned)
    if planned.second is not None:
        ours = [("hetjax", planned.best, f"from {planned.found.source}")]
        second = ("hetjax, second", planned.second, "the best with another layout")
        found = [*(found[:1] or ours), second, *found[1:]]
    times_s = [
        0.0 if isinstance(judged, NoFeasiblePlan) else judged.simulation.step_time_s
        for _, judged, _ in found
    ]
    longest_s = max(times_s, default=0.0) or 1.0
    for row, time_s in zip(found, times_s, strict=True):
        yield planner_row(planned, *row), time_s / longest_s
