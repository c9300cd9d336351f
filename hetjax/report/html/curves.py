# SPDX-License-Identifier: Apache-2.0
"""Turns curves of a run into what a template draws: numbers by step.

Owns the scales and their marks, and how very long curves are thinned: to the mean of
neighbouring steps, with the least and the greatest as a band around it. Does not own
the numbers (`run_page.py`) nor how they look (`templates/`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]  # step, value
_MOST_POINTS = 600  # of a curve
_FLAT = 1e-9  # relative differences below this are rounding
_NOTHING = 1e-30
_NUM_MARKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A named line; `look` is its class: "first", "second" or "target"."""

    name: str
    look: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A figure beside a scale, at `percent` of its length."""

    words: str
    percent: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnCurve:
    """A line as paths in a square of 100 x 100; `band` is empty without thinning.

    If `is_dot`, the line is a single point, to be drawn large enough to be seen.
    """

    name: str
    look: str
    path: str
    band: str
    is_dot: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines over the same steps, with the marks of both scales."""

    title: str
    lines: Sequence[DrawnCurve]
    x_ticks: Sequence[Mark]
    y_ticks: Sequence[Mark]


def chart(title: str, curves: Sequence[Curve], *, from_zero: bool = False) -> Chart:
    """Draw the curves that have points; at least one must have some."""
    there = [curve for curve in curves if curve.points]
    steps = [step for curve in there for step, _ in curve.points]
    values = [value for curve in there for _, value in curve.points]
    left, right = min(steps), max(max(steps), min(steps) + 1)
    y_marks = marks(0.0 if from_zero else min(values), max(values))
    low, high = y_marks[0], y_marks[-1]

    def place(point: Point) -> str:
        x, y = (point[0] - left) / (right - left), (point[1] - low) / (high - low)
        return f"{100 * x:.5g} {100 - 100 * y:.5g}"

    return Chart(
        title=title,
        lines=[_drawn(curve, place) for curve in there],
        x_ticks=[
            Mark(words=f"{x:,.0f}", percent=round(100 * (x - left) / (right - left), 3))
            for x in marks(left, right)
            if left <= x <= right and x == int(x)
        ],
        y_ticks=[
            Mark(words=text, percent=round(100 - 100 * (y - low) / (high - low), 3))
            for y, text in zip(y_marks, _mark_texts(y_marks), strict=True)
        ],
    )


def marks(low: float, high: float) -> list[float]:
    """Return round numbers at equal distances, which enclose the range.

    >>> marks(0.0, 0.9), marks(4.2, 6.9)
    ([0.0, 0.5, 1.0], [4.0, 5.0, 6.0, 7.0])
    """
    span, size = high - low, max(abs(low), abs(high))
    if span <= _FLAT * size or size < _NOTHING:
        span = size if size >= _NOTHING else 1.0
    rough = span / _NUM_MARKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


def thinned(points: Sequence[Point]) -> tuple[list[Point], list[tuple[Point, Point]]]:
    """Return the means of neighbouring points, and the least and greatest of each.

    If there are few points, returns the points themselves and no ranges.
    """
    if len(points) <= _MOST_POINTS:
        return list(points), []
    size = -(-len(points) // _MOST_POINTS)
    means, ranges = list[Point](), list[tuple[Point, Point]]()
    for i in range(0, len(points), size):
        some = points[i : i + size]
        step = sum(step for step, _ in some) / len(some)
        values = [value for _, value in some]
        means.append((step, sum(values) / len(values)))
        ranges.append(((step, min(values)), (step, max(values))))
    return means, ranges


def _drawn(curve: Curve, place) -> DrawnCurve:
    points, ranges = thinned(curve.points)
    band = ""
    if ranges:
        around = [low for low, _ in ranges] + [high for _, high in reversed(ranges)]
        band = f"M{'L'.join(map(place, around))}Z"
    places = list(map(place, points))
    if len(places) == 1:
        places *= 2  # a line of no length: its round ends make it a dot
    return DrawnCurve(
        name=curve.name,
        look=curve.look,
        path=f"M{'L'.join(places)}",
        band=band,
        is_dot=len(points) == 1,
    )


def _mark_texts(values: Sequence[float]) -> list[str]:
    """Return marks as text, all with as many digits as their distance needs."""
    step = values[1] - values[0]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{digits}f}" for value in values]
