# SPDX-License-Identifier: Apache-2.0
"""Steps by the replicas that are left, while the workers of others are started again.

Owns when this degraded mode began, which workers it waits for, which have no part in
it, and its two ends. Does not own the shares (`plans/rerouting.py`), what workers do
about them (`runtime/control/rerouting.py`), nor how all come back to one state
(`driver.py`).
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
    """What began after step `at`, for the loss of one of those that are `missing`."""

    at: int
    lost: WorkerLost
    missing: Sequence[str]


class DegradedMode:
    """Replicas that are left train on all samples, since `begin`."""

    def __init__(
        self, controller: Controller, launcher: Launcher, config: DriverConfig
    ) -> None:
        self._controller, self._launcher, self._config = controller, launcher, config
        self._since: _Since | None = None
        self._prepared_s: float | None = None  # since what is missing compiles
        self._is_whole = True  # so the workers know
        self._aside = set[str]()  # workers whose state is not that of the run
        self.commit: StepCommit | None = None  # of a step that was broken off

    @property
    def lost(self) -> WorkerLost | None:
        """The loss that is to be recovered from when degraded mode is over."""
        return self._since and self._since.lost

    @property
    def missing(self) -> Sequence[str]:
        """Workers that were started again, for the end of it."""
        return self._since.missing if self._since else ()

    def begin(
        self, lost: WorkerLost, plan: Plan, at: int, interrupt: Callable[[], None]
    ) -> Rerouted | None:
        """Let the whole replicas of the plan that are left go on at once.

        What was lost is started meanwhile. None if there are none, or if another worker
        is lost meanwhile: recover otherwise. If a step that was broken off is finished,
        its `commit` is kept in any case.
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
        """How many steps those have behind them who go on; None if nobody can."""
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
        """Start what is missing and was not begun before."""
        members = WorkerMap(plan, self._controller.members.nodes)
        missing = [worker for worker in members.workers if worker not in left]
        self._launcher.begin([w for w in missing if w not in self.missing])
        self._since = _Since(at=at, lost=lost, missing=missing)
        self._prepared_s = None

    def is_over(self, at: int, now: CurrentPlan) -> bool:
        """Whether it has had a step, and all that were missing have called and compiled
        what the plan of now asks of them.

        One that never will is waited for in the ordinary way, as all others are.
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
        """Let what was missing compile while the others train, for a time at most.

        Hosts of one node would have to do so together.
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
        """Those of the workers whose state is that of the run, or was a step ago."""
        return [worker for worker in workers if worker not in self._aside]

    def end(self, plan: Plan, workers: Sequence[str]) -> None:
        """Let the `workers`, which were built for the plan, go on with it, all of it.

        Those that were aside lack state until `forget`.
        """
        if not self._is_whole:
            built_for = WorkerMap(plan, self._controller.members.nodes).workers
            self._controller.reroute(plan, [w for w in workers if w in built_for])
            self._is_whole = True

    def forget(self) -> None:
        """All have one state again."""
        self._since = None
        self._aside.clear()

    def dismiss(self) -> None:
        """Let those leave who have no part in it; a node's first host is the last."""
        controller = self._controller
        others = {*controller.connections.workers} - {*controller.workers}
        first = {controller.members.hosts(node_of(worker))[0] for worker in others}
        for leaving in (others - first, others & first):
            controller.connections.ask(dict.fromkeys(sorted(leaving), Leave()))
