# SPDX-License-Identifier: Apache-2.0
"""A run on its workers, which goes on when nodes come and go or workers vanish.

Owns what is done about a lost worker: a step that one survivor has committed is
finished by all, the lost ones are started again or, if their node is gone, another plan
is made, and everybody gets what it lacks from the nearest place that has it. The same
where nodes come or leave in good order. Does not own who starts workers
(`launch/launching.py`), who holds what (`hetjax/runtime/control/recovery.py`), nor the
loop, which hears of `RolledBack`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import numpy as np

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.elastic.loss_scaling import LossScaling
from hetjax.elastic.membership import Membership
from hetjax.elastic.recovered import (
    MOST_OF_A_NODE,
    Clock,
    GivenUp,
    Losses,
    Recovered,
    RolledBack,
    difference,
    verdict,
)
from hetjax.elastic.standby_plans import StandbyPlans, plan_or_warn
from hetjax.launch.launching import Launcher
from hetjax.plans.plan import Plan
from hetjax.plans.worker_map import node_of
from hetjax.runtime.control import recovery
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.execution.gradient_sync import StepCommit
from hetjax.runtime.rpc.schema import Leave, TransportName
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.schedule.simulation.trace import Span

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What workers are built with, and where their checkpoints are.

    `settings` are for a cluster and a plan, `standby_plans` gives a plan for a
    cluster in place of another plan; `compile` lets workers compile theirs.
    """

    settings: Callable[[Cluster, Plan], Mapping[str, Any]]
    loss_scaling: LossScaling
    standby_plans: StandbyPlans
    membership: Membership
    compile: Callable[[Controller, Cluster], None]
    transport: TransportName
    seed: int
    storage: CheckpointStorage
    host: Mapping[str, Any]
    recovery: Literal["local-first", "cloud-only", "none"]

    @property
    def recovers(self) -> bool:
        return self.recovery != "none"


