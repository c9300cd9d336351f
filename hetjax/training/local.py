# SPDX-License-Identifier: Apache-2.0
"""A run in this process, which goes on when nodes of it come and go.

Owns driving the embedded controller, and the change to another one between two steps.
Does not own which nodes and which plan those are (`elastic/following.py`), nor runs on
workers in other processes (`elastic/driver.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from hetjax.checkpoint.format import AttemptNames
from hetjax.checkpoint.reader import Checkpoint
from hetjax.checkpoint.writer import Saver
from hetjax.data.batches import Batch
from hetjax.elastic.following import Following
from hetjax.elastic.recovered import Clock, Recovered, difference
from hetjax.plans.plan import Plan
from hetjax.runtime.outcome import StepCommit, total_loss
from hetjax.runtime.stage_runtime import StageRuntime
from hetjax.runtime.timeline import Timeline
from hetjax.schedule.trace import Span
from hetjax.training.feed import Feed

Build = Callable[[Plan], StageRuntime]


class LocalDriver:
    """The run on `runtime`, which has the state after `at` steps.

    `resumed` tells where that is from, `attempts` name its saves. Other plans are built
    by `build`; they follow `following`, None: the nodes stay as they are.
    """

    def __init__(
        self,
        runtime: StageRuntime,
        feed: Feed,
        validation: Sequence[Batch],
        saver: Saver,
        host: Mapping[str, Any],
        build: Build,
        following: Following | None,
        *,
        attempts: AttemptNames,
        at: int,
        resumed: Mapping[str, Any] | None,
    ) -> None:
        self.at, self._first, self.resumed = at, at, resumed
        self._runtime, self._feed, self._saver = runtime, feed, saver
        self._validation, self._host = validation, host
        self._build, self._following = build, following
        self._attempts = attempts
        self.plan, self.num_validation = runtime.plan, len(validation)
        self._timelines = [Timeline(runtime.plan)]  # one for each plan, in order
        self.heard: Callable[[Recovered], None] = lambda recovered: None
        self.hurried: Callable[[], bool] = lambda: False  # nothing here takes long

    def step(self, number: int, *, traced: bool = False) -> StepCommit:
        if self._following is not None:
            self._follow(self._following)
        observer = self._timelines[-1] if traced else None
        result = self._runtime.step(number, self._feed.batch(number), observer)
        self.at = number + 1
        return result

    def spans(self) -> Sequence[Span]:
        return [span for timeline in self._timelines for span in timeline.spans()]

    def validate(self, number: int) -> float:
        batch = self._validation[number]
        return total_loss(self._runtime.evaluate(0, batch)) / batch[1].size

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        logits_V = self._runtime.next_logits(0, tokens)
        assert logits_V is not None
        return logits_V

    @property
    def saved(self) -> int | None:
        newest = self._saver.newest
        if newest is None:
            return None if self.resumed is None else self._first
        return newest[0]

    @property
    def is_spoilt(self) -> bool:
        return self._saver.spoilt is not None

    def go_back(self, reason: str) -> int:
        clock, at = Clock(), self.at
        self._saver.wait()
        checkpoint = Checkpoint.open(self._saver.directory)
        self._runtime.restore(checkpoint.read)
        self._saver.spoilt, self.at = None, checkpoint.step
        clock.lap("move")
        self.heard(
            Recovered(
                reason=reason,
                plan=None,
                cluster=None,
                gone=frozenset(),
                from_step=at,
                step=self.at,
                num_bytes={},
                tier_s={},
                seconds=clock.seconds,
            )
        )
        return self.at

    def save(self, step: int) -> bool:
        host = {**self._host, "step": step, "attempt": self._attempts.new()}
        return self._saver.save(step, self._runtime.entries(), host)

    def wait_saved(self) -> None:
        self._saver.wait()

    def leave(self, node: str) -> bool:
        return self._following is not None and self._following.leave(node, self.plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._saver.close()
        self._feed.close()

    def _follow(self, following: Following) -> None:
        """Go on with the nodes of now; tell what a change has cost."""
        clock, before, cluster = Clock(), self.plan, following.cluster
        plan = following.change(before)
        if plan is None:
            return
        clock.lap("replan")
        num_bytes = {} if plan == before else {"memory": self._move(plan, clock)}
        self.heard(
            Recovered(
                reason=difference(cluster, following.cluster),
                plan=None if plan == before else plan,
                cluster=following.cluster,
                gone=frozenset(),
                from_step=self.at,
                step=self.at,
                num_bytes=num_bytes,
                tier_s={tier: clock.seconds["move"] for tier in num_bytes},
                seconds=clock.seconds,
            )
        )

    def _move(self, plan: Plan, clock: Clock) -> int:
        """The same state under another plan; returns the bytes that were placed."""
        runtime = self._build(plan)
        runtime.compile()
        clock.lap("compile")
        num_bytes = runtime.take_over(self._runtime)
        clock.lap("move")
        self._runtime, self.plan = runtime, plan
        self._timelines.append(Timeline(plan))
        return num_bytes
