# SPDX-License-Identifier: Apache-2.0
"""Runs one simulated run with the real loop, driver and controller.

Owns the construction of these, and restarts of a run that ended too early. Does not own
its sizes (`case.py`), its invariants (`invariants.py`), nor its faults (`faults.py`).
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from experiments.simulation.case import LAYERS, case_of
from experiments.simulation.faults import Faults
from experiments.simulation.invariants import Invariants, StateLost
from experiments.simulation.network import Network
from experiments.simulation.object_store import Bucket
from experiments.simulation.ports import (
    CONTROLLER,
    Machines,
    SimJournal,
    SimLauncher,
)
from experiments.simulation.shares import planned
from experiments.simulation.site import Site
from experiments.simulation.storage import (
    RunDirectory,
    leases_in,
    storage_of,
)
from experiments.simulation.store_faults import StoreFaults
from experiments.simulation.stored import Stored
from experiments.simulation.threads import Threads
from experiments.simulation.truth import Truth
from experiments.simulation.world import (
    ControllerCrashed,
    Process,
    Stuck,
    World,
)
from hetjax.checkpoint.format import AttemptNames
from hetjax.checkpoint.recovery_plan import PartialSnapshot, unasked
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stores.store import StoreError
from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.errors import BadInput, NoFeasiblePlan, RunFailed
from hetjax.plans.plan import Plan
from hetjax.plans.worker_map import node_of
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.directory.best import BestCheckpoint
from hetjax.training.directory.leases import Leases
from hetjax.training.directory.leftover_checkpoints import may_be_whole, may_have_saved
from hetjax.training.loop import Loop
from hetjax.training.observers.goodput import Spent
from hetjax.training.recorder import Recorder
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.driver_config import DriverConfig, RunContext
from hetjax.training.recovery.loss_scaling import LossScaling
from hetjax.training.recovery.membership import Membership
from hetjax.training.recovery.recovered import Recovered, Rerouted
from hetjax.training.recovery.standby_plans import StandbyPlans
from hetjax.training.recovery.step_checking import SpikeRule, StepChecking
from hetjax.training.saving import Saving
from hetjax.training.settings.config import (
    CheckpointConfig,
    EvaluationConfig,
    RunConfig,
)

_ON_OTHERS = "where the plan has no stage"  # refusal: the plan omits nodes with a save
_MOST_STARTS = 60
_LONGEST_S = 1e6


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The counts of a run, or its violation; `told` are then its last events."""

    seed: int
    num_events: int
    num_starts: int
    num_recoveries: int
    num_detours: int
    faults: dict[str, int]
    violation: str | None = None
    told: tuple[str, ...] = ()


