# SPDX-License-Identifier: Apache-2.0
"""Draws a layout: which node holds which layers of which replica.

Owns the drawing with matplotlib, for print: one row per node, one box per stage as wide
as its devices, idle devices hatched. Does not own what is drawn (`layout_rows.py`) nor
the layout of the report (`html/pages.py`).
"""

from typing import Any

from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.report.layout_rows import Box, Layout, NodeRow, layout_of
from hetjax.report.pictures.picture import (
    EDGE,
    GREY,
    IDLE,
    STYLE,
    WIDTH_INCHES,
    Picture,
    draw_legend,
    lighter,
    matplotlib_module,
    new_figure,
    patch,
    titled_axes,
)

# than the colours of replicas, so that dark letters are readable on them
_LIGHTER = 0.35
_NAMES_INCHES, _ROW_INCHES, _MARGINS_INCHES = 1.9, 0.5, 1.0
_GAP = 0.14  # between rows, as a share of a row
_NOTCH = 0.12  # between devices of a box, as a share of a row
_POINTS, _POINT_WIDTH = 7.0, 0.56  # of text; mean width of a letter in heights
_MOST_COLUMNS = 5  # of the legend


def layout_picture(plan: Plan, cluster: Cluster, title: str) -> Picture:
    """Draw the plan on its cluster; BadInput if matplotlib is not installed."""
    with matplotlib_module().rc_context(STYLE):
        layout = layout_of(plan, cluster)
        figure = new_figure(layout_inches(layout))
        draw_layout(figure, layout, title)
        return Picture(figure)


def layout_inches(layout: Layout) -> float:
    """Return the height of the drawing."""
    return _ROW_INCHES * (1 + _GAP) * len(layout.rows) + _MARGINS_INCHES


def draw_layout(figure: Any, layout: Layout, title: str) -> None:
    """Draw the layout into an empty figure, or an empty part of one."""
    axes = titled_axes(figure, title)
    _prepare(axes, layout)
    for at, row in enumerate(layout.rows):
        _draw_row(axes, row, at * (1 + _GAP), layout)
    _draw_legend(figure, layout)


def _prepare(axes: Any, layout: Layout) -> None:
    """Set the scales: devices along, rows down; node names at the left."""
    rows, most = layout.rows, layout.most_devices
    axes.set_xlim(0, most)
    axes.set_ylim(len(rows) * (1 + _GAP) - _GAP / 2, -_GAP / 2)
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    step = -(-most // 16)
    ticks = range(0, most, step)
    names = [f"device {i}" if i == 0 and most <= 8 else str(i) for i in ticks]
    axes.set_xticks([i + 0.5 for i in ticks], names)
    axes.tick_params(length=0, labelsize=_POINTS, labelcolor=GREY)
    axes.set_yticks([])
    for at, row in enumerate(rows):
        _name_row(axes, row, at * (1 + _GAP))


def _name_row(axes: Any, row: NodeRow, top: float) -> None:
    place: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "textcoords": "offset points",
        "ha": "right",
        "annotation_clip": False,
    }
    at = (0.0, top + 0.5)
    axes.annotate(row.name, at, (-6, 1), va="bottom", fontsize=8, **place)
    small = {"fontsize": _POINTS, "color": GREY}
    axes.annotate(row.kind, at, (-6, -1), va="top", **small, **place)


def _draw_row(axes: Any, row: NodeRow, top: float, layout: Layout) -> None:
    rectangle = matplotlib_module().patches.Rectangle
    most = axes.get_xlim()[1]
    points = (WIDTH_INCHES - _NAMES_INCHES) * 72 / most  # rough width of a device
    for box in row.boxes:
        look = IDLE
        if box.key is not None:
            colour = lighter(layout.colour(box.key[0]), _LIGHTER)
            look = {"facecolor": colour, "edgecolor": EDGE}
        at = (box.first, top)
        axes.add_patch(rectangle(at, box.num_devices, 1, linewidth=0.8, **look))
        inner = [box.first + i for i in range(1, box.num_devices)]
        line = {"color": look["edgecolor"], "linewidth": 0.6}
        axes.vlines(inner, top, top + _NOTCH, **line)
        axes.vlines(inner, top + 1 - _NOTCH, top + 1, **line)
        _write(axes, box, top, points * box.num_devices)


def _write(axes: Any, box: Box, top: float, width_points: float) -> None:
    """Write the longest of the box's texts that fits into it, if any."""
    look: dict[str, Any] = {"ha": "center", "va": "center", "linespacing": 1.15}
    if box.key is None:
        look |= {"color": GREY, "bbox": {"color": "white", "pad": 1}}
    for text in box.texts:
        longest = max(map(len, text.split("\n")))
        if longest * _POINTS * _POINT_WIDTH + 3 < width_points:
            axes.text(box.middle, top + 0.5, text, fontsize=_POINTS, **look)
            return


def _draw_legend(figure: Any, layout: Layout) -> None:
    handles = [
        patch(entry, facecolor=lighter(colour, _LIGHTER), edgecolor=EDGE)
        for entry, colour in layout.legend.items()
    ]
    if layout.has_idle:
        handles.append(patch("idle", **IDLE))
    if layout.num_left_out:
        handles.append(patch(f"and {layout.num_left_out} more nodes", alpha=0))
    draw_legend(figure, handles, min(len(handles), _MOST_COLUMNS), _POINTS)
