# SPDX-License-Identifier: Apache-2.0
"""One simulated run: the real loop, driver and controller, and what must hold.

Owns what a run consists of (nodes, replicas, steps, where checkpoints are), starting it
again after it has ended too soon, and the invariants, which are checked whenever a
state changes or something is said to be saved. Does not own what goes wrong
(`faults.py`).
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.simulation.disk import TORN
from experiments.simulation.faults import Faults
from experiments.simulation.network import Network
from experiments.simulation.ports import (
    CONTROLLER,
    Machines,
    SimJournal,
    SimLauncher,
    planned,
)
from experiments.simulation.truth import State, Truth
from experiments.simulation.worker import SimWorker, Site
from experiments.simulation.world import (
    ControllerCrashed,
    Process,
    Stuck,
    Violation,
    World,
)
from hetjax.checkpoint.recovery_plan import PartialSnapshot, unasked
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.elastic.driver import Driver
from hetjax.elastic.loss_scaling import LossScaling
from hetjax.elastic.membership import Membership
from hetjax.elastic.recovered import Recovered, Rerouted
from hetjax.elastic.spikes import SpikeRule
from hetjax.elastic.standby_plans import StandbyPlans
from hetjax.elastic.step_checking import StepChecking
from hetjax.elastic.terms import Terms
from hetjax.errors import BadInput, NoFeasiblePlan, RunFailed
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.best import BestCheckpoint
from hetjax.training.config import CheckpointConfig, EvaluationConfig, RunConfig
from hetjax.training.goodput import Spent
from hetjax.training.loop import Loop
from hetjax.training.starting import may_be_whole

_LAYERS = tuple(f"layer_{number}" for number in range(4))
_FAULTS_S = 150.0  # from then on all goes well
_AFTER_FAULTS_S = 60.0  # until all is heard of what has gone wrong before
_MOST_STARTS = 60
_LONGEST_S = 1e6
# How many processes each of these faults ends at most; others may end any number
_ENDS_AT_MOST = {
    "kill": 1,
    "kill_two": 2,
    "kill_soon_after": 2,
    "stop": 1,
    "get_stuck": 1,
    "fail_to_start": 3,
    "fill_disk": 0,
    "slow_disk": 0,
    "damage_disk": 0,
    "fail": 1,
    "ask_to_stop": 0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run consists of, drawn from its seed."""

    seed: int
    num_nodes: int
    num_replicas: int
    steps: int
    save_every: int
    keep: int
    is_shared: bool
    num_faults: int
    reroutes: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run has seen, or how it went wrong: `told` are its last events."""

    seed: int
    num_events: int
    num_starts: int
    num_recoveries: int
    num_detours: int
    faults: dict[str, int]
    violation: str | None = None
    told: tuple[str, ...] = ()


def case_of(world: World, seed: int) -> Case:
    chance = world.random
    num_nodes = chance.randint(1, 8)
    return Case(
        seed=seed,
        num_nodes=num_nodes,
        num_replicas=chance.randint(1, min(3, num_nodes)),
        steps=chance.randint(3, 20),
        save_every=chance.choice([0, 1, 2, 3, 5]),
        keep=chance.randint(1, 3),
        is_shared=chance.random() < 0.4,
        num_faults=chance.choice([0, 1, 1, 2, 2, 3, 4, 6, 9]),
        reroutes=seed % 3 == 1,
    )


class StateLost(Exception):
    """Too many disks are gone: what is left of the run is told to its user."""


class Run:
    """A run from its first start to its last; what it must not do raises Violation."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.case = case = case_of(self.world, seed)
        self._truth = Truth(_LAYERS, seed)
        self._network = Network(self.world)
        nodes = tuple(
            Node(name=f"n{number}", device="cpu", count=1)
            for number in range(case.num_nodes)
        )
        self._cluster = Cluster(name="simulated", nodes=nodes)
        site = Site(
            world=self.world,
            network=self._network,
            layers=_LAYERS,
            first=lambda: self._truth.state(0),
            told=self._check_state,
            left=self._hear_left,
            keep=case.keep,
        )
        self._machines = Machines(site, self._cluster, case.is_shared)
        self.faults = Faults(self.world, self._network, self._machines)
        self._journal = SimJournal(self._hear_step)
        self._last_well_s = 0.0  # a start, or a step: losses are counted from there
        # layers that each process has had, by steps behind them
        self._had: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.num_starts = self.num_recoveries = self.num_detours = 0
        self._driver: Driver | None = None
        self._plan_of_save: Plan | None = None
        self._named = set[str]()  # who have a save together, a refusal says
        self._is_refused = False  # as a start without the disks of the save would be

    def to_its_end(self) -> None:
        case = self.case
        self.faults.spread(case.num_faults, _FAULTS_S)
        self.world.after(_FAULTS_S, self.faults.end)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while not self._start():
                if self.num_starts > _MOST_STARTS or self.world.now_s > _LONGEST_S:
                    raise Stuck(f"not done after {self.num_starts} starts")
                self._let_pass(5.0)
        self._check_end()

    def _let_pass(self, seconds: float) -> None:
        """Time in which no controller is there that could crash."""
        end_s = self.world.now_s + seconds
        while self.world.now_s < end_s:
            with suppress(ControllerCrashed):
                self.world.run_until(lambda: False, end_s)

    def _start(self) -> bool:
        """One start of the same command; whether all is done after it."""
        self.num_starts += 1
        self._last_well_s = self.world.now_s
        self.world.tell(f"start {self.num_starts}")
        process = Process(self.world, CONTROLLER, f"{CONTROLLER}#{self.num_starts}")
        process.ended = lambda: self._network.process_ended(process)
        self.world.after(60.0, lambda: None)  # time can pass
        try:
            with ExitStack() as stack:
                return self._train(process, stack) == self.case.steps
        except ControllerCrashed:
            self.world.tell("the controller is gone")
        except BadInput as bad:
            self.world.tell(f"refused: {bad.got}")
            if self._is_refused and self._has_lost_something:
                raise StateLost from bad
            self._is_refused = True
        except (WorkerLost, NoFeasiblePlan, RunFailed) as error:
            self.world.tell(f"ended: {error}")
            if "no whole copy" in str(error):
                self._check_lost(error)
            if self._last_well_s > _FAULTS_S + _AFTER_FAULTS_S:
                raise Violation(f"it ends though all is well: {error!r}") from error
        finally:
            self.world.crash_at = None  # a controller that is not there cannot crash
            process.kill()
        return False

    def _train(self, process: Process, stack: ExitStack) -> int:
        launcher = SimLauncher(self._machines, process)
        membership = Membership(self._cluster, None, launcher.present)
        cluster = membership.now(again=True)
        terms = self._terms(membership)
        driver = self._driver = Driver(
            Controller(self._first_plan(cluster), launcher.connections, cluster.nodes),
            launcher,
            terms,
            cluster=cluster,
            validation_weights=(1.0,),
        )
        before, begin_s = self._complete(), self.world.now_s
        restored = driver.begin()
        self._is_refused, self._named = False, set()
        if self.faults.last_loss_s < begin_s:
            self._check_begins(before, restored, cluster)
        self._journal.rewind(driver.at)
        stop = SimpleNamespace(reason=None, grace_s=None, leaves_no_time=False)
        self.faults.ask_to_stop = lambda: setattr(stop, "reason", "asked")

        def noticed(node: str) -> None:
            if not driver.leave(node):
                stop.reason = "notice"

        self.faults.notice = noticed
        loop = self._loop(driver, stop)
        driver.heard = lambda what: self._heard(loop, what)
        with driver:
            return loop.run(driver.at)

    def _loop(self, driver: Driver, stop: Any) -> Loop:
        return Loop(
            config=self._config(),
            driver=driver,
            dataset=SimpleNamespace(bytes_per_token=1.0),  # type: ignore[arg-type]
            learning_rates=[0.1] * self.case.steps,  # type: ignore[arg-type]
            metrics=self._journal,  # type: ignore[arg-type]
            evaluated=set(),
            best=BestCheckpoint({}, self.case.keep),
            heard_saved=self._heard_saved,
            heard_best=lambda step, loss: None,
            seconds_at_peak=None,
            trace=None,
            display=SimpleNamespace(  # type: ignore[arg-type]
                note=lambda text: None, trained=lambda line: None
            ),
            stop=stop,
            spent=Spent(after=driver.at),
            compared=lambda step, seconds: None,
        )

    def _config(self) -> RunConfig:
        return RunConfig(
            model="tiny",
            run_dir=Path("simulated"),
            steps=self.case.steps,
            seq_len=8,
            global_batch=8,
            checkpoint=replace(CheckpointConfig(), every=self.case.save_every),
            evaluation=replace(EvaluationConfig(), every=4, sample_tokens=0),
        )

    def _terms(self, membership: Membership) -> Terms:
        replan: Callable[[Cluster, Plan], Plan] = lambda c, p: self._plan(c)  # noqa: E731
        return Terms(
            settings=lambda cluster, plan: {"plan": plan},
            loss_scaling=LossScaling(1.0, 1, lambda cluster, plan: plan),
            checking=StepChecking(SpikeRule(factor=10.0, window=8), {}),
            standby_plans=StandbyPlans(replan, _nobody_looks, 0.0),
            membership=membership,
            compile=lambda controller, cluster, is_first: controller.compile(),
            transport="sockets",
            seed=0,
            storage=CheckpointStorage(directory="simulated", keep=self.case.keep),
            host={"run": self.case.seed},
            recovery="local-first",
            reroutes=self.case.reroutes,
            check_begins_anew=self._refuse_to_begin_anew,
        )

    def _refuse_to_begin_anew(
        self, held: Sequence[PartialSnapshot], asked: Sequence[str]
    ) -> None:
        """As `hetjax.training.starting` does where something was, or may be, saved."""
        for step, workers in unasked(held, {*asked}).items():
            have = {found.worker for found in held if found.save[0] == step}
            self._named = workers | have
            raise may_be_whole(step, workers)
        if self._plan_of_save is not None:
            raise BadInput(got="no complete checkpoint", allowed="one", fix="--plan")

    def _first_plan(self, cluster: Cluster) -> Plan:
        """Of a start; after a refusal the user gives the plan of what was saved."""
        given, names = self._plan_of_save, {node.name for node in cluster.nodes}
        if self._is_refused and self._named and self._named <= names:
            return self._plan(part_of(cluster, self._named))
        if self._is_refused and given is not None:
            if {stage.node for _, _, stage in given.stages()} <= names:
                return given
        return self._plan(cluster)

    def _plan(self, cluster: Cluster) -> Plan:
        return planned(cluster, len(_LAYERS), self.case.num_replicas)

    # --- what must hold

    def _check_state(self, worker: SimWorker, state: State, at: int) -> None:
        """A worker's state is the one that there is after so many steps."""
        self._had[worker.name, at] = {*state}
        truth = self._truth.state(at)
        for layer, value in state.items():
            if value != truth[layer]:
                raise Violation(f"{worker.name} has a wrong {layer} after {at} steps")

    def _heard_saved(self, step: int) -> None:
        """What is said to be saved is there, whole, unless a disk was lost."""
        self.world.tell(f"saved {step}")
        if self._driver is not None:
            self._plan_of_save = self._driver.plan
        if step not in self._complete() and not self._is_excused:
            raise Violation(f"step {step} is said to be saved, and is not")

    def _heard(self, loop: Loop, what: Recovered | Rerouted) -> None:
        if isinstance(what, Rerouted):
            self.num_detours += 1
            self.world.tell(f"goes on from {what.step} without {what.replicas}")
            return loop.hear(what)
        self.num_recoveries += 1
        self.world.tell(f"recovered: {what.from_step} -> {what.step}, {what.reason}")
        if what.step < what.from_step and {*_LAYERS} <= self._survived(what.from_step):
            raise Violation(f"back to {what.step} though all have {what.from_step}")
        for process, at in [*self._had]:
            if at > what.step:
                del self._had[process, at]  # it is of a past that was given up
        loop.hear(what)

    def _hear_step(self) -> None:
        self._last_well_s = self.world.now_s

    def _hear_left(self, worker: SimWorker) -> None:
        """What it had and others have now was handed over, and is no more its concern.

        If these are lost later, that is as if it had never been.
        """
        for name, at in [*self._had]:
            if name == worker.name and self._had[name, at] <= self._alive_have(at):
                del self._had[name, at]

    def _alive_have(self, at: int) -> set[str]:
        alive = {worker.name for worker in self._machines.alive()}
        return {
            layer
            for (name, step), layers in self._had.items()
            if step == at and name in alive
            for layer in layers
        }

    def _survived(self, at: int) -> set[str]:
        """Layers that processes had after a step which are there, or just left."""
        found = set[str]()
        for processes in self._machines.running.values():
            if processes[-1].is_alive or processes[-1].has_left:
                found |= self._had[processes[-1].name, at]
        return found

    @property
    def _has_lost_something(self) -> bool:
        """Whether a disk ever lost what was on it."""
        return self.faults.last_loss_s >= 0.0

    @property
    def _is_excused(self) -> bool:
        """Whether the controller cannot know of what a disk has lost.

        Of a machine it knows after some rounds; what was damaged is seen when it is
        read.
        """
        asked_s = self._machines.asked_s[0] if self._machines.asked_s else 0.0
        return self.faults.last_loss_s >= asked_s or bool(
            self.faults.counts["damage_disk"]
        )

    def _check_lost(self, error: Exception) -> None:
        """No state is taken for lost that the disks of the plan's workers have."""
        assert self._driver is not None
        workers = {stage.node for _, _, stage in self._driver.plan.stages()}
        whole = self._complete(workers) if workers <= self._machines.up else []
        if whole and not self._is_excused:
            raise Violation(f"taken for lost, and step {whole[-1]} is there") from error
        if self._has_lost_something:
            raise StateLost from error

    def _complete(self, hosts: set[str] | None = None) -> list[int]:
        """Steps of which the disks have all layers of one save, as they must be."""
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
                if leaves.keys() == {*_LAYERS} and TORN not in leaves.values()
            }
        )

    def _check_begins(self, before: list[int], restored: Any, cluster: Cluster) -> None:
        """A start goes on from the newest step that the disks have, or is refused."""
        at = 0 if restored is None else restored.step
        are_all_there = {n.name for n in cluster.nodes} == self._machines.up
        if before and at < before[-1] and are_all_there:
            raise Violation(
                f"a start goes on from {at}, and step {before[-1]} is there"
            )

    def _check_end(self) -> None:
        """Each step is there once, with the loss that it must have; all is saved."""
        lines = [line for line in self._journal.lines if "loss" in line]
        if [line["step"] for line in lines] != [*range(1, self.case.steps + 1)]:
            raise Violation(f"metrics of steps {[line['step'] for line in lines]}")
        for step, line in enumerate(lines):
            if line["loss"] != self._truth.commit(step).loss():
                raise Violation(f"step {step + 1} has a wrong loss")
        if self.case.steps not in self._complete() and not self._is_excused:
            raise Violation("the last step is not saved")
        self.world.run_until(lambda: not self._machines.alive(), self.world.now_s + 900)
        self._check_calls()
        left = [worker.name for worker in self._machines.alive()]
        if left:
            raise Violation(f"{left[0]} is left behind")

    def _check_calls(self) -> None:
        """No more workers call again than something has ended."""
        counts = self.faults.counts
        if not counts.keys() <= _ENDS_AT_MOST.keys():
            return
        most = sum(_ENDS_AT_MOST[kind] * number for kind, number in counts.items())
        again = self._machines.num_called - self.case.num_nodes * self.num_starts
        if again > most:
            raise Violation(f"{again} workers have called again, though {most} ended")


def _nobody_looks(clusters: Any, plan: Plan) -> Any:
    raise AssertionError("no plans are made ahead here")


def simulate(seed: int) -> Outcome:
    """Run one seed; an error of whatever kind is a violation."""
    run = Run(seed)
    violation: str | None = None
    try:
        run.to_its_end()
    except StateLost:
        pass
    except Exception as error:
        violation = f"{type(error).__name__}: {error}"
    return Outcome(
        seed=seed,
        num_events=run.world.num_events,
        num_starts=run.num_starts,
        num_recoveries=run.num_recoveries,
        num_detours=run.num_detours,
        faults=dict(run.faults.counts),
        violation=violation,
        told=tuple(run.world.told) if violation else (),
    )
