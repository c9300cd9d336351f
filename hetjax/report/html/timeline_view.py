# SPDX-License-Identifier: Apache-2.0
"""Turns a timeline into rows and bars that a template draws, as inline SVG.

Owns which replicas are shown if there are many, how bars of a step of very many passes
are shared, and the words of names and bars. Does not own rows and bars
(`timeline_bars.py`) nor how they look (`templates/`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetjax.cluster.cluster import Cluster
from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.report.colours import WORK
from hetjax.report.layout_rows import alike_replicas, spelled
from hetjax.report.metrics import ms
from hetjax.report.prediction import lane_name, predicted_spans
from hetjax.report.timeline_bars import (
    FILLED,
    GAP,
    STRIP,
    Bar,
    Row,
    bars_of,
    grouped,
    layers_label,
    num_grouped,
    rows_of,
)
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.programs.action import Action, Op
from hetjax.schedule.simulation.result import lane_of
from hetjax.schedule.simulation.trace import Span

_MOST_ROWS = 48  # devices
_MOST_BARS = 4000  # a page of them has half a megabyte, and zooms at once
_SLICES = (2000, 1000, 500, 250, 100)  # of a step, if there are more bars
_ROW_PX = 22
_TOP = 0.75  # rows, for the first heading
_HEADING_PX = 15
_CUT = 0.05  # rows
_DOES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.FB: "forward and backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.NORM: "norm of all gradients",
    Op.UPDATE: "update of the weights",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The background of a row or of a strip, in rows."""

    kind: str
    top: float
    height: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Words at a height of the picture, and fainter ones beside them."""

    words: str
    top_px: int
    quiet: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnBar:
    """A bar, its numbers as text: milliseconds along, rows down.

    If the bar is part of a longer span, `times` are that span's start and length.
    Otherwise `times` is empty.
    """

    x: str
    y: str
    width: str
    height: str
    words: str
    number: int | None
    times: str
    num_spans: int
    is_rest: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBars:
    """Bars of one kind and one stage; `opacity` is lower for later stages of a lane."""

    where: str
    colour: str
    opacity: str
    bars: tuple[DrawnBar, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineView:
    """All that a template draws of a step; `num_spans` counts the shown rows only."""

    end_ms: float
    height: float
    height_px: int
    num_spans: int
    words: str
    legend: dict[str, str]
    devices: tuple[Label, ...]
    headings: tuple[Label, ...]
    bands: tuple[Band, ...]
    cuts: tuple[float, ...]  # between devices of one bar, in rows
    stages: tuple[StageBars, ...]
    notes: tuple[str, ...]


def timeline_view(predicted: Predicted, cluster: Cluster) -> TimelineView:
    """Return the simulated step as a template draws it."""
    spans, costs = predicted_spans(predicted), predicted.costs
    return _view(spans, predicted.plan, cluster, costs)


def traced_view(
    spans: Sequence[Span], plan: Plan, cluster: Cluster, predicted: Predicted | None
) -> TimelineView | None:
    """Return the measured times of the plan's stages; None if there are none."""
    devices = {
        (key, lane[0], d) for key, lane in lane_of(plan).items() for d in lane[1]
    }
    of_plan = [
        span
        for span in spans
        if (span.action.key, span.node, span.device) in devices and not span.lane
    ]
    if not of_plan:
        return None
    return _view(of_plan, plan, cluster, predicted and predicted.costs)


def _view(
    spans: Sequence[Span], plan: Plan, cluster: Cluster, costs: Costs | None
) -> TimelineView:
    shown = shown_replicas(plan, cluster)
    rows = rows_of(spans, plan, shown)
    bars = bars_of(spans, rows, costs)
    num_spans = sum(not bar.is_rest for bar in bars)
    end_ms = 1e3 * max((span.end_s for span in spans), default=0.0) or 1.0
    notes = list(_replicas_left_out(plan, cluster, shown))
    if len(bars) > _MOST_BARS:
        slice_ms = _slice_ms(bars, end_ms)
        bars = grouped(bars, slice_ms)
        notes.append(
            f"{num_spans:,} passes and transfers are drawn as "
            f"{sum(not bar.is_rest for bar in bars):,} bars: a bar holds all of "
            f"one kind that begin within the same {ms(slice_ms / 1e3)} ms"
        )
    top = _TOP if len(plan.replicas) > 1 else 0.0
    height = rows[-1].end + GAP + top
    return TimelineView(
        end_ms=end_ms,
        height=round(height, 3),
        height_px=round(height * _ROW_PX),
        num_spans=num_spans,
        words=f"Timeline of all devices over {ms(end_ms / 1e3)} ms",
        legend={kind: c for kind, c in WORK.items() if _has(bars, kind)},
        devices=tuple(_devices(rows, plan, top)),
        headings=tuple(_headings(rows, plan, top)) if top else (),
        bands=tuple(_bands(rows, top)),
        cuts=tuple(_cuts(rows, top)),
        stages=tuple(_stages(bars, rows, top)),
        notes=tuple(notes),
    )


def shown_replicas(plan: Plan, cluster: Cluster) -> list[int]:
    """Return the replicas of the timeline: all, or a selection if there are many.

    The selection is the first of each group of alike replicas, and of these as many as
    can be read, at least one.
    """
    shown = list(range(len(plan.replicas)))
    if _num_rows(plan, shown) > _MOST_ROWS:
        shown = [group[0] for group in alike_replicas(plan, cluster)]
    while len(shown) > 1 and _num_rows(plan, shown) > _MOST_ROWS:
        shown.pop()
    return shown


