# SPDX-License-Identifier: Apache-2.0
"""Describes the outcomes of replanning: what a plan would gain, what a move has gained.

Owns the messages and the values in `events.jsonl`. Does not own when they are due
(`replanning.py`).
"""

from dataclasses import dataclass
from typing import Any, Literal

from hetjax.costs.certainty.beliefs import CredibleInterval
from hetjax.costs.certainty.worth_moving import Move
from hetjax.files.parsing import json_value
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import plan_json

# `stay`: the gain is too uncertain; `say`: the run prints a line; `move`: it moves
MoveVerdict = Literal["stay", "say", "move"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanWeighed:
    """Another plan `to` was weighed against the current; `kept` is its file, if any."""

    name = "weighed"
    step: int
    verdict: MoveVerdict
    move: Move
    plan: Plan
    to: Plan
    kept: str = ""

    def values(self) -> dict[str, Any]:
        """Return the figures as they stand in `events.jsonl`."""
        move = self.move
        return {
            "verdict": self.verdict,
            "gain": _rounded(move.gain),
            "probability": round(move.probability, 3),
            "steps": move.num_steps,
            "step_time_s": round(move.step_s, 4),
            "move_s": _rounded(move.cost_s),
            "plan": json_value(plan_json(self.plan)),
            "to": json_value(plan_json(self.to)),
        }

    def __str__(self) -> str:
        """Return one line; an empty string if the run stays."""
        move = self.move
        gain, cost = move.gain.as_factor(), f"about {move.cost_s.median:.0f} s"
        steps = f"the next {move.num_steps:,} steps"
        if self.verdict == "move":
            return f"moving to another plan: {gain} over {steps}; it takes {cost}"
        if self.verdict == "say":
            now = f"; to move now, stop the run and resume it with --plan {self.kept}"
            return (
                f"another plan would gain {gain} over {steps}; moving costs {cost}. "
                f"--replan auto moves by itself{now if self.kept else ''}"
            )
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveMeasured:
    """What a move has gained and cost, beside what was predicted."""

    name = "moved"
    step: int
    predicted: Move
    gain: CredibleInterval
    pause_s: float

    @property
    def is_worse(self) -> bool:
        """Whether steps are slower than before, by more than their noise."""
        return self.gain.high < 1

    def values(self) -> dict[str, Any]:
        """Return the figures as they stand in `events.jsonl`."""
        return {
            "gain": _rounded(self.gain),
            "predicted_gain": _rounded(self.predicted.gain),
            "pause_s": round(self.pause_s, 3),
            "predicted_pause_s": _rounded(self.predicted.cost_s),
            "is_worse": self.is_worse,
        }

    def __str__(self) -> str:
        how = "slower steps" if self.is_worse else "gain"
        then = "; the run keeps this plan" if self.is_worse else ""
        return (
            f"{how} after the move: {self.gain.as_factor()}, predicted "
            f"{self.predicted.gain.as_factor()}; the pause took {self.pause_s:.1f} s, "
            f"predicted about {self.predicted.cost_s.median:.0f} s{then}"
        )


Outcome = PlanWeighed | MoveMeasured


def _rounded(interval: CredibleInterval) -> list[float]:
    """Return low, median and high."""
    return [round(x, 4) for x in (interval.low, interval.median, interval.high)]
