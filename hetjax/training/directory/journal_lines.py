# SPDX-License-Identifier: Apache-2.0
"""Checks the lines of a run's journals, which somebody may have edited.

Owns the types of the values that hetjax reads again from `metrics.jsonl` and
`events.jsonl`; other keys may have any value. Does not own which metrics there are
(`report/metrics.py`), files (`journal.py`) nor what is written (`recorder.py`).
"""

from typing import Any

from hetjax.report.metrics import KEYS

_OF_EVENTS = ("lost_steps", "grace_s", "productive_s", "lost_s", "recovering_s")
_NUMBERS = frozenset((*KEYS, *_OF_EVENTS, "replanning_s", "other_s"))
_TEXTS = frozenset(("event", "time", "reason"))
_PARTS = frozenset(("bytes", "tier_s"))  # numbers by name
_RECOVERED = "recovered"  # its seconds are by name; other events may have a number
_MOST = 1e40  # more than any float32
_MOST_STEPS = 2**53
OF_AN_EVENT = ("event", "time")


def wrong_with(line: Any, required: tuple[str, ...] = ()) -> str | None:
    """Return why an object is not a line of a journal; None if it is one.

    >>> wrong_with({"step": 3, "loss": "2.5"})
    "loss = '2.5', not a number"
    """
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return "not a JSON object with a 'step'"
    if not 0 <= line["step"] < _MOST_STEPS:
        return f"step {str(line['step'])[:40]}"
    for key in required:
        if key not in line:
            return f"no {key!r}"
    for key, value in line.items():
        if key in _NUMBERS and not _is_number(value):
            return f"{key} = {_shown(value)}, not a number"
        if key in _TEXTS and not isinstance(value, str):
            return f"{key} = {_shown(value)}, not a string"
        is_several = key in _PARTS or (key == "seconds" and _has_parts(line, value))
        if is_several and not _are_numbers(value):
            return f"{key} = {_shown(value)}, not a table of numbers"
    return None


def _has_parts(line: dict[str, Any], seconds: Any) -> bool:
    return line.get("event") == _RECOVERED or not _is_number(seconds)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST


def _shown(value: Any) -> str:
    return repr(value)[:40]
