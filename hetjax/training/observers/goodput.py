# SPDX-License-Identifier: Apache-2.0
"""Accounts for the time of a start: what it went into, and how much was productive.

Owns the parts and their names. Does not own the clocks of steps and recoveries
(`loop.py`, `training/recovery/driver.py`) nor where the parts are shown (`session.py`).
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

_REPLAN = "replan"  # the phase of a recovery that makes the next plan
Part = Literal["data", "compiling", "evaluating", "saving"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Seconds of a start by what they went into.

    `productive_s`: steps that count, each once; `lost_s`: steps that were undone, and
    the part of a step that was done when a worker was lost; `recovering_s` and
    `replanning_s`: from then on until training continued; `data_s`: opening the text,
    or tokenising it; `compiling_s`: preparing the programs, including the start of
    workers and the reading of state; `evaluating_s` and `saving_s`: as far as steps
    wait for them; `other_s`: the rest, such as planning.
    """

    productive_s: float
    lost_s: float
    recovering_s: float
    replanning_s: float
    other_s: float
    data_s: float = 0.0
    compiling_s: float = 0.0
    evaluating_s: float = 0.0
    saving_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(asdict(self).values())

    @property
    def goodput(self) -> float:
        """The productive share of the time."""
        return self.productive_s / self.total_s if self.total_s else 0.0

    @property
    def is_disturbed(self) -> bool:
        return self.lost_s + self.recovering_s + self.replanning_s > 0

    def values(self) -> dict[str, float]:
        """Return the values for events.jsonl."""
        values = {"goodput": self.goodput, **asdict(self)}
        return {name: round(value, 3) for name, value in values.items()}

    def __str__(self) -> str:
        return (
            f"goodput {self.goodput:.2f}: {self.productive_s:.1f} s productive, "
            f"{self.lost_s:.1f} s lost, {self.recovering_s:.1f} s recovering, "
            f"{self.replanning_s:.1f} s re-planning, {self.data_s:.1f} s data, "
            f"{self.compiling_s:.1f} s compiling, "
            f"{self.evaluating_s:.1f} s evaluating, "
            f"{self.saving_s:.1f} s saving, {self.other_s:.1f} s other"
        )


def steps_s(lines: Iterable[Mapping[str, Any]], after: int = 0) -> float:
    """Return the seconds of all steps later than `after`, by lines of metrics.jsonl."""
    return sum(
        line["step_time_s"]
        for line in lines
        if line["step"] > after and "step_time_s" in line
    )


@dataclass(kw_only=True, slots=True)
class Spent:
    """The time that a start has spent on anything but steps that count.

    Its own steps are those after `after`; `recoveries` has the seconds by phase of each
    recovery; `parts_s` are seconds by part, outside steps and recoveries.
    """

    after: int
    lost_s: float = 0.0
    recoveries: list[Mapping[str, float]] = field(default_factory=list)
    parts_s: dict[Part, float] = field(default_factory=dict)

    @contextmanager
    def on(self, part: Part) -> Iterator[None]:
        """Count the time within `with` for this part, without recoveries meanwhile."""
        begin_s, recovered_s = time.perf_counter(), self._recovered_s
        try:
            yield
        finally:
            took_s = time.perf_counter() - begin_s - (self._recovered_s - recovered_s)
            self.parts_s[part] = self.parts_s.get(part, 0.0) + took_s

    @property
    def _recovered_s(self) -> float:
        return sum(sum(seconds.values()) for seconds in self.recoveries)

    def undo(self, lines: Iterable[Mapping[str, Any]], step: int) -> None:
        """Count these lines of metrics.jsonl as lost: steps after `step` come again."""
        self.lost_s += steps_s(lines, self.after)
        self.after = min(self.after, step)

    def goodput(self, lines: Iterable[Mapping[str, Any]], total_s: float) -> Goodput:
        """Return the parts of `total_s`, given the current lines of metrics.jsonl."""
        productive_s = steps_s(lines, self.after)
        recovered_s, parts_s = self._recovered_s, self.parts_s
        replanning_s = sum(seconds.get(_REPLAN, 0.0) for seconds in self.recoveries)
        known_s = productive_s + self.lost_s + recovered_s + sum(parts_s.values())
        return Goodput(
            productive_s=productive_s,
            lost_s=self.lost_s,
            recovering_s=recovered_s - replanning_s,
            replanning_s=replanning_s,
            other_s=total_s - known_s,
            data_s=parts_s.get("data", 0.0),
            compiling_s=parts_s.get("compiling", 0.0),
            evaluating_s=parts_s.get("evaluating", 0.0),
            saving_s=parts_s.get("saving", 0.0),
        )
