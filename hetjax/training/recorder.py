# SPDX-License-Identifier: Apache-2.0
"""Records what happens in a run: lines in its journals, and messages to users.

Owns the line and the message for each event between the run's start and its end. Does
not own the journals as files (`directory/journal.py`) nor the events themselves
(`loop.py`, `recovery/driver.py`).
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hetjax.costs.slowness.findings import Slowdown
from hetjax.costs.slowness.step_times import StepTimes
from hetjax.launchers.reprovisioning import LOG, CommandEnded
from hetjax.report.progress import Display, metrics_line
from hetjax.runtime.execution.commit import StepCommit
from hetjax.training.directory import rundir
from hetjax.training.directory.best import BEST, VAL_LOSS
from hetjax.training.directory.journal import Journal, read_journal
from hetjax.training.directory.own_disks import APART, folders_apart
from hetjax.training.observers.goodput import Goodput
from hetjax.training.observers.step_comparison import StepComparison
from hetjax.training.recovery.not_finite import skipped_line
from hetjax.training.recovery.notice_sources import Notice
from hetjax.training.recovery.recovered import Recovered, Rerouted
from hetjax.training.replanning.outcomes import Outcome


class Recorder:
    """Writes to the journals of a run, and shows messages."""

    def __init__(
        self,
        run_dir: Path,
        metrics: Journal,
        events: Journal,
        shown: Display,
        comparison: StepComparison | None = None,
    ) -> None:
        self._run_dir, self._metrics, self._events = run_dir, metrics, events
        self._shown, self._comparison = shown, comparison

    def note(self, text: str) -> None:
        """Show a message, and write it only to the log."""
        self._shown.note(text)

    def event(self, name: str, step: int, **details: Any) -> None:
        """Append an event to events.jsonl."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._events.append({"event": name, "step": step, "time": now, **details})

    def step(self, line: dict[str, Any]) -> None:
        """Record a step that was trained."""
        self._metrics.append(line)
        self._shown.trained(line)

    def skipped(
        self, step: int, commit: StepCommit, step_time_s: float, learning_rate: float
    ) -> None:
        """Record a step that changed no weights."""
        line = skipped_line(step, commit, step_time_s, learning_rate)
        self._metrics.append(line)
        self.note(f"step {step} skipped: {line['reason']}")

    def compare(
        self, step: int, step_time_s: float, parts: StepTimes | None = None
    ) -> None:
        """Record once per plan how measured and predicted step time compare.

        `parts` are the times of the same step, if they were measured. A prediction may
        take a second.
        """
        if parts is not None and parts.step != step:
            parts = None
        found = self._comparison and self._comparison.add(step_time_s, parts)
        if found is not None:
            self.event("compared", step, **found.values())
            self.note(str(found))

    def slow(self, finding: Slowdown) -> None:
        """Record that something has become slow, or is as before again."""
        name = "as_before" if finding.is_over else "slow"
        self.event(name, finding.step, **finding.values())
        self.note(str(finding))
        if self._comparison is not None:
            self._comparison.slow()

    def replanning(self, outcome: Outcome) -> None:
        """Record that another plan was weighed, or what a move to it has gained."""
        self.event(outcome.name, outcome.step, **outcome.values())
        if words := str(outcome):
            self.note(words)

    def evaluation(self, line: dict[str, Any], num_steps: int) -> None:
        """Record a validation loss."""
        self._metrics.append(line)
        self.note(metrics_line(line, num_steps))

    def apart(self, folders: Mapping[str, str], step: int) -> None:
        """Record which workers do not see the run's directory, if that has changed."""
        if folders != folders_apart(self._run_dir):
            self.event(APART, step, folders=dict(folders))

    def saved(self, step: int) -> None:
        """Record a checkpoint that is complete."""
        self.event("saved", step)

    def best(self, step: int, loss: float) -> None:
        """Record that another checkpoint is the best one."""
        self.event(BEST, step, **{VAL_LOSS: loss})

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop the metrics of steps after this one, and return them."""
        return self._metrics.rewind(step)

    def write_again(self) -> None:
        """Write both journals to new files, if their files were removed."""
        self._metrics.write_again()
        self._events.write_again()

    def notice(self, notice: Notice, step: int, goes_on: bool) -> None:
        """Record a request to stop, or to go on without a node."""
        grace_s, node = round(notice.grace_s, 1), notice.node
        self.event("noticed", step, node=node, source=notice.source, grace_s=grace_s)
        if node is not None:
            then = "continues without it after this step" if goes_on else "stops"
            self.note(
                f"{notice.source}: node {node!r} leaves in {grace_s:g} s; the run "
                f"{then}"
            )

    def reprovisioned(
        self, asked: CommandEnded, step: int, *, is_noted: bool = False
    ) -> None:
        """Record that a command which asks for machines has ended.

        `is_noted`: users have read it already.
        """
        self.event(
            "reprovisioned",
            step,
            nodes=list(asked.nodes),
            code=asked.code,
            seconds=round(asked.took_s, 1),
            **({"error": asked.error} if asked.error else {}),
        )
        if not is_noted:
            self.note(reprovisioned_line(asked))

    def recovery(self, recovered: Recovered) -> None:
        """Record what a recovery has cost; write the plan that follows from it."""
        if recovered.plan is not None:
            assert recovered.cluster is not None
            rundir.write_layout(self._run_dir, recovered.cluster, recovered.plan)
            self.event("replanned", recovered.step, plan=recovered.reason)
            self.note(f"new plan:\n{recovered.plan}")
            if self._comparison is not None:
                self._comparison.begin(recovered.plan, recovered.cluster)
        seconds = {phase: round(s, 3) for phase, s in recovered.seconds.items()}
        self.event(
            "recovered",
            recovered.step,
            reason=recovered.reason,
            started=sorted(recovered.started),
            lost_steps=max(0, recovered.from_step - recovered.step),
            bytes=dict(recovered.num_bytes),
            tier_s={tier: round(s, 3) for tier, s in recovered.tier_s.items()},
            seconds=seconds,
        )
        moved = moved_bytes(recovered.num_bytes, recovered.tier_s)
        self.note(
            f"{recovered.reason}; all are at step {recovered.step} again after "
            f"{sum(seconds.values()):.1f} s ({moved or 'nothing had to move'})"
        )

    def rerouting(self, rerouted: Rerouted) -> None:
        """Record which replicas' samples others train on until these are back."""
        if self._comparison is not None:
            self._comparison.stop()
        took_s = sum(rerouted.seconds.values())
        self.event(
            "rerouted",
            rerouted.step,
            reason=rerouted.reason,
            replicas=list(rerouted.replicas),
            seconds=round(took_s, 3),
        )
        named = ", ".join(map(str, rerouted.replicas))
        self.note(
            f"{rerouted.reason}; after {took_s:.1f} s others train on the samples of "
            f"replica {named} while it restarts"
        )

    def goodput(self, found: Goodput, step: int) -> None:
        """Record what the time went into; show it if the run was disturbed."""
        self.event("goodput", step, **found.values())
        if found.is_disturbed:
            self.note(str(found))

    def resumed(self, origin: Mapping[str, Any], step: int) -> None:
        """Record where the state is from that the run resumes with."""
        missing = missing_steps(read_journal(self._run_dir / rundir.METRICS), step)
        if missing:
            self.note(
                f"{rundir.METRICS} lacks lines of steps up to {missing[-1]}: they were "
                "lost with the run directory, removed, or rolled back before a later "
                "checkpoint was found complete"
            )
        self.event("restored", step, **origin)
        if "checkpoint" in origin:
            self.note(f"resumed at step {step} from {origin['checkpoint']}")
        else:
            moved = moved_bytes(origin["bytes"], origin["seconds"])
            self.note(f"resumed at step {step} ({moved})")


def missing_steps(lines: Sequence[Mapping[str, Any]], last: int) -> list[int]:
    """Return the steps up to `last` that have no line, though later ones may.

    >>> missing_steps([{"step": 1, "loss": 2.0}, {"step": 3, "reason": "overflow"}], 4)
    [2, 4]
    """
    recorded = {line["step"] for line in lines if VAL_LOSS not in line}
    return sorted({*range(1, last + 1)} - recorded)


def moved_bytes(num_bytes: Mapping[str, int], seconds: Mapping[str, float]) -> str:
    """Return a text on how much state came from which tier."""
    return ", ".join(
        f"{n:,} bytes from {tier} in {seconds[tier]:.1f} s"
        for tier, n in num_bytes.items()
    )


def reprovisioned_line(asked: CommandEnded) -> str:
    """Return what users read of a command that asks for machines."""
    how = asked.error or f"exit code {asked.code}"
    return (
        f"--reprovision asked for {', '.join(asked.nodes)}: {how} after "
        f"{asked.took_s:.0f} s (output in {rundir.LOGS}/{LOG})"
    )
