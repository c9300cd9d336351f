# SPDX-License-Identifier: Apache-2.0
"""Holds what is known of a run, and what follows from it: medians, sums, its state.

Owns the headline numbers. Does not own which metrics are among them (`metrics.py`), the
files that they are read from (`training/observers/run_reports.py`) nor how they are
shown (`run_report.py`, `html/run_page.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.report.certainty import how_sure_lines, memory_lines
from hetjax.report.colours import TIME
from hetjax.report.journals import move_line, slow_line
from hetjax.report.metrics import HEADLINES, Metric
from hetjax.report.prediction import guesses_a_cpu
from hetjax.schedule.certainty import Certainty
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulation.trace import Span

Line = Mapping[str, Any]
_ENDS = ("finished", "preempted")
_BEGINS = ("started", "restored")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What the files of a run say, and a prediction of its step.

    `settings` are those of `config.json` by dotted name, `metrics` and `events` the
    lines of the journals. `predicted` is a step under the current plan, or None for the
    reason in `why_not_predicted`; `certainty` is how sure that is. If `is_simulated`,
    devices were simulated, so that measured times are not theirs. `usd_per_hour` is the
    price of the nodes in use, if known; `traced` is the content of `trace.json`.
    """

    run_dir: Path
    settings: Mapping[str, Any]
    cluster: Cluster
    plan: Plan
    metrics: Sequence[Line]
    events: Sequence[Line]
    predicted: Predicted | None
    certainty: Certainty | None = None
    why_not_predicted: str
    is_simulated: bool
    usd_per_hour: float | None
    traced: Sequence[Span] = ()

    @property
    def is_comparable(self) -> bool:
        """Whether the predicted step may be compared with the measured ones."""
        if self.predicted is None or self.is_simulated:
            return False
        return not guesses_a_cpu(self.predicted, self.cluster)

    @property
    def how_sure(self) -> list[str]:
        """Lines on how sure the prediction is; none on a step that is only a guess."""
        lines = list[str]()
        if self.certainty is not None and (self.is_simulated or self.is_comparable):
            lines += how_sure_lines(self.certainty)
        if self.predicted is not None:
            lines += memory_lines(self.predicted)
        return lines

    @cached_property
    def steps(self) -> list[Line]:
        """The lines of `metrics` for steps."""
        return [line for line in self.metrics if "loss" in line]

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return step and value of a number, without skipped steps."""
        lines = (x for x in self.metrics if name in x and not x.get("skipped"))
        return [(line["step"], line[name]) for line in lines]

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def state(self) -> str:
        """How the last start ended, in words."""
        kinds = {line["event"]: n for n, line in enumerate(self.events)}
        begun = max((kinds.get(kind, -1) for kind in _BEGINS), default=-1)
        ended = max((kinds.get(kind, -1) for kind in _ENDS), default=-1)
        if ended < begun or ended < 0:
            return "running, or ended without a record"
        last = self.events[ended]
        if last["event"] == "finished":
            return "finished"
        return f"stopped by {last.get('reason', 'a notice')}"

    @cached_property
    def steps_of_plan(self) -> list[Line]:
        """Steps under the current plan: only they match its prediction and price."""
        changes = [line["step"] for line in self.events if line["event"] == "replanned"]
        since = changes[-1] if changes else -1
        return [line for line in self.steps if line["step"] > since]

    def median(self, name: str) -> float | None:
        """Return the median of a number over the steps under the current plan."""
        values = [line[name] for line in self.steps_of_plan if name in line]
        return median(values) if values else None

    def _headline(self, metric: Metric) -> float | None:
        if metric.headline == "median":
            return self.median(metric.key)
        points = self.points(metric.key)
        return points[-1][1] if points else None

    @property
    def recoveries(self) -> list[Line]:
        return [line for line in self.events if line["event"] == "recovered"]

    @property
    def slow(self) -> list[str]:
        """What was slow when the last start ended, a line each."""
        found: dict[str, str] = {}
        for line in self.events:
            event, who = line["event"], str(line.get("who"))
            if event in _BEGINS:  # a new start looks anew
                found = {}
            elif event == "as_before":
                found.pop(who, None)
            elif event == "slow":
                found[who] = slow_line(line)
        return [*found.values()]

    @property
    def moves(self) -> list[str]:
        """The plans that were proposed, and the gains of moves, a line each."""
        return [
            move_line(line)
            for line in self.events
            if line["event"] == "moved" or line.get("verdict") == "say"
        ]

    @property
    def spent_s(self) -> dict[str, float] | None:
        """Seconds by their use, over all starts that came to an end."""
        lines = [line for line in self.events if line["event"] == "goodput"]
        if not lines:
            return None
        return {
            part: sum(line.get(f"{part}_s", 0.0) for line in lines) for part in TIME
        }

    @property
    def goodput(self) -> float | None:
        """The share of `spent_s` that went into steps that count."""
        spent_s = self.spent_s
        total_s = sum(spent_s.values()) if spent_s else 0.0
        return spent_s["productive"] / total_s if spent_s and total_s else None

    @property
    def usd_per_million_tokens(self) -> float | None:
        """The price at the measured speed; None if unknown or devices are simulated."""
        speed = self.median("tokens_per_s")
        if self.usd_per_hour is None or self.is_simulated or not speed:
            return None
        return self.usd_per_hour / 3600 / speed * 1e6

    def values(self) -> dict[str, Any]:
        """Return the headline numbers by name; None for unknown ones."""
        predicted = self.predicted
        return {
            "state": self.state,
            "step": self.step,
            "steps": self.settings["steps"],
            **{metric.key: self._headline(metric) for metric in HEADLINES},
            "predicted_step_time_s": predicted and predicted.simulation.step_time_s,
            "goodput": self.goodput,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "recoveries": len(self.recoveries),
        }
