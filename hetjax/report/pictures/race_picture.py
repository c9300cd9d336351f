# SPDX-License-Identifier: Apache-2.0
"""Draws a race: a bar of tokens per second for each planner, and our plan.

Owns the drawing of the bars, and the page that bars and plan share. Does not own the
figures (`race.py`) nor the drawing of the plan (`layout.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.report.layout_rows import layout_of
from hetjax.report.pictures.layout import draw_layout, layout_inches
from hetjax.report.pictures.picture import (
    GREY,
    STYLE,
    Picture,
    matplotlib_module,
    new_figure,
    titled_axes,
)

_OURS, _OTHERS = "#009e73", "#a6cee3"
_ROW_INCHES, _MARGIN_INCHES = 0.27, 0.5
_POINTS = 8.0
_ROOM = 1.35  # of the longest bar: leaves room for words after it


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedBar:
    """A planner and its tokens per second; `words` stand after the bar."""

    name: str
    tokens_per_s: float
    words: str
    is_ours: bool


def race_picture(
    bars: Sequence[SpeedBar], title: str, plan: Plan, cluster: Cluster, plan_title: str
) -> Picture:
    """Draw the bars in the order given, longest first, and a plan below.

    Raises BadInput without matplotlib.
    """
    layout = layout_of(plan, cluster)
    with matplotlib_module().rc_context(STYLE):
        inches = [_ROW_INCHES * len(bars) + _MARGIN_INCHES, layout_inches(layout)]
        figure = new_figure(sum(inches))
        upper, lower = figure.subfigures(2, height_ratios=inches)
        _draw_bars(titled_axes(upper, title), bars)
        draw_layout(lower, layout, plan_title)
        return Picture(figure)


def _draw_bars(axes: Any, bars: Sequence[SpeedBar]) -> None:
    rows = range(len(bars))
    colours = [_OURS if bar.is_ours else _OTHERS for bar in bars]
    axes.barh(rows, [bar.tokens_per_s for bar in bars], color=colours, height=0.75)
    axes.set_xlim(0, _ROOM * max(bar.tokens_per_s for bar in bars))
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks(rows, [bar.name for bar in bars])
    axes.tick_params(length=0, labelsize=_POINTS)
    for row, bar in enumerate(bars):
        if bar.is_ours:
            axes.get_yticklabels()[row].set_fontweight("bold")
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        look = {"fontsize": _POINTS, "color": "black" if bar.is_ours else GREY}
        axes.annotate(bar.words, (bar.tokens_per_s, row), **place, **look)
