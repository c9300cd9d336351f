# SPDX-License-Identifier: Apache-2.0
"""Trains on the replicas that are left, while lost workers of the others restart.

Owns when this degraded mode began, which workers it waits for, which do not take part,
and its two ends. Does not own the shares (`plans/rerouting.py`), how workers take them
over (`runtime/control/rerouting.py`), nor how all return to one state (`driver.py`).
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetjax.launchers.launcher import Launcher
from hetjax.plans.plan import Plan
from hetjax.plans.worker_map import WorkerMap, node_of
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.recovery import finish_step
from hetjax.runtime.control.rerouting import take_over
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.message import LIMITS
from hetjax.runtime.rpc.schema import Compile, Leave
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.recovery.current_plan import CurrentPlan
from hetjax.training.recovery.driver_config import DriverConfig
from hetjax.training.recovery.recovered import Clock, Rerouted


@dataclass(frozen=True, kw_only=True, slots=True)
class _Since:
    """Degraded mode since step `at`, when one of the `missing` workers was lost."""

    at: int
    lost: WorkerLost
    missing: Sequence[str]


class DegradedMode:
    """Since `begin`, the replicas that are left train on all samples."""

    def __init__(
        self, controller: Controller, launcher: Launcher, config: DriverConfig
    ) -> None:
        self._controller, self._launcher, self._config = controller, launcher, config
        self._since: _Since | None = None
        self._prepared_s: float | None = None  # when missing workers began to compile
        self._is_whole = True  # False once workers may have been rerouted
        self._aside = set[str]()  # workers whose state is not that of the run
        self.commit: StepCommit | None = None  # of a step that the loss interrupted

    @property
    def lost(self) -> WorkerLost | None:
        """The loss to recover from when degraded mode ends."""
        return self._since and self._since.lost

    @property
    def missing(self) -> Sequence[str]:
        """The restarted workers that degraded mode waits for."""
        return self._since.missing if self._since else ()

    def begin(
        self, lost: WorkerLost, plan: Plan, at: int, interrupt: Callable[[], None]
    ) -> Rerouted | None:
        """Let the complete replicas of the plan that are left go on at once.

        Lost workers restart meanwhile. Returns None if no replica is complete, or if
        another worker is lost meanwhile: the caller must recover. If an interrupted
        step is finished, its `commit` is kept in any case.
        """
        clock, connections, self.commit = Clock(), self._controller.connections, None
        if lost.worker in connections.workers:
            connections.lose(lost.worker, lost.reason)
        left = [w for w in connections.workers if w not in self.missing]
        with connections.interrupted_by(interrupt):
            found = self._taken_over(plan, left)
        if found is None:
            return None
        self._start(lost, plan, left, found)
        clock.lap("reroute")
        replicas = self._controller.plan.replicas
        return Rerouted(
            reason=str(lost),
            replicas=[r for r, replica in enumerate(replicas) if replica.is_idle],
            from_step=at,
            step=found,
            seconds=clock.seconds,
        )

    def _taken_over(self, plan: Plan, left: Sequence[str]) -> int | None:
        """Return the step count of the workers that go on; None if none can."""
        controller = self._controller
        self._is_whole = False
        abreast = [worker for worker in left if worker in controller.workers]
        try:
            self.commit = finish_step(controller.connections, abreast)
            found = take_over(controller, plan, left, self._config.transport)
        except WorkerLost as another:
            controller.connections.lose(another.worker, another.reason)
            return None
        if found is not None:
            self._aside = {*left} - {*controller.workers}
        return found

    def _start(
        self, lost: WorkerLost, plan: Plan, left: Sequence[str], at: int
    ) -> None:
        """Start the missing workers that were not started before."""
        members = WorkerMap(plan, self._controller.members.nodes)
        missing = [worker for worker in members.workers if worker not in left]
        self._launcher.begin([w for w in missing if w not in self.missing])
        self._since = _Since(at=at, lost=lost, missing=missing)
        self._prepared_s = None

    def is_over(self, at: int, now: CurrentPlan) -> bool:
        """Return whether degraded mode can end, after at least one step.

        All missing workers must have connected and compiled the current plan's
        programs. If one is lost or too slow, an ordinary recovery waits for it.
        """
        since = self._since
        if since is None or since.at == at:
            return False
        try:
            return self._launcher.are_there(since.missing) and self._are_ready(now)
        except WorkerLost as lost:
            warnings.warn(f"{lost}: it is started once more", stacklevel=2)
            return True

    def _are_ready(self, now: CurrentPlan) -> bool:
        """Let missing workers compile while the others train, up to a time limit.

        Return whether they are done or out of time. Also return True, without letting
        any compile, if hosts of one node would have to compile together.
        """
        controller, missing = self._controller, self.missing
        if any(len(controller.members.hosts(node_of(w))) > 1 for w in missing):
            return True
        if self._prepared_s is None:
            self._prepared_s = time.monotonic()
            controller.begin_compiling(now.settings, missing)
            return False
        is_late = time.monotonic() > self._prepared_s + LIMITS[Compile].seconds
        return is_late or controller.are_compiled(missing)

    def taking_part(self, workers: Sequence[str]) -> list[str]:
        """Return the workers whose state is that of the run, or was a step ago."""
        return [worker for worker in workers if worker not in self._aside]

    def end(self, plan: Plan, workers: Sequence[str]) -> None:
        """Switch the `workers` that were built for the plan back to all of it.

        Workers that did not take part lack the run's state until `forget`.
        """
        if not self._is_whole:
            built_for = WorkerMap(plan, self._controller.members.nodes).workers
            self._controller.reroute(plan, [w for w in workers if w in built_for])
            self._is_whole = True

    def forget(self) -> None:
        """Leave degraded mode: all workers have one state again."""
        self._since = None
        self._aside.clear()

    def dismiss(self) -> None:
        """Dismiss workers that do not take part; a node's first host leaves last."""
        controller = self._controller
        others = {*controller.connections.workers} - {*controller.workers}
        first = {controller.members.hosts(node_of(worker))[0] for worker in others}
        for leaving in (others - first, others & first):
            controller.connections.ask(dict.fromkeys(sorted(leaving), Leave()))
