# SPDX-License-Identifier: Apache-2.0
"""A run on workers in other processes: starting them, driving them, losing one.

Owns `FleetDriver` and who starts workers. Does not own what workers do (`worker.py`),
nor the controller's side of it (`hetjax/runtime/fleet.py`).
"""

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from hetjax.plans.plan import Plan
from hetjax.runtime.control import Crew
from hetjax.runtime.fleet import Fleet, FleetStep
from hetjax.runtime.processes import Processes
from hetjax.runtime.serving import Post
from hetjax.runtime.worker import Observer

LOGS = "logs"  # in the run directory
_START_S = 120.0  # until a worker has called: importing JAX on a busy machine
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker process runs: words before its command, and its address there."""

    prefix: tuple[str, ...] = ()
    address: str = LOOPBACK


def on_this_machine(
    plan: Plan,
    logs: Path,
    stack: ExitStack,
    *,
    places: Mapping[str, Place] | None = None,
    address: str = LOOPBACK,
    module: str = "hetjax.training.worker",
) -> Fleet:
    """Start a process for each node of the plan; `stack` ends them all.

    They find the controller at `address`, and each other at those of their `places`.
    Raises WorkerLost where one does not come up.
    """
    processes = stack.enter_context(Processes(logs=logs))
    there = {s.node: (places or {}).get(s.node, Place()) for _, _, s in plan.stages()}
    addresses = {worker: place.address for worker, place in there.items()}
    fleet, posts = posted(plan, address, addresses, stack)
    for post in posts:
        command = [*there[post.worker].prefix, sys.executable, "-m", module]
        processes.start(post, command, os.environ)
    fleet.crew.wait_for(fleet.workers, _START_S, processes.check)
    return fleet


def posted(
    plan: Plan, address: str, addresses: Mapping[str, str], stack: ExitStack
) -> tuple[Fleet, list[Post]]:
    """Give a controller that listens at `address`, and the posts of its workers.

    `addresses` are theirs, by name; `stack` ends the controller.
    """
    secret = secrets.token_bytes(32)
    crew = Crew(f"{address}:0", secret)
    stack.callback(crew.close)
    fleet = Fleet(plan, crew)
    posts = [
        Post(
            worker=worker,
            controller=crew.address,
            listen=f"{addresses[worker]}:0",
            secret=secret,
        )
        for worker in fleet.workers
    ]
    return fleet, posts


class FleetDriver:
    """The run on a fleet that has its state."""

    def __init__(
        self,
        fleet: Fleet,
        stack: ExitStack,
        *,
        checkpoints: Path,
        keep: int,
        num_validation: int,
        host: Mapping[str, Any],
    ) -> None:
        self._fleet, self._stack = fleet, stack
        self._checkpoints, self._keep, self._host = checkpoints, keep, host
        self.plan, self.num_validation = fleet.plan, num_validation

    def step(self, number: int, observer: Observer | None) -> FleetStep:
        assert observer is None, "--trace is refused with workers"
        return self._fleet.step(number)

    def validate(self, number: int) -> float:
        return self._fleet.evaluate([number])

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self._fleet.next_logits(tokens)

    def save(self, step: int) -> bool:
        host = {**self._host, "step": step}
        return self._fleet.save(self._checkpoints, step, self._keep, host)

    def wait_saved(self) -> None:
        self._fleet.wait_saved()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let workers finish what they write, unless something went wrong."""
        try:
            if kind is None:
                self._fleet.end()
        finally:
            self._stack.close()
