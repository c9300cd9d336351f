# SPDX-License-Identifier: Apache-2.0
"""What the loop drives: steps, validation, samples and checkpoints of one run.

Owns the interface, and the run in this process. Does not own the loop (`loop.py`), nor
runs on workers in other processes (`elastic.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from hetjax.checkpoint.layout import new_attempt
from hetjax.checkpoint.save import Saver
from hetjax.data.batches import Batch
from hetjax.plans.plan import Plan
from hetjax.runtime.embedded import Embedded, StepResult
from hetjax.runtime.timeline import Timeline
from hetjax.schedule.trace import Span
from hetjax.training.elastic import Recovered
from hetjax.training.feed import Feed


class Outcome(Protocol):
    """A committed step; `loss` in nats per token may wait for it."""

    @property
    def grad_norm(self) -> float: ...

    @property
    def num_tokens(self) -> int: ...

    def loss(self) -> float: ...


class Driver(Protocol):
    """A run that has its state; a context manager that finishes what it writes."""

    heard: Callable[[Recovered], None]  # is told of every recovery
    resumed: Mapping[str, Any] | None  # where the state is from; None if it is fresh

    @property
    def at(self) -> int:
        """Steps that the state has behind it."""
        ...

    @property
    def saved(self) -> int | None:
        """The newest step that has a complete checkpoint; None if there is none."""
        ...

    @property
    def plan(self) -> Plan: ...

    @property
    def num_validation(self) -> int:
        """How many batches an evaluation has."""
        ...

    def step(self, number: int, *, traced: bool = False) -> Outcome:
        """Train on the batch of this step; its actions are kept if `traced`."""
        ...

    def spans(self) -> Sequence[Span]:
        """Return when each action of the traced steps ran."""
        ...

    def validate(self, number: int) -> float:
        """Mean loss in nats per token of one validation batch."""
        ...

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """logits_V of what follows the tokens."""
        ...

    def save(self, step: int) -> bool:
        """Start a checkpoint; False if one is still being written."""
        ...

    def wait_saved(self) -> None:
        """Return once no checkpoint is being written."""
        ...

    def leave(self, node: str) -> bool:
        """Go on without this node from the next step; False if that cannot be.

        May be called from another thread.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class LocalDriver:
    """The run in this process, on the embedded controller.

    Its state is the one after `at` steps; `resumed` tells where it is from.
    """

    def __init__(
        self,
        runtime: Embedded,
        feed: Feed,
        validation: Sequence[Batch],
        saver: Saver,
        host: Mapping[str, Any],
        *,
        at: int,
        resumed: Mapping[str, Any] | None,
    ) -> None:
        self.at, self._first, self.resumed = at, at, resumed
        self._runtime, self._feed, self._saver = runtime, feed, saver
        self._validation, self._host = validation, host
        self.plan, self.num_validation = runtime.plan, len(validation)
        self._timeline = Timeline(runtime.plan)
        self.heard = lambda recovered: None  # nobody is lost in one process
        self.next_logits = runtime.next_logits

    def step(self, number: int, *, traced: bool = False) -> StepResult:
        observer = self._timeline if traced else None
        result = self._runtime.step(number, self._feed.batch(number), observer)
        self.at = number + 1
        return result

    def spans(self) -> Sequence[Span]:
        return self._timeline.spans()

    def validate(self, number: int) -> float:
        return self._runtime.evaluate([self._validation[number]])

    @property
    def saved(self) -> int | None:
        newest = self._saver.newest
        if newest is None:
            return None if self.resumed is None else self._first
        return newest[0]

    def save(self, step: int) -> bool:
        host = {**self._host, "step": step, "attempt": new_attempt()}
        return self._saver.save(step, self._runtime.entries(), host)

    def wait_saved(self) -> None:
        self._saver.wait()

    def leave(self, node: str) -> bool:
        return False  # this process leaves with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._saver.close()
        self._feed.close()
