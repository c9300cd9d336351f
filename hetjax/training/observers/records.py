# SPDX-License-Identifier: Apache-2.0
"""Defines the records that observers get: one frozen value for each event of a run.

Owns the records, and which lines of a run's journals become one. Does not own these
lines (`loop.py`, `recorder.py`) nor how records reach observers (`dispatch.py`). Steps
are counted as in `metrics.jsonl`; if a record comes again, as after a recovery, the
later one counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from hetjax.training.directory.best import VAL_LOSS

_OF_SLOW = ("what", "who", "factor", "since", "evidence")

Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRecord:
    """The run has its state and begins, or resumes, after `step` steps.

    `run` is its identity, `settings` are those of `config.json` by dotted name.
    """

    run: str
    run_dir: Path
    step: int
    steps: int
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step is done; `metrics` are the numbers of its line in `metrics.jsonl`.

    `skipped` says why, if the step changed no weights: it then has no loss.
    """

    step: int
    metrics: Mapping[str, float]
    skipped: str | None = None

    @property
    def loss(self) -> float | None:
        """Nats per token."""
        return self.metrics.get("loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """The state after `step` was evaluated; `metrics` are as in `StepRecord`."""

    step: int
    metrics: Mapping[str, float]

    @property
    def loss(self) -> float:
        """Nats per token, over the validation text."""
        return self.metrics[VAL_LOSS]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRecord:
    """The checkpoint of `step` is complete."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LostRecord:
    """A worker is lost, with `step` steps done; the run recovers next, or fails."""

    step: int
    worker: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveredRecord:
    """All current workers are at `step`, and continue; later steps come again.

    Also made after an orderly change of nodes. `seconds` is how long that took.
    """

    step: int
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRecord:
    """From step `since` on, `who` takes `factor` times as long as before, or as peers.

    At `step` that became clear. `what` is the kind of `who`: node, device, stage, link,
    batches of a replica, or all of the run. If `is_over`, `who` has become as fast as
    before, and `factor` is how slow it was.
    """

    step: int
    what: str
    who: str
    factor: float
    since: int
    evidence: str
    is_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRecord:
    """The run ends here, at `step`; the last record.

    finished: all steps are done; stopped: on request, and resumable; failed: by an
    error, which `reason` has.
    """

    step: int
    outcome: Outcome
    reason: str = ""


Record = (
    StartRecord
    | StepRecord
    | EvaluationRecord
    | SavedRecord
    | LostRecord
    | RecoveredRecord
    | SlowRecord
    | EndRecord
)


def record_of_line(line: Mapping[str, Any]) -> Record | None:
    """Return the record of a journal's line; None if it has none.

    >>> record_of_line({"event": "saved", "step": 20, "time": "..."})
    SavedRecord(step=20)
    >>> record_of_line({"event": "best", "step": 20, "time": "...", "val_loss": 1.5})
    """
    step, event = line["step"], line.get("event")
    match event:
        case None if VAL_LOSS in line:
            return EvaluationRecord(step=step, metrics=_numbers(line))
        case None:
            reason = line.get("reason") if line.get("skipped") else None
            return StepRecord(step=step, metrics=_numbers(line), skipped=reason)
        case "saved":
            return SavedRecord(step=step)
        case "recovered":
            took_s = sum(line["seconds"].values())
            return RecoveredRecord(step=step, reason=line["reason"], seconds=took_s)
        case "rerouted":
            took_s = line["seconds"]
            return RecoveredRecord(step=step, reason=line["reason"], seconds=took_s)
        case "slow" | "as_before":
            return SlowRecord(
                step=step,
                **{name: line[name] for name in _OF_SLOW},
                is_over=event == "as_before",
            )
        case "finished":
            return EndRecord(step=step, outcome="finished")
        case "preempted":
            return EndRecord(step=step, outcome="stopped", reason=line["reason"] or "")
    return None


def _numbers(line: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the numbers of a line without its step, in a read-only mapping."""
    found = {
        name: value
        for name, value in line.items()
        if type(value) in (int, float) and name != "step"
    }
    return MappingProxyType(found)
