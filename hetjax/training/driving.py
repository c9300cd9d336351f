# SPDX-License-Identifier: Apache-2.0
"""What the loop drives: steps, validation, samples and checkpoints of one run.

Owns the interface. Does not own the loop (`loop.py`), nor the runs themselves: in this
process (`local.py`), and on workers in other processes (`elastic/driver.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from hetjax.elastic.recovered import Recovered
from hetjax.plans.plan import Plan
from hetjax.runtime.outcome import StepCommit
from hetjax.schedule.trace import Span


class Driver(Protocol):
    """A run that has its state; a context manager that finishes what it writes."""

    heard: Callable[[Recovered], None]  # is told of every recovery
    hurried: Callable[[], bool]  # whether a recovery must be given up
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

    def step(self, number: int, *, traced: bool = False) -> StepCommit:
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

    @property
    def is_spoilt(self) -> bool:
        """Whether the checkpoint begun last was refused: weights are not finite."""
        ...

    def go_back(self, reason: str) -> int:
        """Take the state of the newest complete checkpoint again; return its step."""
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
