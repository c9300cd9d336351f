# SPDX-License-Identifier: Apache-2.0
"""Weighs another plan when something has become slow or has recovered.

The run then reports the plan or moves to it. Owns when a plan is weighed, the assumed
cost of a move, how long it has to pay off, and what is measured after it. A plan is
weighed once for each finding, and after a move only later findings count. Does not own
the odds (`costs/certainty/worth_moving.py`), the weighing (`weighing.py`), the messages
(`outcomes.py`) nor the move (`training/recovery/driver.py`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.beliefs import CredibleInterval, lognormal
from hetjax.costs.certainty.worth_moving import Move, measured_gain
from hetjax.costs.slowness.detector import NUM_COLD
from hetjax.costs.slowness.findings import Slowdown
from hetjax.costs.slowness.known import Slowness
from hetjax.plans.plan import Plan
from hetjax.training.recovery.recovered import Recovered, Rerouted
from hetjax.training.replanning.outcomes import (
    MoveMeasured,
    MoveVerdict,
    Outcome,
    PlanWeighed,
)
from hetjax.training.replanning.weighing import Errors, Weighed

_KEPT, NUM_MEASURED = 64, 16  # steps that count before a move, and after it
# Standard deviations of the logarithm of a move's cost, which is estimated by a former
# move of the run, or by its start
_LIKE_A_MOVE, _LIKE_THE_START = 0.2, 0.4
_LEAST_S = 1.0  # of a move, if the start took no time
_LONGEST_S = 30 * 86400.0


class Weighing(Protocol):
    """A plan that is being weighed elsewhere."""

    def found(self) -> Weighed | None:
        """Return a better plan once it is found, else None, without waiting."""
        ...

    def close(self) -> None:
        """Abandon the weighing."""
        ...


Begin = Callable[[Cluster, Plan, Slowness, Errors, float], Weighing]


@dataclass(kw_only=True)
class Replanning:
    """Follows the steps of a run; it does nothing without `weighs`.

    `move_to` asks the driver for a move, or with None withdraws the request. Without it
    the run only prints a line, and `keep` writes the plan to a file. The start took
    `start_s` to prepare its programs. A slow CPU that is a device of the run also
    prepares programs more slowly; a slow accelerator does not.
    """

    weighs: Begin | None = None
    move_to: Callable[[Plan | None], None] | None = None
    keep: Callable[[Plan], str] = lambda plan: ""
    start_s: float = 0.0
    _now: tuple[Plan, Cluster] | None = None
    _steps: deque[tuple[int, float]] = field(
        default_factory=lambda: deque[tuple[int, float]](maxlen=_KEPT)
    )
    _num_cold: int = 0  # coming steps whose times are unusual
    _prepares: float = 1.0  # factor on the time to prepare programs since the start
    _errors: dict[str, float] = field(default_factory=dict)
    _since: int = 0  # the first step at the present speed
    _weighing: Weighing | None = None
    _asked: tuple[PlanWeighed, Sequence[float]] | None = None  # with times before it
    _measuring: tuple[PlanWeighed, Sequence[float], float] | None = None
    _pauses_s: list[float] = field(default_factory=list)
    _moved_at: int | None = None

    def begin(self, plan: Plan, cluster: Cluster) -> None:
        """Follow the steps of a plan from here on."""
        self.close()
        self._now, self._measuring = (plan, cluster), None
        self._steps.clear()

    def after(
        self,
        step: int,
        step_time_s: float,
        num_left: int,
        found: Sequence[Slowdown] = (),
        slow: Slowness | None = None,
    ) -> list[Outcome]:
        """Take a step's time, the new findings, and all that is `slow` now.

        Return plans that have been weighed and moves that have been measured.
        `num_left` steps are to come.
        """
        if self.weighs is None:
            return []
        if self._num_cold:
            self._num_cold -= 1
        else:
            self._steps.append((step, step_time_s))
        evidence = [f for f in found if f.subject.node or f.subject.ends]
        if evidence and slow is not None:
            self._weigh(evidence, slow, num_left)
        return [*self._decided(step, num_left), *self._measured(step)]

    def _weigh(
        self, evidence: Sequence[Slowdown], slow: Slowness, num_left: int
    ) -> None:
        """Start to weigh with what is known now; discard earlier weighing."""
        assert self.weighs is not None and self._now is not None
        self.close()
        self._since = max(finding.since for finding in evidence)
        self._errors |= {f.subject.node: f.error for f in evidence if f.subject.node}
        plan, cluster = self._now
        cpus = (slow.factor(n.name) for n in cluster.nodes if n.device == "cpu")
        self._prepares = max((1.0, *cpus))
        horizon_s = min(_LONGEST_S, num_left * self._step_s())
        self._weighing = self.weighs(cluster, plan, slow, self._errors, horizon_s)

    def _times_s(self) -> list[float]:
        return [time_s for at, time_s in self._steps if at >= self._since]

    def _step_s(self) -> float:
        """Return the median step time since something has changed."""
        return median(self._times_s() or [time_s for _, time_s in self._steps] or [0.0])

    def _decided(self, step: int, num_left: int) -> list[Outcome]:
        """Return the verdict once the other plan is there; request a move if due."""
        weighed = self._weighing.found() if self._weighing else None
        if weighed is None or self._now is None:
            return []
        self.close()
        move = Move(
            gain=weighed.gain,
            cost_s=self._cost_s(weighed.move_s),
            step_s=self._step_s(),
            num_steps=self._num_steps(step, num_left),
        )
        moves = self.move_to is not None
        verdict: MoveVerdict = "stay"
        if move.is_worth_it:
            verdict = "move" if moves else "say"
        outcome = PlanWeighed(
            step=step,
            verdict=verdict,
            move=move,
            plan=self._now[0],
            to=weighed.plan,
            kept=self.keep(weighed.plan) if verdict == "say" else "",
        )
        if verdict == "move" and self.move_to is not None:
            self._asked = outcome, self._times_s()
            self.move_to(weighed.plan)
        return [outcome]

    def _num_steps(self, step: int, num_left: int) -> int:
        """Return the number of steps within which a move has to pay off.

        The first move has the rest of the run. What has changed since a move may change
        again. So the next move has no more steps than have passed since the last one:
        something that comes and goes then costs no more than it gains.
        """
        if self._moved_at is None:
            return num_left
        return min(num_left, step - self._moved_at)

    def _cost_s(self, move_s: float) -> CredibleInterval:
        """Return a move's cost: the last move's, else the start's, plus `move_s`.

        `move_s` is how long sending the bytes of this move takes.
        """
        start_s = self.start_s * self._prepares
        like_s = self._pauses_s[-1] if self._pauses_s else start_s
        sigma = _LIKE_A_MOVE if self._pauses_s else _LIKE_THE_START
        return lognormal(max(like_s, _LEAST_S) + move_s, sigma**2)

    def _measured(self, step: int) -> list[Outcome]:
        """Return what the move has gained, once there are enough steps."""
        if self._measuring is None or len(self._steps) < NUM_MEASURED:
            return []
        (asked, before_s, pause_s), self._measuring = self._measuring, None
        return [
            MoveMeasured(
                step=step,
                predicted=asked.move,
                gain=measured_gain(before_s, [time_s for _, time_s in self._steps]),
                pause_s=pause_s,
            )
        ]

    def on_recovery(self, what: Recovered | Rerouted) -> None:
        """Follow a change of plan, whether it was requested here or not."""
        self._num_cold = NUM_COLD
        if isinstance(what, Rerouted) or what.plan is None or what.cluster is None:
            if isinstance(what, Rerouted):
                self.close()
            return
        asked, pause_s = self._asked, sum(what.seconds.values())
        self.begin(what.plan, what.cluster)
        self._pauses_s.append(pause_s)
        if asked is not None and what.plan == asked[0].to:
            self._measuring = *asked, pause_s
            self._moved_at = what.step

    def close(self) -> None:
        """Stop weighing, and withdraw a requested move."""
        if self._weighing is not None:
            self._weighing.close()
            self._weighing = None
        if self._asked is not None and self.move_to is not None:
            self._asked = None
            self.move_to(None)
