# SPDX-License-Identifier: Apache-2.0
"""Drives a run on its workers, and keeps it going when nodes or workers come and go.

Owns the recovery from a lost worker. If one survivor has committed a step, all
survivors finish it. Lost workers restart or, if their node is gone, another plan is
made. Each worker gets what it lacks from the nearest place that has it. The same holds
if nodes come or leave in good order. Does not own the start of workers (`launchers/`),
who holds what (`runtime/control/recovery.py`), nor the loop, which gets `RolledBack`.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self, TypeVar

import numpy as np

from hetjax.checkpoint.format import attempt
from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.cluster.cluster import Cluster, Node
from hetjax.launchers.launcher import Launcher
from hetjax.plans.plan import Plan
from hetjax.runtime.control import recovery
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.gathering import OnBegin
from hetjax.runtime.control.recovery_decisions import Restored
from hetjax.runtime.execution.checking.checks import Disagreement
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.schedule.simulation.trace import Span
from hetjax.training.recovery.current_plan import CurrentPlan
from hetjax.training.recovery.degraded_mode import DegradedMode
from hetjax.training.recovery.driver_config import DriverConfig
from hetjax.training.recovery.fresh_workers import FreshWorkers
from hetjax.training.recovery.recovered import (
    Clock,
    GivenUp,
    Losses,
    Recovered,
    Rerouted,
    RolledBack,
    difference,
    recovered,
    state_lost,
    with_loss,
)
from hetjax.training.recovery.surviving_state import SurvivingState

_Answer = TypeVar("_Answer")


class Driver:
    """Drives the run of a controller, whose workers `begin` starts.

    `plan` and `cluster` are the current ones; `resumed` says where the state is from.
    `on_recovery` is called after each recovery and reroute, `on_lost` for each lost
    worker. Leaving `with` closes `stack`, too.
    """

    def __init__(
        self,
        controller: Controller,
        launcher: Launcher,
        config: DriverConfig,
        *,
        cluster: Cluster,
        validation_weights: Sequence[float],
    ) -> None:
        self._controller = controller
        self._launcher = launcher
        self._config = config
        self._surviving = SurvivingState(controller, config, self.leave)
        self._degraded = DegradedMode(controller, launcher, config)
        self._current = CurrentPlan(cluster, controller.plan, config)
        self._fresh = FreshWorkers(controller, launcher, config)
        self._at = 0
        self._losses = Losses()
        self._has_begun = False
        self._has_given_up = False
        self._last_saved: int | None = None
        self._commit: StepCommit | None = None
        self.stack = ExitStack()
        self.timing = controller.timing
        self.resumed: Mapping[str, Any] | None = None
        self.validation_weights = validation_weights
        self.on_recovery: Callable[[Recovered | Rerouted], None] = lambda happened: None
        self.on_lost: Callable[[WorkerLost], None] = lambda lost: None
        self.must_give_up: Callable[[], bool] = lambda: False

    def begin(self) -> Restored | None:
        """Start all workers with the newest state; return it, or None for the first.

        A worker that is lost meanwhile is restarted. Raises WorkerLost if that does not
        help or if the worker failed by itself, BadInput, and NoFeasiblePlan if the
        compiled programs need more memory than there is.
        """
        restored = self._until_restored(None, Clock())
        self._has_begun, self._losses = True, Losses()
        self._config.on_restored(restored or Restored(step=0))
        if restored is not None:
            self._at = self._controller.saved = restored.step
            self._controller.safe = restored.step, attempt(restored.host)
        return restored

    def step(self, number: int, *, traced: bool = False) -> StepCommit:
        """Train the next step; raises RolledBack if state was lost meanwhile."""
        assert number == self._at, (number, self._at)
        now = self._current
        if now.is_outdated() or self._degraded.is_over(self._at, now):
            self._recover_in_place(None)
        try:
            for settings, plan in now.standby(self._controller):
                self._controller.compile_ahead(settings, plan)
            found = self._ask_step(number, traced)
        except WorkerLost as lost:
            if not self._reroute(lost):
                self._recover(lost)
            if self._at == number:
                return self.step(number, traced=traced)
            if self._at < number:
                raise RolledBack(self._at) from lost
            assert self._commit is not None
            found = self._commit
        self._at = number + 1
        self._losses = Losses()
        self._config.on_step(number, found)
        return found

    def _ask_step(self, number: int, traced: bool) -> StepCommit:
        config = self._config
        if config.checking.is_left_out(number):
            return self._controller.leave_out(number)
        scale = config.loss_scaling.scale(self.cluster, self.plan)
        checks = config.checking.checks(number)
        return self._controller.step(
            number, traced=traced, loss_scale=scale, checks=checks
        )

    def _reroute(self, lost: WorkerLost) -> bool:
        """Go on at once with the replicas that are left; return False if impossible."""
        if not self._config.reroutes or self._current.is_outdated(again=True):
            return False
        found = self._degraded.begin(lost, self.plan, self._at, self._check_time)
        self._commit = self._degraded.commit or self._commit
        if found is None:
            return False
        self._count_loss(lost)
        self._fresh.add(self._degraded.missing)
        self._at = found.step
        self.on_recovery(found)
        return True

    def check(self) -> tuple[bool, Sequence[Disagreement]]:
        """Return whether all weights are finite, and where holders have unlike ones."""
        compares = self._config.checking.compares
        return self._surely(lambda: self._controller.check_state(compares))

    def spans(self) -> Sequence[Span]:
        """Return when the actions of all traced steps ran."""
        return self._surely(self._controller.spans)

    def validate(self, number: int) -> float:
        """Return the mean cross-entropy in nats per token over a validation batch."""
        return self._surely(lambda: self._controller.evaluate([number]))

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the logits_V that follow the (last seq_len) tokens."""
        return self._surely(lambda: self._controller.next_logits(tokens))

    def missing(self) -> Sequence[Node]:
        return self._config.membership.missing()

    def places(self) -> Mapping[str, str]:
        return self._surviving.places()

    def move_to(self, plan: Plan | None) -> None:
        self._current.move_to(plan)

    def leave_out(self, steps: range) -> None:
        self._config.checking.leave_out(steps)

    def forget_plans(self) -> None:
        self._config.standby_plans.forget()

    @property
    def plan(self) -> Plan:
        return self._current.plan

    @property
    def cluster(self) -> Cluster:
        return self._current.cluster

    @property
    def run(self) -> RunIdentity | None:
        """The run's identity, once it has begun."""
        return self._surviving.storage.run

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by worker, for the workers on this machine."""
        return self._launcher.pids

    @property
    def at(self) -> int:
        """The number of steps that the state has been trained for."""
        return self._at

    @property
    def saved(self) -> int | None:
        return self._controller.saved

    @property
    def is_kept(self) -> bool:
        """Whether `saved` is whole on disks, or a recovery found it in the store."""
        return self._controller.is_kept

    @property
    def is_not_finite(self) -> bool:
        return self._controller.is_not_finite

    def roll_back(self, reason: str) -> int:
        """Discard all state; go on from the newest save, or anew; return its step."""
        clock, at = Clock(), self._at
        restored = self._surely(self._restored_anew)
        self._at, self._commit = restored.step, None
        self._config.on_restored(restored)
        clock.lap("move")
        self.on_recovery(recovered(reason, at, restored, clock, self.cluster))
        return restored.step

    def _restored_anew(self) -> Restored:
        controller, storage = self._controller, self._surviving.storage
        controller.drop_state(storage)
        if self._degraded.missing:
            self._recover_in_place(None)  # missing workers have a part of the save
        held = self._surviving.on_disk(controller.workers)
        if controller.saved is None:
            self._begin_anew(held)
            return Restored(step=0)
        found = recovery.restore(controller, held, storage, most=controller.saved)
        if found is None:
            raise state_lost(controller.saved)
        return found

    def save(self, step: int, best: Callable[[], int | None] = lambda: None) -> bool:
        """Save as `Controller.save` does."""
        config, save = self._config, self._controller.save
        host = {**config.host, **config.loss_scaling.host_values(), "step": step}
        return self._surely(lambda: save(self._surviving.storage, step, host, best))

    def wait_saved(self) -> None:
        self._surely(self._controller.wait_saved)

    def gather(self, step: int, also: Collection[int], on_begin: OnBegin) -> int:
        """Gather as `SurvivingState.gather`; raises GivenUp once it `must_give_up`."""
        with self._controller.connections.interrupted_by(self._check_time):
            return self._surviving.gather(step, also, on_begin)

    def leave(self, node: str) -> bool:
        """Go on without the node from the next step on; return False if impossible."""
        return self._current.leave(node)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let workers finish their writes, unless an error or `GivenUp` ends the run.

        A worker that is lost now loses only what it was copying to the store.
        """
        try:
            if kind is None and not self._has_given_up:
                self._controller.end()
                self._degraded.dismiss()
        except WorkerLost as lost:
            warnings.warn(f"{lost} as the run ended; the state is saved", stacklevel=2)
        finally:
            self.stack.close()

    def _surely(self, ask: Callable[[], _Answer]) -> _Answer:
        """Return the answer; ask again after a loss if the state is still the same."""
        try:
            return ask()
        except WorkerLost as lost:
            self._recover_in_place(lost)
            return self._surely(ask)

    def _recover_in_place(self, lost: WorkerLost | None) -> None:
        """Recover; raises RolledBack unless the state is of the same step as before."""
        at = self._at
        self._recover(lost)
        if self._at != at:
            raise RolledBack(self._at) from lost

    def _recover(self, lost: WorkerLost | None) -> None:
        """Get all current workers to one state; raises WorkerLost if that fails.

        Raises GivenUp once the run `must_give_up`.
        """
        clock, at, were = Clock(), self._at, (self.cluster, self.plan)
        self._fresh.started = {*self._degraded.missing}
        cause = lost or self._degraded.lost
        with self._controller.connections.interrupted_by(self._check_time):
            restored = self._until_restored(lost, clock) or Restored(step=0)
        self._at = restored.step
        self._config.on_restored(restored)
        plan = None if self.plan == were[1] else self.plan
        reason = str(cause or difference(were, (self.cluster, self.plan)))
        started = frozenset(self._fresh.started)
        found = recovered(reason, at, restored, clock, self.cluster, plan, started)
        self.on_recovery(found)

    def _check_time(self) -> None:
        if self.must_give_up():
            self._has_given_up = True
            raise GivenUp

    def _until_restored(self, lost: WorkerLost | None, clock: Clock) -> Restored | None:
        """Try to restore until no other worker is lost meanwhile, or too many were."""
        while True:
            if lost is not None:
                self._count_loss(lost)
            try:
                return self._restored(lost, clock)
            except WorkerLost as another:
                lost = another

    def _count_loss(self, lost: WorkerLost) -> None:
        """Count a loss; go on without a node that is lost again and again."""
        if lost.has_failed and not self._has_begun:
            raise lost  # it would fail again
        self.on_lost(lost)
        self._losses = with_loss(self._losses, lost, self._config.recovers, self.leave)

    def _restored(self, lost: WorkerLost | None, clock: Clock) -> Restored | None:
        """Try once to restore the state that is left, for the nodes that are there.

        Returns None if nothing was ever saved: workers then have the first state.
        """
        controller, connections = self._controller, self._controller.connections
        if lost is not None and lost.worker in connections.workers:
            connections.lose(lost.worker, lost.reason)
        if controller.saved is not None:
            self._last_saved = controller.saved
        left = connections.workers
        built = self._fresh.built_before(left)
        abreast = self._degraded.taking_part(built)
        self._commit = recovery.finish_step(connections, abreast) or self._commit
        held = self._surviving.held(built)
        clock.lap("finish")
        self._degraded.end(self.plan, built)
        self._replan(lost or self._degraded.lost)
        clock.lap("replan")
        new = [worker for worker in controller.workers if worker not in built]
        leaving = [worker for worker in built if worker not in controller.workers]
        is_first = not self._has_begun
        gone = [worker for worker in new if worker not in left]
        self._fresh.start(gone, self._current.settings, clock, is_first)
        held += self._surviving.found() if is_first else self._surviving.joining(new)
        controller.connect(self._config.transport, leaving)
        if is_first:
            self._compile(clock, is_first)  # before state takes up memory
        in_memory = [h.save[0] for h in held if h.tier == "memory"]
        # later saves are of steps that were rolled back
        most = None if is_first else max([self._at, *in_memory])
        restored = recovery.restore(
            controller, held, self._surviving.storage, leaving, most
        )
        if is_first:
            step = None if restored is None else restored.step
            self._config.context.check_begins(held, controller.workers, step)
        if restored is None:
            self._begin_anew(held)
        else:
            recovery.remember_saved(controller, restored, self._config.storage)
        if leaving:
            controller.dismiss(leaving)
            controller.connect(self._config.transport)  # without those that left
        clock.lap("move")
        if not is_first:
            self._compile(clock, is_first)  # workers have been compiling meanwhile
        self._degraded.forget()
        return restored

    def _compile(self, clock: Clock, is_first: bool) -> None:
        self._config.context.compile(self._controller, self.cluster, is_first=is_first)
        clock.lap("compile")

    def _begin_anew(self, held: Sequence[PartialSnapshot]) -> None:
        """Make the first state; raises RunFailed if the run has saved before."""
        if self._last_saved is not None:
            raise state_lost(self._last_saved)
        self._controller.initialise(self._config.seed)

    def _replan(self, lost: WorkerLost | None) -> None:
        """Adopt another plan if nodes have changed or a requested plan is ready."""
        if self._current.replan(is_needed=lost is not None):
            self._controller.adopt(self.plan, self.cluster.nodes)
            self._fresh.add_other_plan()
