# SPDX-License-Identifier: Apache-2.0
"""Checks the invariants of a simulated run at every new state and save.

Owns the invariants, and the history that they need. A broken invariant raises
Violation. Does not own the run (`run.py`) nor its faults (`faults.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any

from experiments.simulation.case import LAYERS, Case
from experiments.simulation.disk import TORN
from experiments.simulation.faults import ENDS_AT_MOST, FAULTS_S, Faults
from experiments.simulation.ports import Machines
from experiments.simulation.stored import Stored
from experiments.simulation.truth import State, Truth
from experiments.simulation.worker import SimWorker
from experiments.simulation.world import Violation
from hetjax.checkpoint.format import attempt
from hetjax.checkpoint.recovery_plan import Save
from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.membership import Membership
from hetjax.training.recovery.recovered import MOST_LOSSES, MOST_OF_A_NODE, Recovered

_AFTER_FAULTS_S = 60.0  # until all earlier faults are known
_TAKES_S = 120.0  # the longest recovery, part of it in a store
_STEPS_APART = 4  # most steps that an available node may have no part in


class StateLost(Exception):
    """A start was refused, with what remains of the run: too many disks are lost."""


class Invariants:
    """The invariants of a case; `begin` is called at each start."""

    def __init__(self, case: Case, truth: Truth) -> None:
        self._case, self._truth = case, truth
        self._machines: Machines
        self._faults: Faults
        # layers that each process has had, by number of steps
        self._had: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self._driver: Driver | None = None
        self._membership: Membership | None = None
        self._apart: Counter[str] = Counter()  # successive steps without the node
        self.plan_of_save: Plan | None = None
        self._gone_back_from = set[Save]()
        # undone once, and covered by a checkpoint that a later start found whole
        self.found_again = set[int]()
        self._saved: int | None = None  # last reported; None if given up since
        self._newest_saved = 0
        self._last_well_s = 0.0  # last start or step; losses count from there
        self._num_lost = 0
        self._begin_s, self._has_lost = 0.0, False  # of the last start
        self._lost_s = 0.0  # when the last worker was lost
        self._begun_at = 0
        self._stored: Stored | None = None

    def watch(self, machines: Machines, faults: Faults, stored: Stored | None) -> None:
        self._machines, self._faults, self._stored = machines, faults, stored

    def begin(self) -> None:
        """Note that the same command starts again."""
        self._driver = self._membership = None
        self._begin_s, self._has_lost = self._machines.site.world.now_s, False
        self._num_lost = 0
        self._start_counting()

    def follow(self, driver: Driver, membership: Membership) -> None:
        self._driver, self._membership = driver, membership
        driver.on_lost = self._count_lost

    def check_state(self, worker: SimWorker, state: State, at: int) -> None:
        """Raise Violation if a worker's state is not the true one after `at` steps."""
        if self._driver is not None and self._driver._degraded.missing:
            self.hear_dropped(worker)  # a worker set aside cannot finish this step, too
        self._had[worker.name, at] = {*state}
        for name, step in self._had:
            if name == worker.name:
                self._had[name, step] &= {*state}  # another plan moved the rest
        truth = self._truth.state(at)
        for layer, value in state.items():
            if value != truth[layer]:
                raise Violation(f"{worker.name} has a wrong {layer} after {at} steps")

    def hear_dropped(self, worker: SimWorker) -> None:
        """Forget the worker's layers: they exist nowhere any more."""
        for name, at in [*self._had]:
            if name == worker.name:
                del self._had[name, at]

    def hear_giving_up(self, kept: int) -> None:
        """Note that saves of steps after `kept` are removed."""
        if self._stored is not None:
            self._stored.go_back(kept + 1)

    def hear_leaving(self, workers: Collection[str]) -> None:
        """Forget layers of leaving workers that the others hold by now.

        If those others are lost later, the leaving workers do not count as holders.
        """
        leaving = {self._machines.running[worker][-1].name for worker in workers}
        for worker in workers:
            if self._machines.running[worker][-1].mishaps.has_mumbled:
                raise Violation(f"{worker} has answered wrongly, and was believed")
        for name, at in [*self._had]:
            if name in leaving and self._had[name, at] <= self._others_have(
                leaving, at
            ):
                del self._had[name, at]

    def _others_have(self, leaving: Collection[str], at: int) -> set[str]:
        alive = {worker.name for worker in self._machines.alive()} - {*leaving}
        return {
            layer
            for (name, step), layers in self._had.items()
            if step == at and name in alive
            for layer in layers
        }

    def _survived(self, at: int) -> set[str]:
        """Return layers after `at` steps of live processes and of those that left."""
        found = set[str]()
        for processes in self._machines.running.values():
            last = processes[-1]
            if last.has_left or (last.is_alive and not last.is_stopped):
                found |= self._had[last.name, at]
        return found

    def hear_line(self, line: dict[str, Any]) -> None:
        """Note a finished step; nodes that are up must take part soon."""
        self._start_counting()
        if self._driver is None or self._membership is None or "loss" not in line:
            return
        self._num_lost = 0
        names = {node.name for node in self._driver.cluster.nodes}
        for host in self._machines.up - self._membership._leaving:
            self._apart[host] = 0 if host in names else self._apart[host] + 1
            if self._apart[host] > _STEPS_APART:
                raise Violation(f"{host} is there, and is not taken in")

    def _start_counting(self) -> None:
        self._last_well_s = self._machines.site.world.now_s
        self._machines.num_tries = 0

    def hear_lost(self) -> None:
        """Note that a worker was lost or failed."""
        self._has_lost, self._lost_s = True, self._machines.site.world.now_s

    def _count_lost(self, lost: WorkerLost) -> None:
        """Count a loss; the run also counts those that it detects itself."""
        self._num_lost += 1

    def check_recovered(self, what: Recovered) -> None:
        """Raise Violation if the run goes back further than it had to."""
        is_back = what.step < what.from_step
        if self._stored is not None:
            self._stored.go_back(what.step)
        went_back = "not finite" in what.reason
        if went_back:
            saves = self._saves() - self._stored_saves()
            self._gone_back_from |= {save for save in saves if save[0] > what.step}
        if is_back and not went_back and {*LAYERS} <= self._survived(what.from_step):
            raise Violation(f"back to {what.step} though all have {what.from_step}")
        stored = -1 if self._stored is None else self._stored.newest_at(self._lost_s)
        is_there = what.step < stored <= what.from_step
        if is_there and not went_back and not self._store_is_excused(_TAKES_S):
            raise Violation(f"back to {what.step} though the store has {stored}")
        is_anew = what.step == 0 < what.from_step and not self._is_whole(0)
        if is_anew and self._newest_saved > 0:
            raise Violation("it begins anew though something was saved")
        for process, at in [*self._had]:
            if at > what.step:
                del self._had[process, at]  # belongs to a past that was given up
        if self._saved is not None and what.step < self._saved:
            self._saved = None

    def check_tries(self) -> None:
        """Raise Violation if a run without a step keeps starting workers."""
        most = MOST_OF_A_NODE * self._case.num_nodes + MOST_LOSSES + 1
        if self._machines.num_tries > most:
            raise Violation(f"started {self._machines.num_tries} times without a step")

    def check_ended(self, error: Exception) -> None:
        """Raise Violation if a run ends without a fault that justifies it."""
        if "no whole copy" in str(error):
            self._check_lost(error)
        if self._last_well_s > FAULTS_S + _AFTER_FAULTS_S:
            raise Violation(f"it ends though all is well: {error!r}") from error
        has_begun = self._driver is not None and self._driver._has_begun
        is_loss = has_begun and isinstance(error, WorkerLost)
        if is_loss and self._num_lost <= MOST_LOSSES:
            raise Violation(f"it ends of {self._num_lost} losses: {error!r}") from error
        if self._has_only_one("break_machine") and self._can_lose_one:
            raise Violation(f"it ends though one machine is bad: {error!r}") from error
        if self._has_only_one("give_notice") and self._faults.last_loss_s < 0.0:
            raise Violation(f"it ends though all are there: {error!r}") from error

    @property
    def _can_lose_one(self) -> bool:
        """Whether the run can lose one node: the others have room and all layers."""
        newest = max((at for _, at in self._had), default=None)
        return self._case.has_room(self._case.num_nodes - 1) and (
            newest is None
            or any({*LAYERS} <= self._survived(at) for at in (newest, newest - 1))
        )

    def _has_only_one(self, kind: str) -> bool:
        return self._faults.counts == {kind: 1}

    def check_refused(self) -> None:
        """Raise Violation unless the run is starting and the store may be at fault."""
        if self._driver is not None and self._driver._has_begun:
            raise Violation("it ends for want of the store")
        if not self._store_is_excused(_AFTER_FAULTS_S):
            raise Violation("the store is taken for lost, and all is well")

    def _store_is_excused(self, within_s: float) -> bool:
        """Whether recent trouble may explain what the store did not do or report."""
        if self._stored is None:
            return True
        now_s = self._machines.site.world.now_s
        return self._stored.bucket.last_trouble_s > now_s - within_s

    def _stored_saves(self) -> set[Save]:
        """Return the store's whole saves, also those that cannot be removed for now."""
        return set() if self._stored is None else {*self._stored.whole.items()}

    def in_store(self) -> int:
        """Return the newest step that the store alone can restore; -1 if none."""
        return max((step for step, _ in self._stored_saves()), default=-1)

    @property
    def is_all_lost(self) -> bool:
        """Whether a run that is refused can never resume."""
        is_damaged = self._stored is not None and self._stored.is_damaged
        if self.in_store() < 0 or is_damaged:
            return self.has_lost_something
        if not self._store_is_excused(_AFTER_FAULTS_S):
            raise Violation(f"refused, and the store has step {self.in_store()}")
        return False

    @property
    def was_nothing_saved(self) -> bool:
        """Whether no save was reported, and none is complete on the disks."""
        return self._newest_saved == 0 and not self.complete()

    def check_saved(self, step: int) -> None:
        """Raise Violation if a reported save is not whole, unless a disk was lost."""
        if self._driver is not None:
            self.plan_of_save = self._driver.plan
        if not self._is_whole(step) and not self._is_excused:
            raise Violation(f"step {step} is said to be saved, and is not")
        self._saved = step
        self._newest_saved = max(self._newest_saved, step)

    def check_removed(self) -> None:
        """Raise Violation if neither the reported save nor a newer one remains."""
        if self._saved is None or self.has_lost_something:
            return
        if max(self.complete(), default=-1) < self._saved:
            raise Violation(
                f"step {self._saved} is removed, and nothing newer is whole"
            )

    def _saves(self) -> set[Save]:
        """Return the saves of which some disk has a part."""
        disks = self._machines.disks
        return {written.save for disk in disks for _, _, written in disk.committed()}

    def _is_whole(self, step: int) -> bool:
        """Whether the step is whole on disks or in the store."""
        is_stored = self._stored is not None and step in self._stored.whole
        return is_stored or step in self.complete()

    def _check_lost(self, error: Exception) -> None:
        """Raise Violation if the run gives up a state that its plan's workers have."""
        assert self._driver is not None
        workers = {*self._driver.plan.nodes}
        whole = self.complete(workers) if workers <= self._machines.up else []
        if whole and not self._is_excused:
            raise Violation(f"taken for lost, and step {whole[-1]} is there") from error
        if self.is_all_lost:
            raise StateLost from error

    @property
    def has_lost_something(self) -> bool:
        """Whether a disk ever lost its contents."""
        return self._faults.last_loss_s >= 0.0

    @property
    def _is_excused(self) -> bool:
        """Whether the controller cannot know yet what a disk has lost.

        It knows of a lost machine after some rounds, of damage when it reads the data.
        """
        asked_s = self._machines.asked_s[0] if self._machines.asked_s else 0.0
        return self._faults.last_loss_s >= asked_s or self._faults.has_damaged

    def complete(self, hosts: set[str] | None = None) -> list[int]:
        """Return the steps of which the disks have all layers; check their values."""
        found: dict[Any, dict[str, int]] = {}
        for disk in self._machines.disks_of(hosts):
            for _, _, written in disk.committed():
                found.setdefault(written.save, {}).update(written.leaves)
        for (step, _), leaves in found.items():
            truth = self._truth.state(step)
            wrong = [at for at in leaves if leaves[at] not in (truth[at], TORN)]
            if wrong:
                raise Violation(f"a checkpoint of step {step} has a wrong {wrong[0]}")
        return sorted(
            {
                step
                for (step, _), leaves in found.items()
                if leaves.keys() == {*LAYERS} and TORN not in leaves.values()
            }
        )

    def check_begins(
        self,
        before: list[int],
        stored: int,
        begin_s: float,
        restored: Any,
        cluster: Cluster,
        passed_over: Collection[int],
    ) -> None:
        """Raise Violation unless a start resumes from the newest step on the disks.

        It may pass over a step if it says so, because parts of it are elsewhere.
        """
        self._num_lost = 0  # rule 14
        self._start_counting()
        at = self._begun_at = 0 if restored is None else restored.step
        if restored and (at, attempt(restored.host)) in self._gone_back_from:
            raise Violation(f"a start goes on from {at}, which was gone back from")
        if passed_over:
            self._saved = at
        if restored is None and self.plan_of_save is not None:
            raise Violation("a start begins anew though something was saved")
        if self._stored is not None:
            self._stored.go_back(at)
            took_s = self._machines.site.world.now_s - begin_s
            if at < stored and not self._store_is_excused(took_s):
                raise Violation(
                    f"a start goes on from {at}, and the store has {stored}"
                )
        if self._faults.last_loss_s >= begin_s:
            return
        are_all_there = {n.name for n in cluster.nodes} == self._machines.up
        if before and at < before[-1] and are_all_there and not passed_over:
            raise Violation(
                f"a start goes on from {at}, and step {before[-1]} is there"
            )

    def check_end(self, lines: list[dict[str, Any]], num_starts: int) -> None:
        """Raise Violation unless each step has one right line and the last is saved."""
        lines = [line for line in lines if "loss" in line]
        told = [line["step"] for line in lines]
        found_again = self.found_again - {*told}
        if sorted([*told, *found_again]) != [*range(1, self._case.steps + 1)]:
            raise Violation(f"metrics of steps {told}")
        for line in lines:
            if line["loss"] != self._truth.commit(line["step"] - 1).loss():
                raise Violation(f"step {line['step']} has a wrong loss")
        if not self._is_whole(self._case.steps) and not self._is_excused:
            raise Violation("the last step is not saved")
        self._check_stored()
        world = self._machines.site.world
        world.run_until(lambda: not self._machines.alive(), world.now_s + 900)
        self._check_calls(num_starts)
        left = [worker.name for worker in self._machines.alive()]
        if left:
            raise Violation(f"{left[0]} is left behind")

    def _check_stored(self) -> None:
        """Raise Violation if the store lacks the last step without an excuse."""
        if self._stored is None or self._has_lost or self._faults.has_damaged:
            return
        if self._begun_at == self._case.steps:
            return  # an earlier start saved it, and may have lost the store
        took_s = self._machines.site.world.now_s - self._begin_s
        if not self._store_is_excused(took_s) and self.in_store() != self._case.steps:
            raise Violation(f"the store has step {self.in_store()} in the end")

    def _check_calls(self, num_starts: int) -> None:
        """Raise Violation if more workers call again than faults have ended."""
        counts = self._faults.counts
        if not counts.keys() <= ENDS_AT_MOST.keys():
            return
        most = sum(ENDS_AT_MOST[kind] * number for kind, number in counts.items())
        again = self._machines.num_called - self._case.num_nodes * num_starts
        if again > most:
            raise Violation(f"{again} workers have called again, though {most} ended")
