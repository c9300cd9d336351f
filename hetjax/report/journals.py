# SPDX-License-Identifier: Apache-2.0
"""Defines lists of a run's journal lines that show themselves: steps and events.

Owns how they look as text and in a notebook, and the conversion to pandas. Does not own
what the lines say (`training/recorder.py`) nor their files.
"""

from collections.abc import Mapping
from typing import Any

from hetjax.costs.certainty.beliefs import CredibleInterval
from hetjax.errors import BadInput
from hetjax.plans.table import aligned, html_table
from hetjax.report.metrics import KEYS, METRICS

_EVENTS = ("step", "time", "event", "details")


class Metrics(list[dict[str, Any]]):
    """The lines of `metrics.jsonl`, a dict each: a list, with or without pandas.

    Columns are in the order of the table of metrics, whatever line comes first.
    `frame()` returns the same as a `pandas.DataFrame`, if pandas is installed.

    >>> metrics = Metrics([{"step": 0, "val_loss": 6.5}, {"step": 1, "loss": 6.9375}])
    >>> print(metrics)
    step  loss    val_loss
    0             6.5
    1     6.9375
    """

    def frame(self) -> Any:
        """Return a DataFrame with a row per line; BadInput without pandas.

        `frame.attrs["units"]` has the units of its columns.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as missing:
            raise BadInput(
                got="a DataFrame, but pandas is not installed",
                allowed="DataFrames, if the extra `notebook` is installed",
                fix="pip install 'hetjax[notebook]', or use the list itself",
            ) from missing
        found = pandas.DataFrame(list(self), columns=self._header())
        found.attrs["units"] = {metric.key: metric.unit for metric in METRICS}
        return found

    def __str__(self) -> str:
        return "\n".join(aligned(self._header(), self._rows()))

    def _repr_html_(self) -> str:
        return html_table(self._header(), self._rows())

    def _header(self) -> list[str]:
        names = dict.fromkeys(name for line in self for name in line)
        known = [name for name in ("step", *KEYS) if name in names]
        return list(dict.fromkeys((*known, *names)))

    def _rows(self) -> list[list[str]]:
        header = self._header()
        return [[_cell(line.get(name)) for name in header] for line in self]


class Events(list[dict[str, Any]]):
    """The lines of `events.jsonl`, a dict each: what happened besides steps.

    >>> line = {"event": "saved", "step": 9, "time": "2026-08-01T09:30:00+00:00"}
    >>> print(Events([line | {"bytes": {"memory": 512}}]))
    step  time      event  details
    9     09:30:00  saved  bytes: memory 512
    """

    def named(self, event: str) -> "Events":
        """Return the events of that name, as in `named("recovered")`."""
        return Events(line for line in self if line["event"] == event)

    def __str__(self) -> str:
        return "\n".join(aligned(_EVENTS, [*map(_event_row, self)]))

    def _repr_html_(self) -> str:
        return html_table(_EVENTS, [*map(_event_row, self)])


def event_details(line: Mapping[str, Any]) -> str:
    """Return what an event says besides its step, time and name, if not empty."""
    details = {name: line[name] for name in line if name not in _EVENTS}
    shown = (f"{name}: {_detail(value)}" for name, value in details.items() if value)
    return "; ".join(shown)


def slow_line(line: Mapping[str, Any]) -> str:
    """Return an event `slow` in words.

    >>> slow_line({"who": "l4-0", "factor": 1.9, "since": 412, "evidence": "alone"})
    'slow: l4-0 1.9x since step 412, alone'
    """
    factor = line.get("factor")
    times = f" {factor:.1f}x" if isinstance(factor, int | float) else ""
    who = f"slow: {line.get('who')}{times} since step {line.get('since')}"
    return f"{who}, {line.get('evidence')}"


def move_line(line: Mapping[str, Any]) -> str:
    """Return an event `weighed` or `moved` in words.

    >>> move_line({"event": "moved", "step": 9, "gain": [1.2, 1.3, 1.4],
    ...     "predicted_gain": [1.1, 1.25, 1.4], "pause_s": 8.04})
    'moved before step 9: 1.30x as fast, 1.25x predicted, after a pause of 8.0 s'
    >>> move_line({"event": "weighed", "step": 9, "gain": [1.1, 1.25, 1.4],
    ...     "move_s": [5, 10.0, 20], "steps": 7})  # doctest: +NORMALIZE_WHITESPACE
    'step 9: another plan would gain 1.25x (1.10 to 1.40) over 7 steps; moving costs
     about 10 s'
    """
    low, median, high = line["gain"]
    if line["event"] == "moved":
        return (
            f"moved before step {line['step']}: {median:.2f}x as fast, "
            f"{line['predicted_gain'][1]:.2f}x predicted, after a pause of "
            f"{line['pause_s']:.1f} s"
        )
    gain = CredibleInterval(low=low, median=median, high=high).as_factor()
    return (
        f"step {line['step']}: another plan would gain {gain} over {line['steps']:,} "
        f"steps; moving costs about {line['move_s'][1]:.0f} s"
    )


def _event_row(line: Mapping[str, Any]) -> tuple[str, ...]:
    clock = line["time"].partition("T")[2].partition("+")[0]  # in UTC
    return str(line["step"]), clock, line["event"], event_details(line)


def _detail(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_detail(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_detail, value))
    return _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)