def _num_rows(plan: Plan, replicas: Sequence[int]) -> int:
    stages = plan.stages()
    return sum(len(stage.devices) for r, _, stage in stages if r in replicas)


def _replicas_left_out(
    plan: Plan, cluster: Cluster, shown: Sequence[int]
) -> Iterator[str]:
    """Yield what is not drawn: replicas like those that are drawn, and others."""
    if len(shown) == len(plan.replicas):
        return
    groups = alike_replicas(plan, cluster)
    alike = {group[0]: group[1:] for group in groups if group[1:]}
    others = sum((group for group in groups if group[0] not in shown), ())
    yield f"drawn: {len(shown)} of {len(plan.replicas)} replicas"
    for r in shown:
        if r in alike:
            verb = "is" if len(alike[r]) == 1 else "are"
            yield f"r{spelled(alike[r])} {verb} like r{r}"
    if others:
        verb = "is" if len(others) == 1 else "are"
        yield f"r{spelled(tuple(sorted(others)))} {verb} different and not drawn"


def _slice_ms(bars: Sequence[Bar], end_ms: float) -> float:
    """Return the shortest slice of the step that leaves few enough bars, if any."""
    lengths = [end_ms / number for number in _SLICES]
    few = (x for x in lengths if num_grouped(bars, x) <= _MOST_BARS)
    return next(few, lengths[-1])


def _has(bars: Sequence[Bar], kind: str) -> bool:
    return any(bar.kind == kind for bar in bars)


def _px(rows: float) -> int:
    return round(rows * _ROW_PX)


def _devices(rows: Sequence[Row], plan: Plan, top: float) -> Iterator[Label]:
    for row in rows:
        node, devices = row.lane
        for i, device in enumerate(devices):
            layers = f"layers {layers_label(row, plan)}" if i == 0 else ""
            place = _px(top + row.top + i)
            yield Label(words=f"{node}/{device}", top_px=place, quiet=layers)


def _headings(rows: Sequence[Row], plan: Plan, top: float) -> Iterator[Label]:
    for r in dict.fromkeys(row.replica for row in rows):
        replica = plan.replicas[r]
        first = next(row.top for row in rows if row.replica == r)
        size = f"{replica.num_microbatches} x {replica.microbatch_size} sequences"
        place = _px(top + first) - _HEADING_PX
        yield Label(words=f"r{r}: {size}", top_px=place)


def _bands(rows: Sequence[Row], top: float) -> Iterator[Band]:
    for row in rows:
        for i in range(len(row.lane[1])):
            place = round(top + row.top + i, 3)
            yield Band(kind="band", top=place, height=1 - _CUT)
        for i in range(len(row.strips)):
            place = round(top + row.bottom + STRIP * i, 3)
            yield Band(kind="strip", top=place, height=round(STRIP * FILLED, 3))


def _cuts(rows: Sequence[Row], top: float) -> Iterator[float]:
    for row in rows:
        for i in range(1, len(row.lane[1])):
            yield round(top + row.top + i - _CUT, 3)


def _stages(
    bars: Sequence[Bar], rows: Sequence[Row], top: float
) -> Iterator[StageBars]:
    lanes = {key: row.lane for row in rows for key in row.keys}
    found: dict[tuple[int, int, str, float], list[Bar]] = {}
    for bar in bars:
        action = bar.span.action
        key = action.replica, action.stage, bar.kind, bar.shade
        found.setdefault(key, []).append(bar)
    for (r, s, kind, shade), alike in found.items():
        yield StageBars(
            where=f"r{r}.s{s} on {lane_name(lanes[r, s])}",
            colour=WORK[kind],
            opacity=f"{1 - shade:.2f}" if shade else "",
            bars=tuple(_drawn(bar, top) for bar in alike),
        )


def _drawn(bar: Bar, top: float) -> DrawnBar:
    span, is_shared = bar.span, bar.num_spans > 1
    is_part = span.action.op is Op.FB and not is_shared
    words = f"{bar.num_spans} x {bar.kind}" if is_shared else _words(span)
    start_ms, length_ms = span.start_s * 1e3, (span.end_s - span.start_s) * 1e3
    return DrawnBar(
        x=f"{bar.start_ms:.7g}",
        y=f"{bar.top + top:.4g}",
        width=f"{bar.width_ms:.6g}",
        height=f"{bar.height * (FILLED if span.lane else 1):.4g}",
        words=words,
        number=None if bar.is_rest else bar.number,
        times=f"{start_ms:.7g} {length_ms:.6g}" if is_part else "",
        num_spans=bar.num_spans,
        is_rest=bar.is_rest,
    )


def _words(span: Span) -> str:
    """Return what a bar stands for."""
    action = span.action
    does = _does(action)
    m = action.microbatch
    return does if m is None else f"{does}, microbatch {m}"


def _does(action: Action) -> str:
    if action.op is Op.SEND:
        names = {"y": "activations", "dx": "gradients"}
        what = names.get(str(action.buffer), action.buffer)
        return f"transfer of {what} to r{action.replica}.s{action.peer}"
    if action.op is Op.REDUCE and action.group is not None:
        return f"sum of gradients, {str(action).partition('[')[2].rstrip(']')}"
    return _DOES.get(action.op, str(action.op))
