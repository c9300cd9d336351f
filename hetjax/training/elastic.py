# SPDX-License-Identifier: Apache-2.0
"""A run on workers in other processes, which goes on when some of them vanish.

Owns what is done about a lost worker: a step that one survivor has committed is
finished by all, the lost ones are started again or, if their node is gone, another plan
is made, and everybody gets what it lacks from the nearest place that has it. The same
where nodes come or leave in good order. Does not own who starts workers
(`launching.py`), who holds what (`hetjax/runtime/recovery.py`), nor the loop, which
hears of `RolledBack`.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np

from hetjax.checkpoint.fetch import fetch_newest
from hetjax.checkpoint.holdings import Holding
from hetjax.checkpoint.restore import steps
from hetjax.checkpoint.save import Keeping
from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.runtime.control import WorkerLost
from hetjax.runtime.fleet import Fleet, FleetStep, TransportName
from hetjax.runtime.meeting import Norm
from hetjax.runtime.recovery import Restored, finish_step, holdings, restore
from hetjax.schedule.trace import Span
from hetjax.training.launching import Launcher
from hetjax.training.membership import Membership

_MOST_STRIKES = 5  # losses without a committed step between them
_Answer = TypeVar("_Answer")


class RolledBack(Exception):
    """State of later steps is lost: the run goes on from `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to step {step}")
        self.step = step


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """What a change has cost; `seconds` by what they went into.

    `plan` is there if it is another one than before, for this `cluster`.
    """

    reason: str
    plan: Plan | None
    cluster: Cluster
    from_step: int
    step: int
    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What workers are built with, and where their checkpoints are.

    `settings` are for a cluster and a plan, `replan` gives a plan for a cluster in
    place of another plan.
    """

    settings: Callable[[Cluster, Plan], Mapping[str, Any]]
    replan: Callable[[Cluster, Plan], Plan]
    membership: Membership
    transport: TransportName
    seed: int
    keeping: Keeping
    host: Mapping[str, Any]
    recovery: Literal["local-first", "cloud-only", "none"]

    @property
    def recovers(self) -> bool:
        return self.recovery != "none"

    @property
    def directory(self) -> Path:
        """Where checkpoints are on the disk."""
        return self.keeping.directory


@dataclass(slots=True)
class _Clock:
    """Seconds by phase, one after the other."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now_s = time.perf_counter()
        spent_s = now_s - self._since_s
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent_s
        self._since_s = now_s


class FleetDriver:
    """The run on a fleet that has the state after `at` steps.

    `heard` is told of every recovery.
    """

    def __init__(
        self,
        fleet: Fleet,
        launcher: Launcher,
        stack: ExitStack,
        terms: Terms,
        *,
        cluster: Cluster,
        at: int,
        num_validation: int,
    ) -> None:
        self._fleet, self._launcher, self._stack = fleet, launcher, stack
        self._terms, self._at, self._strikes = terms, at, 0
        self._norm: Norm | None = None
        self._cluster, self._unbuilt = cluster, set[str]()
        self._resumed = at > 0
        self.plan, self.num_validation = fleet.plan, num_validation
        self.heard: Callable[[Recovered], None] = lambda recovered: None

    def step(self, number: int, *, traced: bool = False) -> FleetStep:
        assert number == self._at, (number, self._at)
        if self._terms.recovers and self._terms.membership.now() != self._cluster:
            self._recover_in_place(None)
        try:
            found = self._fleet.step(number, traced=traced)
        except WorkerLost as lost:
            self._recover(lost)
            if self._at == number:
                return self.step(number, traced=traced)
            if self._at < number:
                raise RolledBack(self._at) from lost
            assert self._norm is not None
            found = self._fleet.step_of(self._norm)
        self._at, self._strikes = number + 1, 0
        return found

    def spans(self) -> Sequence[Span]:
        return self._surely(self._fleet.spans)

    def validate(self, number: int) -> float:
        return self._surely(lambda: self._fleet.evaluate([number]))

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self._surely(lambda: self._fleet.next_logits(tokens))

    def save(self, step: int) -> bool:
        host, terms = {**self._terms.host, "step": step}, self._terms
        return self._surely(lambda: self._fleet.save(terms.keeping, step, host))

    def wait_saved(self) -> None:
        self._surely(self._fleet.wait_saved)

    def leave(self, node: str) -> bool:
        return self._terms.recovers and self._terms.membership.leave(node)

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
        """Get all workers of now going; raises WorkerLost if that does not help."""
        clock, at, before = _Clock(), self._at, self.plan
        reason = "other nodes than before" if lost is None else str(lost)
        while True:
            self._strikes += 1
            if lost and not (self._terms.recovers and self._strikes <= _MOST_STRIKES):
                raise lost
            try:
                restored = self._restored(lost, clock)
                break
            except WorkerLost as another:
                lost = another
        self._at = restored.step
        self.heard(
            Recovered(
                reason=reason,
                plan=None if self.plan == before else self.plan,
                cluster=self._cluster,
                from_step=at,
                step=restored.step,
                num_bytes=restored.num_bytes,
                seconds=clock.seconds,
            )
        )

    def _restored(self, lost: WorkerLost | None, clock: _Clock) -> Restored:
        """One try: the state that is left, laid out for the nodes that are there."""
        fleet, crew = self._fleet, self._fleet.crew
        if lost is not None and lost.worker in crew.workers:
            crew.lose(lost.worker, lost.reason)
        left = crew.workers
        self._norm = finish_step(crew, left) or self._norm
        held = self._held(left)
        clock.lap("finish")
        self._replan()
        clock.lap("replan")
        gone = [worker for worker in fleet.workers if worker not in left]
        leaving = [worker for worker in left if worker not in fleet.workers]
        self._start(gone, clock)
        held += self._held(gone)
        fleet.connect(self._terms.transport, leaving)
        fleet.compile()
        clock.lap("compile")
        restored = restore(fleet, held, leaving) or self._from_store()
        if restored is None:
            restored = self._from_nothing(lost)
        if leaving:
            crew.ask(dict.fromkeys(leaving, {"do": "end"}))
            fleet.connect(self._terms.transport)  # or they would be missed
        clock.lap("move")
        return restored

    def _held(self, workers: Sequence[str]) -> list[Holding]:
        if self._terms.recovery == "cloud-only":
            return []
        return holdings(self._fleet.crew, workers, self._terms.directory)

    def _start(self, gone: Sequence[str], clock: _Clock) -> None:
        """Start the lost workers; build them, and all others that have another plan."""
        self._launcher.start(gone)
        clock.lap("start")
        self._unbuilt.update(gone)
        building = [w for w in self._fleet.workers if w in self._unbuilt]
        settings = self._terms.settings(self._cluster, self._fleet.plan)
        self._fleet.build(settings, building)
        self._unbuilt.clear()
        clock.lap("build")

    def _from_store(self) -> Restored | None:
        """From the newest step of the store; None if there is none."""
        store, directory = self._terms.keeping.store(), self._terms.directory
        if self._terms.recovery == "cloud-only":
            directory = directory.with_name(f"{directory.name}-fetched")
            shutil.rmtree(directory, ignore_errors=True)
        fetched = None if store is None else fetch_newest(store, directory)
        if fetched is None:
            return None
        crew, workers = self._fleet.crew, self._fleet.workers
        restored = restore(self._fleet, holdings(crew, workers, directory))
        if restored is None:
            return None
        num_bytes = {**restored.num_bytes, "cloud": fetched.cloud_bytes}
        return replace(restored, num_bytes=num_bytes)

    def _from_nothing(self, lost: WorkerLost | None) -> Restored:
        """Begin again, as nothing was ever saved; else what was saved must be found."""
        if self._resumed or steps(self._terms.directory):
            raise lost or WorkerLost(self._fleet.workers[0], "finds no checkpoint")
        self._fleet.initialise(self._terms.seed)
        return Restored(step=0)

    def _replan(self) -> None:
        """Make another plan if there are other nodes than before."""
        cluster = self._terms.membership.now()
        if cluster == self._cluster:
            return
        self.plan = self._terms.replan(cluster, self._fleet.plan)
        self._cluster = cluster
        self._fleet.adopt(self.plan, cluster.nodes)
        self._unbuilt.update(self._fleet.workers)