class Run:
    """A run from its first start to its last. A broken invariant raises Violation."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.case = case = case_of(self.world, seed)
        truth = Truth(LAYERS, seed)
        self._network = Network(self.world)
        nodes = tuple(
            Node(name=f"n{number}", device="cpu", count=1)
            for number in range(case.num_nodes)
        )
        self._cluster = Cluster(name="simulated", nodes=nodes)
        self.invariants = invariants = Invariants(case, truth)
        self._threads = Threads(self.world)
        bucket = Bucket(self.world) if case.has_store else None
        stored = None
        if bucket is not None:
            stored = Stored(bucket, truth, LAYERS)
            bucket.changed = stored.hear
        self._folder = Bucket(self.world)
        seen = self._folder if case.is_shared else None
        self._storage = storage_of(case.keep, bucket, seen)
        site = Site(
            world=self.world,
            network=self._network,
            threads=self._threads,
            bucket=bucket,
            layers=LAYERS,
            first=lambda: truth.state(0),
            told=invariants.check_state,
            leaving=invariants.hear_leaving,
            dropped=invariants.hear_dropped,
            giving_up=invariants.hear_giving_up,
            lost=invariants.hear_lost,
            removed=invariants.check_removed,
            keep=case.keep,
        )
        self._machines = Machines(
            site, self._cluster, case.is_shared, invariants.check_tries
        )
        self.faults = Faults(
            self.world, self._network, self._machines, coincide=case.coincides
        )
        invariants.watch(self._machines, self.faults, stored)
        self._store_faults = stored and StoreFaults(stored, self.faults)
        self._journal = SimJournal(invariants.hear_line)
        self.num_starts = self.num_recoveries = self.num_detours = 0
        self._named = set[str]()  # nodes that may together have a save, by a refusal
        self._missed = list[str]()  # those of them that were not asked
        self._passed_over = set[int]()  # that the last start reported as passed over
        self._was_on = frozenset[str]()  # nodes of the plan when the last start ended
        self._is_refused = False  # from a refusal until a start succeeds

    def to_its_end(self) -> None:
        case = self.case
        self.faults.spread(case.num_faults)
        if self._store_faults is not None:
            self._store_faults.spread()
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(self._threads.in_place())
            stack.enter_context(leases_in(self._threads, self._folder))
            stack.callback(self.world.end)
            warnings.simplefilter("ignore")
            while not self._start():
                if self.num_starts > _MOST_STARTS or self.world.now_s > _LONGEST_S:
                    raise Stuck(f"not done after {self.num_starts} starts")
                self._let_pass(5.0)
        self.invariants.check_end(self._journal.lines, self.num_starts)

    def _let_pass(self, seconds: float) -> None:
        """Let time pass without a controller that could crash."""
        end_s = self.world.now_s + seconds
        while self.world.now_s < end_s:
            with suppress(ControllerCrashed):
                self.world.run_until(lambda: False, end_s)

    def _start(self) -> bool:
        """Start the same command once; return whether training is complete after it."""
        self.num_starts += 1
        self.invariants.begin()
        self.world.tell(f"start {self.num_starts}")
        process = Process(self.world, CONTROLLER, f"{CONTROLLER}#{self.num_starts}")
        process.ended = lambda: self._network.process_ended(process)
        self.world.after(60.0, lambda: None)  # so that time can pass
        try:
            with ExitStack() as stack, self._threads.of(process):
                try:
                    return self._train(process, stack) == self.case.steps
                except ControllerCrashed:
                    stack.pop_all()  # no lease is released
                    raise
        except ControllerCrashed:
            self.world.tell("the controller is gone")
        except BadInput as bad:
            self.world.tell(f"refused: {bad.got}")
            asks_for_others = (
                _ON_OTHERS in bad.got and self.invariants.was_nothing_saved
            )
            if self._is_refused and (asks_for_others or self.invariants.is_all_lost):
                raise StateLost from bad  # a person would start a new run
            self._is_refused = True
        except StoreError as error:
            self.world.tell(f"the store is not there: {error}")
            self.invariants.check_refused()
        except (WorkerLost, NoFeasiblePlan, RunFailed) as error:
            self.world.tell(f"ended: {error}")
            self.invariants.check_ended(error)
        finally:
            self.world.crash_at = None  # a controller that is gone cannot crash
            process.kill()
        return False

    def _train(self, process: Process, stack: ExitStack) -> int:
        storage: CheckpointStorage = self._storage
        leases = None
        if self.case.has_store:
            leases = Leases(RunDirectory(), storage, stack, self.world.tell)  # type: ignore[arg-type]
            storage = leases.protecting(storage)
        launcher = SimLauncher(self._machines, process)
        membership = Membership(self._cluster, None, launcher.present)
        cluster = membership.now(again=True)
        config = self._driver_config(membership, storage)
        plan = self._first_plan(cluster)
        controller = Controller(plan, launcher.connections, cluster.nodes)
        if leases is not None:
            controller.new_attempts = AttemptNames(leases.start)
        driver = Driver(
            controller,
            launcher,
            config,
            cluster=cluster,
            validation_weights=(1.0,),
        )
        self.invariants.follow(driver, membership)
        before, begin_s = self.invariants.complete(), self.world.now_s
        stored = self.invariants.in_store()
        restored = driver.begin()
        self._is_refused, self._named, self._missed = False, set(), []
        self._was_on = driver.plan.nodes
        self.invariants.check_begins(
            before, stored, begin_s, restored, driver.cluster, self._passed_over
        )
        self._journal.may_write = self._may_write(leases)
        self._journal.rewind(driver.at)
        self.invariants.found_again |= self._journal.steps_found_again(driver.at)
        stop = SimpleNamespace(reason=None, grace_s=None, leaves_no_time=False)
        self.faults.ask_to_stop = lambda: setattr(stop, "reason", "asked")

        def noticed(node: str) -> None:
            if not driver.leave(node):
                stop.reason = "notice"

        self.faults.notice = noticed
        loop = self._loop(driver, stop)
        driver.on_recovery = lambda what: self._on_recovery(loop, what)
        with driver:
            return loop.run(driver.at)

    def _may_write(self, leases: Leases | None) -> Callable[[], None]:
        return lambda: None if leases is None else leases.check()

    def _loop(self, driver: Driver, stop: Any) -> Loop:
        recorder = _Recorder(self._journal, self._on_saved)
        return Loop(
            config=self._config(),
            driver=driver,
            dataset=SimpleNamespace(bytes_per_token=1.0),  # type: ignore[arg-type]
            learning_rates=[0.1] * self.case.steps,  # type: ignore[arg-type]
            recorder=recorder,
            saving=Saving(
                driver=driver,
                recorder=recorder,
                best=BestCheckpoint({}, self.case.keep),
            ),
            stop=stop,
            spent=Spent(after=driver.at),
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

    def _driver_config(
        self, membership: Membership, storage: CheckpointStorage
    ) -> DriverConfig:
        replan: Callable[[Cluster, Plan], Plan] = lambda c, p: self._plan(c)  # noqa: E731
        return DriverConfig(
            context=_Context(self._check_begins),
            loss_scaling=LossScaling(1.0, 1, lambda cluster, plan: plan),
            checking=StepChecking(SpikeRule(factor=10.0, window=8), {}),
            standby_plans=StandbyPlans(replan, _nobody_looks, 0.0),
            membership=membership,
            transport="sockets",
            seed=0,
            storage=storage,
            host={"run": self.case.seed},
            recovery="local-first",
            reroutes=self.case.reroutes,
        )

    def _check_begins(
        self,
        held: Sequence[PartialSnapshot],
        asked: Sequence[str],
        begins_at: int | None,
    ) -> None:
        """Apply the check of `leftover_checkpoints.check_begins`."""
        missed = unasked(held, {*asked})
        if begins_at is not None:
            self._passed_over = {later for later in missed if later > begins_at}
            return
        for step, workers in missed.items():
            have = {found.worker for found in held if found.save[0] == step}
            self._named |= workers | have
            self._missed += sorted(workers)
            raise may_be_whole(step, workers)
        trained = max((line["step"] for line in self._journal.lines), default=0)
        has_saved = 0 < self.case.save_every <= trained and not self.case.is_shared
        if has_saved and (others := self._was_on - {*map(node_of, asked)}):
            self._named |= self._was_on
            raise may_have_saved(others)
        if self.invariants.plan_of_save is not None:
            raise BadInput(got="no complete checkpoint", allowed="one", fix="--plan")

    def _first_plan(self, cluster: Cluster) -> Plan:
        """Return the plan of a start; after a refusal, the plan of the save."""
        given, names = (
            self.invariants.plan_of_save,
            {node.name for node in cluster.nodes},
        )
        if self._is_refused and self._named and self._named <= names:
            named = part_of(cluster, self._named).nodes
            first = sorted(named, key=lambda node: node.name not in self._missed)
            return self._plan(replace(cluster, nodes=tuple(first)))
        if self._is_refused and given is not None:
            if given.nodes <= names:
                return given
        return self._plan(cluster)

    def _plan(self, cluster: Cluster) -> Plan:
        case = self.case
        return planned(cluster, len(LAYERS), case.num_replicas, case.most_layers)

    def _on_saved(self, step: int) -> None:
        self.world.tell(f"saved {step}")
        self.invariants.check_saved(step)
        if step == self.case.steps:
            self.faults.hear("last saved")

    def _on_recovery(self, loop: Loop, what: Recovered | Rerouted) -> None:
        if isinstance(what, Rerouted):
            self.num_detours += 1
            self.world.tell(f"goes on from {what.step} without {what.replicas}")
            return loop.on_recovery(what)
        self.num_recoveries += 1
        self.world.tell(f"recovered: {what.from_step} -> {what.step}, {what.reason}")
        self._was_on = loop.driver.plan.nodes
        self.invariants.check_recovered(what)
        if "not finite" in what.reason:
            self.faults.hear("gone back")
        loop.on_recovery(what)


class _Context(RunContext):
    """A run whose workers need only the plan."""

    def __init__(self, check: Callable[..., None]) -> None:
        self._check = check

    def worker_settings(self, cluster: Cluster, plan: Plan) -> dict[str, Any]:
        return {"plan": plan}

    def compile(
        self, controller: Controller, cluster: Cluster, *, is_first: bool
    ) -> None:
        controller.compile()

    def check_begins(
        self, found: Sequence[PartialSnapshot], asked: Sequence[str], step: int | None
    ) -> None:
        self._check(found, asked, step)


class _Recorder(Recorder):
    """Keeps the metrics; shows and writes nothing."""

    def __init__(self, metrics: SimJournal, on_saved: Callable[[int], None]) -> None:
        silent: Any = SimpleNamespace(
            note=lambda text: None, trained=lambda line: None, append=lambda line: None
        )
        super().__init__(Path("simulated"), cast(Any, metrics), silent, silent)
        self._on_saved = on_saved

    def saved(self, step: int) -> None:
        self._on_saved(step)


def _nobody_looks(clusters: Any, plan: Plan) -> Any:
    raise AssertionError("no plans are made ahead here")


def simulate(seed: int) -> Outcome:
    """Run one seed; an error of any kind is a violation."""
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
