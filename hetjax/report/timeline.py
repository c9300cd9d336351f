# SPDX-License-Identifier: Apache-2.0
"""The picture of a step: one row per device, time in milliseconds along it.

Owns the drawing, for print and screen: the colours (Okabe and Ito's, which colour-blind
readers can tell apart), the strips under a row for what leaves it, the numbers of
microbatches where they fit. Does not own the times (`schedule/simulation/trace.py`).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.report.picture import (
    EDGE,
    GREY,
    IDLE,
    STYLE,
    Picture,
    draw_legend,
    lighter,
    matplotlib_module,
    patch,
    titled_axes,
)
from hetjax.schedule.programs.action import Action, Op, StageKey
from hetjax.schedule.simulation.result import Lane, lane_of
from hetjax.schedule.simulation.trace import Span

_COLOURS = {
    "forward": "#56b4e9",
    "backward": "#e69f00",
    "input gradient": "#d55e00",
    "weight gradient": "#f0e442",
    "update": "#7f7f7f",
    "transfer": "#cc79a7",
    "reduction": "#009e73",
}
_KINDS = {
    Op.F: "forward",
    Op.E: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.UPDATE: "update",
    Op.SEND: "transfer",
    Op.REDUCE: "reduction",
}
_STRIPS = ("y", "dx", "REDUCE")  # under each row, in this order, where there are any
_BAND = "#f0f0f0"
_MOST_INCHES = 12.0
_WIDTH_POINTS = 8.2 * 72  # of the axes, about
_ROW_INCHES = 0.34
_STRIP, _GAP, _HEADING = 0.22, 0.3, 0.6  # heights in rows
_NUMBER_POINTS = 7.0
_LIGHTEST = 0.6  # shade of the last of interleaved stages, were there many


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A lane's place: its devices from `top` down to `bottom`, then its strips."""

    lane: Lane
    keys: tuple[StageKey, ...]
    strips: tuple[str, ...]
    top: float

    @property
    def bottom(self) -> float:
        return self.top + len(self.lane[1])

    @property
    def end(self) -> float:
        return self.bottom + _STRIP * len(self.strips)


@dataclass(frozen=True, slots=True)
class _Bar:
    kind: str
    number: int | None
    shade: float  # 0: the colour itself; towards 1: lighter
    start_ms: float
    end_ms: float
    top: float
    height: float


def timeline_picture(
    spans: Iterable[Span],
    plan: Plan,
    costs: Costs,
    title: str,
    replicas: Collection[int] | None = None,
) -> Picture:
    """Draw the spans of one step, of all replicas or of those given.

    BadInput where matplotlib is not installed.
    """
    shown = range(len(plan.replicas)) if replicas is None else replicas
    with matplotlib_module().rc_context(STYLE):
        return Picture(_figure(list(spans), plan, costs, title, shown))


def _figure(
    spans: list[Span], plan: Plan, costs: Costs, title: str, shown: Collection[int]
) -> Any:
    rows = _rows(spans, plan, shown)
    step_ms = 1e3 * max((span.end_s for span in spans), default=0.0) or 1.0
    height = min(_ROW_INCHES * rows[-1].end + 1.2, _MOST_INCHES)
    figure, axes = titled_axes(height, title)
    axes.set_xlim(0, step_ms)
    axes.set_ylim(rows[-1].end + _GAP, -_HEADING if len(plan.replicas) > 1 else 0)
    axes.set_xlabel("time (ms)", fontsize=9)
    axes.tick_params(labelsize=8, left=False)
    axes.spines[["left", "right", "top"]].set_visible(False)
    for row in rows:
        _draw_idle(axes, row, step_ms)
    bars = _bars(spans, rows, costs)
    _draw_bars(axes, bars)
    _draw_numbers(axes, bars, _WIDTH_POINTS / step_ms)
    _draw_names(axes, rows, plan, step_ms)
    _draw_legend(figure, bars)
    return figure


def _rows(spans: list[Span], plan: Plan, shown: Collection[int]) -> list[_Row]:
    """Place the lanes one under the other, replica by replica."""
    strips: dict[tuple[str, int], set[str]] = {}
    for span in spans:
        if span.lane:
            strips.setdefault((span.node, span.device), set()).add(_strip(span.action))
    keys_of: dict[Lane, list[StageKey]] = {}
    for key, lane in lane_of(plan).items():
        if key[0] in shown:
            keys_of.setdefault(lane, []).append(key)
    rows: list[_Row] = []
    top = 0.0
    for lane, keys in keys_of.items():
        if rows:
            same = rows[-1].keys[0][0] == keys[0][0]
            top = rows[-1].end + (_GAP if same else _GAP + _HEADING)
        found = strips.get((lane[0], lane[1][0]), set())
        below = tuple(strip for strip in _STRIPS if strip in found)
        rows.append(_Row(lane=lane, keys=tuple(keys), strips=below, top=top))
    return rows


def _strip(action: Action) -> str:
    return str(action.buffer or action.op)


