# SPDX-License-Identifier: Apache-2.0
"""Defines why a run rolls back to its newest checkpoint, and when it gives up instead.

Owns the reasons, and the rule for the next one, a function of the past rollbacks. Does
not own their detection nor the rollback itself (`loop.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hetjax.errors import RunFailed
from hetjax.plans.plan import Plan
from hetjax.runtime.execution.checking.checks import Disagreement
from hetjax.training.recovery.not_finite import diverged
from hetjax.training.settings.config import RunConfig

_MOST_UNNAMED = 3  # equal disagreements with unknown nodes
_MOST_SPIKES = 3  # spikes after the same checkpoint


class RollbackNeeded(Exception):
    """The run must not continue from the state after `step`.

    `got` says why, `name` is the event's name; `nodes` are to blame, if that is known.
    """

    name = "not-finite"

    def __init__(self, step: int, got: str, nodes: Sequence[str] = ()) -> None:
        super().__init__(got)
        self.step, self.got, self.nodes = step, got, tuple(sorted({*nodes}))


class NotFinite(RollbackNeeded):
    """A step, or the weights after it, have numbers that are not finite."""


class Disagreed(RollbackNeeded):
    """Holders of the same layers have unlike bits."""

    name = "disagreed"


class Spiked(RollbackNeeded):
    """A loss is far beyond the usual."""

    name = "spiked"


@dataclass(frozen=True, slots=True)
class PastRollback:
    """A past rollback: its reason, the nodes that it named, and the step it went to."""

    why: str
    nodes: tuple[str, ...]
    to: int | None


RollbackVerdict = Literal["go back", "leave the nodes", "give up"]


def judge_rollback(
    before: Sequence[PastRollback], now: PastRollback
) -> RollbackVerdict:
    """Return what to do: the same fault after the same checkpoint is not chance.

    At the second disagreement that names the same nodes, the run leaves them out. It
    gives up at the third that names none, and at the third spike.
    """
    times = 1 + before.count(now)
    if now.why == Disagreed.name and now.nodes:
        return "go back" if times == 1 else "leave the nodes"
    most = _MOST_SPIKES if now.why == Spiked.name else _MOST_UNNAMED
    return "go back" if times < most else "give up"


class Rollbacks:
    """The past rollbacks of a run, and what to do about the next one."""

    def __init__(self) -> None:
        self._before: list[PastRollback] = []
        self._bad_step = -1  # the last one with numbers that were not finite

    def judge(
        self, bad: RollbackNeeded, kept: int | None, config: RunConfig
    ) -> RollbackVerdict:
        """Return what to do about `bad`; `kept` is the step of the newest checkpoint.

        Raises RunFailed if a rollback would not help.
        """
        if isinstance(bad, NotFinite):
            self._check_was_chance(bad, kept, config)
            return "go back"
        now = PastRollback(bad.name, bad.nodes, kept)
        then = judge_rollback(self._before, now)
        self._before.append(now)
        if then == "give up":
            keeps = keeps_spiking if isinstance(bad, Spiked) else keeps_disagreeing
            raise keeps(bad, kept)
        return then

    def _check_was_chance(
        self, bad: NotFinite, kept: int | None, config: RunConfig
    ) -> None:
        """Raise RunFailed if bad numbers come again, at the same step or before.

        Raise it also if no checkpoint is `kept`.
        """
        if kept is None:
            raise diverged(bad.got, config, kept)
        if bad.step <= self._bad_step:
            raise diverged(f"{bad.got}, again after rolling back", config, kept)
        self._bad_step = bad.step


def disagreed(step: int, found: Sequence[Disagreement], plan: Plan) -> Disagreed:
    """Return the exception for the disagreements found in the state after this step."""
    nodes = {(r, s): stage.node for r, s, stage in plan.stages()}
    odd = {nodes[stage] for each in found for stage in each.odd}
    holders = sorted({nodes[stage] for each in found for stage in each.holders})
    layers = ", ".join(_layers(each.group) for each in found)
    who = f"{', '.join(sorted(odd))} (held by {', '.join(holders)})"
    if not odd:
        who = f"{' and '.join(holders)} (unknown which)"
    return Disagreed(
        step, f"different bits of {layers} after step {step} on {who}", [*odd]
    )


def keeps_disagreeing(bad: RollbackNeeded, saved: int | None) -> RunFailed:
    """Return the error for a run whose replicas differ again and again."""
    same = f"the last checkpoint is of step {saved}, where all were the same"
    state = same if saved else "no checkpoint is saved"
    who = ", ".join(bad.nodes) or "the nodes named"
    return RunFailed(
        got=f"{bad.got}, again after rolling back",
        allowed=f"replicas with the same bits; {state}",
        fix=f"test the memory and the devices of {who}; remove what is broken from the "
        "cluster file and run the same command again, or add --digest-every 0 to train "
        "without comparing",
    )


def keeps_spiking(bad: RollbackNeeded, saved: int | None) -> RunFailed:
    """Return the error for repeated spikes after the same checkpoint."""
    return RunFailed(
        got=f"{bad.got}, again after rolling back to step {saved}",
        allowed="an occasional spike, whose batches are left out",
        fix="resume with a lower --optimizer.learning-rate, with a larger "
        "--spike-factor, or with --on-spike warn",
    )


def _layers(group: object) -> str:
    if isinstance(group, str):
        return group
    first, end = group  # pyright: ignore[reportGeneralTypeIssues]
    return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
