# SPDX-License-Identifier: Apache-2.0
"""Turns a step into rows and bars, which others draw: which device does what when.

Owns the kinds of work, the rows of devices with strips below them for what leaves them,
and bars for steps of too many passes to draw one by one. Does not own the times
(`schedule/simulation/trace.py`), the colours (`colours.py`) nor the drawing
(`pictures/`, `html/`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.schedule.programs.action import Action, Op, StageKey
from hetjax.schedule.simulation.result import Lane, lane_of
from hetjax.schedule.simulation.trace import Span

_KINDS = {
    Op.F: "forward",
    Op.E: "forward",
    Op.FB: "forward",  # its first part
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.UPDATE: "update",
    Op.SEND: "transfer",
    Op.REDUCE: "reduction",
    Op.NORM: "reduction",
}
_STRIPS = ("y", "dx", "REDUCE")  # under each row, in this order, if there are any
STRIP, GAP, HEADING = 0.22, 0.3, 0.6  # heights in rows
FILLED = 0.84  # of a strip's height
_LIGHTEST = 0.6  # limit of the shade of later interleaved stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
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
        return self.bottom + STRIP * len(self.strips)

    @property
    def replica(self) -> int:
        return self.keys[0][0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """The drawing of a span, for all devices of its lane.

    `span` is the whole span. A forward and backward pass that run as one program are
    drawn as two bars, the second with `is_rest`. `num_spans` of one kind may share a
    bar.
    """

    kind: str
    span: Span
    number: int | None
    shade: float  # 0: the colour itself; towards 1: lighter
    start_ms: float
    end_ms: float
    top: float
    height: float
    is_rest: bool = False
    num_spans: int = 1

    @property
    def width_ms(self) -> float:
        return self.end_ms - self.start_ms


def rows_of(spans: Sequence[Span], plan: Plan, shown: Collection[int]) -> list[Row]:
    """Place the lanes of these replicas one below the other, replica by replica."""
    strips: dict[tuple[str, int], set[str]] = {}
    for span in spans:
        if span.lane:
            strips.setdefault((span.node, span.device), set()).add(_strip(span.action))
    keys_of: dict[Lane, list[StageKey]] = {}
    for key, lane in lane_of(plan).items():
        if key[0] in shown:
            keys_of.setdefault(lane, []).append(key)
    rows: list[Row] = []
    top = 0.0
    for lane, keys in keys_of.items():
        if rows:
            same = rows[-1].replica == keys[0][0]
            top = rows[-1].end + (GAP if same else GAP + HEADING)
        found = strips.get((lane[0], lane[1][0]), set())
        below = tuple(strip for strip in _STRIPS if strip in found)
        rows.append(Row(lane=lane, keys=tuple(keys), strips=below, top=top))
    return rows


def bars_of(
    spans: Sequence[Span], rows: Sequence[Row], costs: Costs | None
) -> list[Bar]:
    """Turn spans into bars; devices of one lane act alike, so the first stands for all.

    `costs` tell the forward share of a pass that is forward and backward in one;
    without them it is a third.
    """
    row_of = {(row.lane[0], row.lane[1][0]): row for row in rows}
    bars = []
    for span in spans:
        row = row_of.get((span.node, span.device))
        if row is not None:
            bars += _bars_of(span, row, costs)
    return bars


def grouped(bars: Sequence[Bar], slice_ms: float) -> list[Bar]:
    """Return fewer bars: those of one kind and place that begin in one slice share one.

    A shared bar is as long as its bars together, one kind after the other, so that a
    slice is as full as it was.
    """
    shared: dict[tuple[object, ...], list[Bar]] = {}
    for bar in sorted(bars, key=lambda bar: bar.start_ms):
        shared.setdefault(_slot(bar, slice_ms), []).append(bar)
    free_ms: dict[tuple[float, float], float] = {}
    result = []
    for alike in shared.values():
        first, place = alike[0], (alike[0].top, alike[0].height)
        start_ms = max(first.start_ms, free_ms.get(place, 0.0))
        if len(alike) > 1:
            end_ms = start_ms + sum(bar.width_ms for bar in alike)
            first = replace(
                first,
                number=None,
                start_ms=start_ms,
                end_ms=end_ms,
                num_spans=len(alike),
            )
        free_ms[place] = first.end_ms
        result.append(first)
    return result


def num_grouped(bars: Sequence[Bar], slice_ms: float) -> int:
    """Return the number of bars that `grouped` returns."""
    return len({_slot(bar, slice_ms) for bar in bars})


def _slot(bar: Bar, slice_ms: float) -> tuple[object, ...]:
    """Return what the bars that share one have in common."""
    number = int(bar.start_ms / slice_ms)
    return bar.top, bar.height, number, bar.kind, bar.shade, bar.is_rest


def layers_label(row: Row, plan: Plan) -> str:
    """Return the layers of the row's stages, as in "0..2, 5"."""
    ranges = [plan.replicas[r].stages[s].layers for r, s in row.keys]
    return ", ".join(f"{lo}..{hi - 1}" if hi - lo > 1 else str(lo) for lo, hi in ranges)


def _strip(action: Action) -> str:
    return str(action.buffer or action.op)


def _bars_of(span: Span, row: Row, costs: Costs | None) -> Iterator[Bar]:
    action = span.action
    start, end, m = span.start_s * 1e3, span.end_s * 1e3, action.microbatch
    bar = Bar(
        kind=_KINDS[action.op],
        span=span,
        number=m,
        shade=0.0,
        start_ms=start,
        end_ms=end,
        top=row.top,
        height=row.bottom - row.top,
    )
    if span.lane:
        top = row.bottom + STRIP * row.strips.index(_strip(action))
        yield replace(bar, number=None, top=top, height=STRIP)
        return
    bar = replace(bar, shade=row.keys.index(action.key) / len(row.keys) * _LIGHTEST)
    if action.op is not Op.FB:
        yield bar
        return
    # one program, drawn as the passes that it computes
    turn = start + (end - start) * _forward_share(action.key, costs)
    yield replace(bar, end_ms=turn)
    yield replace(bar, kind="backward", start_ms=turn, is_rest=True)


def _forward_share(key: StageKey, costs: Costs | None) -> float:
    if costs is None:
        return 1 / 3
    times = costs.times[key]
    return times.forward_s / (times.forward_s + times.backward_s or 1.0)