def _bars(spans: list[Span], rows: list[_Row], costs: Costs) -> list[_Bar]:
    """Turn spans into bars; devices of one lane act alike, so the first tells all."""
    row_of = {(row.lane[0], row.lane[1][0]): row for row in rows}
    bars = []
    for span in spans:
        row = row_of.get((span.node, span.device))
        if row is not None:
            bars += _bars_of(span, row, costs)
    return bars


def _bars_of(span: Span, row: _Row, costs: Costs) -> Iterator[_Bar]:
    action = span.action
    start, end, m = span.start_s * 1e3, span.end_s * 1e3, action.microbatch
    if span.lane:
        top = row.bottom + _STRIP * row.strips.index(_strip(action))
        yield _Bar(_KINDS[action.op], None, 0.0, start, end, top, _STRIP)
        return
    shade = row.keys.index(action.key) / len(row.keys) * _LIGHTEST
    place = row.top, row.bottom - row.top
    if action.op is not Op.FB:
        yield _Bar(_KINDS[action.op], m, shade, start, end, *place)
        return
    times = costs.times[action.key]  # one program, in truth; drawn as what it computes
    turn = start + (end - start) * times.forward_s / (
        times.forward_s + times.backward_s or 1.0
    )
    yield _Bar("forward", m, shade, start, turn, *place)
    yield _Bar("backward", m, shade, turn, end, *place)


def _draw_idle(axes: Any, row: _Row, step_ms: float) -> None:
    height = row.bottom - row.top
    rectangle = matplotlib_module().patches.Rectangle
    axes.add_patch(rectangle((0, row.top), step_ms, height, linewidth=0, **IDLE))
    for strip in range(len(row.strips)):
        y = row.bottom + (strip + 0.08) * _STRIP
        band = {"facecolor": _BAND, "linewidth": 0, "zorder": 0}
        axes.add_patch(rectangle((0, y), step_ms, 0.84 * _STRIP, **band))


def _draw_bars(axes: Any, bars: list[_Bar]) -> None:
    looks: dict[tuple[str, float], list[_Bar]] = {}
    for bar in bars:
        looks.setdefault((bar.kind, bar.shade), []).append(bar)
    thinnest_ms = 3 * axes.get_xlim()[1] / _WIDTH_POINTS  # with an edge of its own
    for (kind, shade), alike in looks.items():
        narrowest_ms = min(bar.end_ms - bar.start_ms for bar in alike)
        boxes = matplotlib_module().collections.PolyCollection(
            [_corners(bar) for bar in alike],
            facecolor=lighter(_COLOURS[kind], shade),
            edgecolor=EDGE if narrowest_ms > thinnest_ms else "face",
            linewidth=0.4,  # shows bars of no width, too
            zorder=2,
        )
        axes.add_collection(boxes)


def _corners(bar: _Bar) -> list[tuple[float, float]]:
    left, right, top, bottom = bar.start_ms, bar.end_ms, bar.top, bar.top + bar.height
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _draw_numbers(axes: Any, bars: list[_Bar], points_per_ms: float) -> None:
    """Number the bars that would hold the largest number, so that none is left out."""
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


def _draw_names(axes: Any, rows: list[_Row], plan: Plan, step_ms: float) -> None:
    """Name devices at the left, layers at the right, replicas above their rows."""
    ticks, names = [], []
    for row in rows:
        node, devices = row.lane
        for i, device in enumerate(devices):
            ticks.append(row.top + i + 0.5)
            names.append(f"{node}/{device}")
        lines = [row.top + i for i in range(1, len(devices))]
        axes.hlines(lines, 0, step_ms, color="white", linewidth=1.2, zorder=3)
        layers = [plan.replicas[r].stages[s].layers for r, s in row.keys]
        shown = ", ".join(
            f"{lo}..{hi - 1}" if hi - lo > 1 else str(lo) for lo, hi in layers
        )
        at = step_ms * 1.006, (row.top + row.bottom) / 2
        axes.text(*at, f"layers {shown}", fontsize=7, color=GREY, va="center")
    axes.set_yticks(ticks, names)
    named = dict.fromkeys(row.keys[0][0] for row in rows)
    for r in named if len(plan.replicas) > 1 else ():
        replica = plan.replicas[r]
        top = next(row.top for row in rows if row.keys[0][0] == r)
        shown = f"replica {r}: {replica.num_microbatches} x {replica.microbatch_size}"
        place = {"va": "bottom", "color": GREY}
        axes.text(0, top - 0.12, f"{shown} sequences", fontsize=7, **place)


def _draw_legend(figure: Any, bars: list[_Bar]) -> None:
    kinds, shades = {bar.kind for bar in bars}, {bar.shade for bar in bars}
    handles = [
        patch(kind, facecolor=colour, edgecolor=EDGE)
        for kind, colour in _COLOURS.items()
        if kind in kinds
    ]
    handles.append(patch("idle", **IDLE))
    if len(shades) > 1:
        handles.append(patch("lighter: later layers", alpha=0))
    draw_legend(figure, handles, len(handles), 8)