class Driver:
    """The run of a controller whose workers have the state after `at` steps.

    `plan` and `cluster` are those of now, `resumed` tells where the state is from,
    `heard` is told of every recovery.
    """

    def __init__(
        self,
        controller: Controller,
        launcher: Launcher,
        stack: ExitStack,
        terms: Terms,
        *,
        cluster: Cluster,
        at: int,
        resumed: Mapping[str, Any] | None,
        validation_weights: Sequence[float],
    ) -> None:
        self._controller, self._launcher, self._stack = controller, launcher, stack
        self._terms, self._at, self._losses = terms, at, Losses()
        self.resumed = resumed
        self._commit: StepCommit | None = None
        self.cluster, self._unbuilt, self._gone = cluster, set[str](), set[str]()
        self._refused: Cluster | None = None  # as there is no plan for it
        self.plan, self.validation_weights = controller.plan, validation_weights
        self.heard: Callable[[Recovered], None] = lambda recovered: None
        self.hurried: Callable[[], bool] = lambda: False
        self._has_given_up = False

    def step(self, number: int, *, traced: bool = False) -> StepCommit:
        """Train the next step; raises RolledBack where state was lost meanwhile."""
        assert number == self._at, (number, self._at)
        if self._terms.recovers and self._is_other(self._terms.membership.now()):
            self._recover_in_place(None)
        try:
            self._look_ahead()
            scale = self._terms.loss_scaling.of(self.cluster, self.plan)
            found = self._controller.step(number, traced=traced, loss_scale=scale)
        except WorkerLost as lost:
            self._recover(lost)
            if self._at == number:
                return self.step(number, traced=traced)
            if self._at < number:
                raise RolledBack(self._at) from lost
            assert self._commit is not None
            found = self._commit
        self._at = number + 1
        self._losses = Losses()
        self._terms.loss_scaling.hear(number, found)
        return found

    def spans(self) -> Sequence[Span]:
        """When the actions of all traced steps ran."""
        return self._surely(self._controller.spans)

    def validate(self, number: int) -> float:
        """Mean cross-entropy in nats per token over the validation batch."""
        return self._surely(lambda: self._controller.evaluate([number]))

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """logits_V that follow the (last seq_len) tokens."""
        return self._surely(lambda: self._controller.next_logits(tokens))

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by worker, of those on this machine."""
        return self._launcher.pids

    @property
    def at(self) -> int:
        """How many steps the state has behind it."""
        return self._at

    @property
    def saved(self) -> int | None:
        return self._controller.saved

    @property
    def is_not_finite(self) -> bool:
        return self._controller.is_not_finite

    def go_back(self, reason: str) -> int:
        """Go on from the newest checkpoint; return its step."""
        clock, at, controller = Clock(), self._at, self._controller
        restored = self._surely(
            lambda: recovery.restore(
                controller,
                self._on_disk(controller.workers),
                self._terms.storage,
                most=controller.saved,
            )
        )
        if restored is None:
            raise WorkerLost(controller.workers[0], "finds no checkpoint to go back to")
        controller.forget_saving()
        self._at, self._commit = restored.step, None
        self._terms.loss_scaling.go_on(restored)
        clock.lap("move")
        self._tell(reason, at, restored, clock)
        return restored.step

    def save(self, step: int, best: Callable[[], int | None]) -> bool:
        """As `Controller.save` does."""
        terms, save = self._terms, self._controller.save
        host = {**terms.host, **terms.loss_scaling.said(), "step": step}
        return self._surely(lambda: save(terms.storage, step, host, best))

    def wait_saved(self) -> None:
        self._surely(self._controller.wait_saved)

    def leave(self, node: str) -> bool:
        """Go on without the node from the next step on; False if nothing can."""
        membership = self._terms.membership
        now = membership.now()
        rest = {found.name for found in now.nodes} - {node}
        if not (self._terms.recovers and rest):
            return False
        if self._plan_or_warn(part_of(now, rest)) is None:
            return False
        return membership.leave(node)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let workers finish what they write, unless something went wrong or is over.

        One that is lost now takes nothing along but what it was copying to the store.
        """
        try:
            if kind is None and not self._has_given_up:
                self._controller.end()
        except WorkerLost as lost:
            text = f"{lost} as the run ended, with its state saved"
            warnings.warn(text, stacklevel=2)
        finally:
            self._stack.close()

    def _surely(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask again after a loss, if the state is as it was."""
        try:
            return ask()
        except WorkerLost as lost:
            self._recover_in_place(lost)
            return self._surely(ask)

    def _recover_in_place(self, lost: WorkerLost | None) -> None:
        """Recover; raises RolledBack unless the state is as it was."""
        at = self._at
        self._recover(lost)
        if self._at != at:
            raise RolledBack(self._at) from lost

    def _recover(self, lost: WorkerLost | None) -> None:
        """Get all workers of now going; raises WorkerLost if that does not help.

        GivenUp where it is `hurried` meanwhile.
        """
        clock, at, before = Clock(), self._at, self.plan
        self._gone.clear()
        reason, cluster = lost and str(lost), self.cluster
        with self._controller.connections.interrupted_by(self._check_time):
            restored = self._restored_at_last(lost, clock)
        self._at = restored.step
        self._terms.loss_scaling.go_on(restored)
        plan = None if self.plan == before else self.plan
        reason = reason or difference(cluster, self.cluster)
        self._tell(reason, at, restored, clock, plan, frozenset(self._gone))

    def _tell(
        self,
        reason: str,
        from_step: int,
        restored: recovery.Restored,
        clock: Clock,
        plan: Plan | None = None,
        gone: frozenset[str] = frozenset(),
    ) -> None:
        self.heard(
            Recovered(
                reason=reason,
                plan=plan,
                cluster=self.cluster,
                gone=gone,
                from_step=from_step,
                step=restored.step,
                num_bytes=restored.num_bytes,
                tier_s=restored.seconds,
                seconds=clock.seconds,
            )
        )

    def _check_time(self) -> None:
        if self.hurried():
            self._has_given_up = True
            raise GivenUp

    def _restored_at_last(
        self, lost: WorkerLost | None, clock: Clock
    ) -> recovery.Restored:
        """Try until no other worker is lost meanwhile, or too many were."""
        while True:
            if lost is not None:
                self._count_loss(lost)
            try:
                return self._restored(lost, clock)
            except WorkerLost as another:
                lost = another

    def _count_loss(self, lost: WorkerLost) -> None:
        """Count a loss; go on without a node that is lost again and again."""
        node = node_of(lost.worker)
        self._losses = self._losses.with_one_of(node)
        then = verdict(self._losses, node, self._terms.recovers)
        if then == "give up":
            raise lost
        if then == "leave the node" and self.leave(node):
            self._losses = self._losses.without(node)
            warnings.warn(
                f"node {node} was lost {MOST_OF_A_NODE} times without a step between: "
                f"going on without it ({lost.reason})",
                stacklevel=2,
            )

    def _restored(self, lost: WorkerLost | None, clock: Clock) -> recovery.Restored:
        """One try: the state that is left, laid out for the nodes that are there."""
        controller, connections = self._controller, self._controller.connections
        if lost is not None and lost.worker in connections.workers:
            connections.lose(lost.worker, lost.reason)
        left = connections.workers
        self._commit = recovery.finish_step(connections, left) or self._commit
        held = self._held(left)
        clock.lap("finish")
        self._replan(lost)
        clock.lap("replan")
        gone = [worker for worker in controller.workers if worker not in left]
        leaving = [worker for worker in left if worker not in controller.workers]
        self._start(gone, clock)
        held += self._on_disk(gone)
        controller.connect(self._terms.transport, leaving)
        self._terms.compile(controller, self.cluster)
        clock.lap("compile")
        in_memory_ = [h.save[0] for h in held if h.tier == "memory"]
        most = max([self._at, *in_memory_])  # what is later was given up once
        restored = recovery.restore(
            controller, held, self._terms.storage, leaving, most
        )
        if restored is None:
            restored = self._from_nothing(lost)
        elif controller.saved is not None:
            controller.saved = min(controller.saved, restored.step)
        if leaving:
            connections.ask(dict.fromkeys(leaving, Leave()))
            controller.connect(self._terms.transport)  # or they would be missed
        clock.lap("move")
        return restored

    def _held(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        if self._terms.recovery == "cloud-only":
            return []
        return recovery.in_memory(self._controller, workers) + self._on_disk(workers)

    def _on_disk(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        if self._terms.recovery == "cloud-only":
            return []
        return recovery.on_disk(
            self._controller.connections, workers, self._terms.storage
        )

    def _start(self, gone: Sequence[str], clock: Clock) -> None:
        """Start the lost workers; build them, and all others that have another plan."""
        self._launcher.start(gone)
        clock.lap("start")
        self._unbuilt.update(gone)
        self._gone.update(gone)
        building = [w for w in self._controller.workers if w in self._unbuilt]
        settings = self._terms.settings(self.cluster, self._controller.plan)
        self._controller.build(settings, building)
        self._unbuilt.clear()
        clock.lap("build")

    def _from_nothing(self, lost: WorkerLost | None) -> recovery.Restored:
        """Begin again, as nothing was ever saved; else what was saved must be found."""
        if self._controller.saved is not None:
            raise lost or WorkerLost(self._controller.workers[0], "finds no checkpoint")
        self._controller.initialise(self._terms.seed)
        return recovery.Restored(step=0)

    def _look_ahead(self) -> None:
        """Let workers compile what a lost node would ask of them."""
        terms = self._terms
        if terms.recovers:
            for cluster, plan in terms.standby_plans.found(self.cluster, self.plan):
                self._controller.compile_ahead(terms.settings(cluster, plan), plan)

    def _is_other(self, cluster: Cluster) -> bool:
        return cluster not in (self.cluster, self._refused)

    def _plan_or_warn(self, cluster: Cluster) -> Plan | None:
        return plan_or_warn(self._terms.standby_plans.plan, cluster, self.plan)

    def _replan(self, lost: WorkerLost | None) -> None:
        """Make another plan if there are other nodes than before.

        Raises NoFeasiblePlan if one is lost and there is none for those that are left.
        """
        cluster = self._terms.membership.now(again=True)
        if not self._is_other(cluster):
            return
        if lost is not None:
            plan = self._terms.standby_plans.plan(cluster, self.plan)
        elif (plan := self._plan_or_warn(cluster)) is None:
            self._refused = cluster  # the run keeps the plan that it has
            return
        if plan != self.plan or _used(cluster, plan) != _used(self.cluster, plan):
            self.plan = plan
            self._controller.adopt(plan, cluster.nodes)
            self._unbuilt.update(self._controller.workers)
        self.cluster = cluster


def _used(cluster: Cluster, plan: Plan) -> list[Node]:
    names = {stage.node for _, _, stage in plan.stages()}
    return [node for node in cluster.nodes if node.name in names]
