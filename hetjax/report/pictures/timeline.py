# SPDX-License-Identifier: Apache-2.0
"""Draws a step: one row per device, time in milliseconds along it.

Owns the drawing with matplotlib, for print: idle time, names, and the numbers of
microbatches where they fit. Does not own what is drawn (`timeline_bars.py`) nor the
timeline of the report (`html/pages.py`).
"""

from collections.abc import Iterable
from typing import Any

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.report.colours import WORK
from hetjax.report.pictures.picture import (
    EDGE,
    GREY,
    IDLE,
    STYLE,
    Picture,
    draw_legend,
    lighter,
    matplotlib_module,
    new_figure,
    patch,
    titled_axes,
)
from hetjax.report.timeline_bars import (
    FILLED,
    GAP,
    HEADING,
    STRIP,
    Bar,
    Row,
    bars_of,
    layers_label,
    rows_of,
)
from hetjax.schedule.simulation.trace import Span

_BAND = "#f0f0f0"
_MOST_INCHES = 12.0
_WIDTH_POINTS = 8.2 * 72  # of the axes, approximately
_ROW_INCHES = 0.34
_NUMBER_POINTS = 7.0


def timeline_picture(
    spans: Iterable[Span], plan: Plan, costs: Costs, title: str
) -> Picture:
    """Draw the spans of one step. Raises BadInput if matplotlib is not installed."""
    with matplotlib_module().rc_context(STYLE):
        return Picture(_figure(list(spans), plan, costs, title))


def _figure(spans: list[Span], plan: Plan, costs: Costs, title: str) -> Any:
    rows = rows_of(spans, plan, range(len(plan.replicas)))
    step_ms = 1e3 * max((span.end_s for span in spans), default=0.0) or 1.0
    height = min(_ROW_INCHES * rows[-1].end + 1.2, _MOST_INCHES)
    figure = new_figure(height)
    axes = titled_axes(figure, title)
    axes.set_xlim(0, step_ms)
    axes.set_ylim(rows[-1].end + GAP, -HEADING if len(plan.replicas) > 1 else 0)
    axes.set_xlabel("time (ms)", fontsize=9)
    axes.tick_params(labelsize=8, left=False)
    axes.spines[["left", "right", "top"]].set_visible(False)
    for row in rows:
        _draw_idle(axes, row, step_ms)
    bars = bars_of(spans, rows, costs)
    _draw_bars(axes, bars)
    _draw_numbers(axes, bars, _WIDTH_POINTS / step_ms)
    _draw_names(axes, rows, plan, step_ms)
    _draw_legend(figure, bars)
    return figure


def _draw_idle(axes: Any, row: Row, step_ms: float) -> None:
    height = row.bottom - row.top
    rectangle = matplotlib_module().patches.Rectangle
    axes.add_patch(rectangle((0, row.top), step_ms, height, linewidth=0, **IDLE))
    for strip in range(len(row.strips)):
        y = row.bottom + (strip + 0.08) * STRIP
        band = {"facecolor": _BAND, "linewidth": 0, "zorder": 0}
        axes.add_patch(rectangle((0, y), step_ms, FILLED * STRIP, **band))


def _draw_bars(axes: Any, bars: list[Bar]) -> None:
    looks: dict[tuple[str, float], list[Bar]] = {}
    for bar in bars:
        looks.setdefault((bar.kind, bar.shade), []).append(bar)
    thinnest_ms = 3 * axes.get_xlim()[1] / _WIDTH_POINTS  # that has its own edge
    for (kind, shade), alike in looks.items():
        narrowest_ms = min(bar.end_ms - bar.start_ms for bar in alike)
        boxes = matplotlib_module().collections.PolyCollection(
            [_corners(bar) for bar in alike],
            facecolor=lighter(WORK[kind], shade),
            edgecolor=EDGE if narrowest_ms > thinnest_ms else "face",
            linewidth=0.4,  # so that bars of no width show, too
            zorder=2,
        )
        axes.add_collection(boxes)


def _corners(bar: Bar) -> list[tuple[float, float]]:
    left, right, top, bottom = bar.start_ms, bar.end_ms, bar.top, bar.top + bar.height
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _draw_numbers(axes: Any, bars: list[Bar], points_per_ms: float) -> None:
    """Number the bars with room for the largest number, so that none is skipped."""
    middle: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 4}
    middle["fontsize"] = _NUMBER_POINTS
    numbered = [bar for bar in bars if bar.number is not None]
    digits = max((len(str(bar.number)) for bar in numbered), default=1)
    least_ms = _NUMBER_POINTS * (0.6 * digits + 0.3) / points_per_ms
    for bar in numbered:
        if bar.end_ms - bar.start_ms > least_ms:
            for device in range(round(bar.height)):
                at = (bar.start_ms + bar.end_ms) / 2, bar.top + device + 0.5
                axes.text(*at, str(bar.number), **middle)


def _draw_names(axes: Any, rows: list[Row], plan: Plan, step_ms: float) -> None:
    """Name devices at the left, layers at the right, replicas above their rows."""
    ticks, names = [], []
    for row in rows:
        node, devices = row.lane
        for i, device in enumerate(devices):
            ticks.append(row.top + i + 0.5)
            names.append(f"{node}/{device}")
        lines = [row.top + i for i in range(1, len(devices))]
        axes.hlines(lines, 0, step_ms, color="white", linewidth=1.2, zorder=3)
        shown = layers_label(row, plan)
        at = step_ms * 1.006, (row.top + row.bottom) / 2
        axes.text(*at, f"layers {shown}", fontsize=7, color=GREY, va="center")
    axes.set_yticks(ticks, names)
    named = dict.fromkeys(row.replica for row in rows)
    for r in named if len(plan.replicas) > 1 else ():
        replica = plan.replicas[r]
        top = next(row.top for row in rows if row.replica == r)
        shown = f"r{r}: {replica.num_microbatches} x {replica.microbatch_size}"
        place = {"va": "bottom", "color": GREY}
        axes.text(0, top - 0.12, f"{shown} sequences", fontsize=7, **place)


def _draw_legend(figure: Any, bars: list[Bar]) -> None:
    kinds, shades = {bar.kind for bar in bars}, {bar.shade for bar in bars}
    handles = [
        patch(kind, facecolor=colour, edgecolor=EDGE)
        for kind, colour in WORK.items()
        if kind in kinds
    ]
    handles.append(patch("idle", **IDLE))
    if len(shades) > 1:
        handles.append(patch("lighter: later layers", alpha=0))
    draw_legend(figure, handles, len(handles), 8)
