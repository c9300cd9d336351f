# SPDX-License-Identifier: Apache-2.0
"""Builds a driver that has the run's state from what a start has settled.

Owns the parts of a driver, and the run's answers to it. Does not own what a start
settles (`start.py`), the driver (`recovery/driver.py`), nor what workers do
(`worker.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from hetjax.checkpoint.format import AttemptNames, committed_after, step_directory
from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.data.batches import Batch, weights
from hetjax.data.dataset import Dataset
from hetjax.launchers.launcher import Launcher
from hetjax.launchers.reprovisioning import Follow
from hetjax.launchers.table import LAUNCHERS
from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import parse_plan
from hetjax.plans.worker_map import EMBEDDED, node_of
from hetjax.report.progress import Display
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.recovery import Restored
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.rpc.schema import Json
from hetjax.training.directory import rundir
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.leftover_checkpoints import (
    check_begins,
    check_is_of_run,
    identify,
)
from hetjax.training.directory.own_disks import kept_where
from hetjax.training.directory.progress import checkpoint_storage, last_saved
from hetjax.training.fetching.models import ModelSource, model_sources
from hetjax.training.fetching.text import text_files
from hetjax.training.launchers import launcher_of
from hetjax.training.layout.compiled_memory import compile_again, compile_all
from hetjax.training.layout.hardware import on_cpus
from hetjax.training.layout.plan_choice import (
    next_plan,
    precise_plan,
    read_run_slowness,
)
from hetjax.training.layout.planning_process import Planning
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.driver_config import DriverConfig, RunContext
from hetjax.training.recovery.loss_scaling import LossScaling
from hetjax.training.recovery.membership import Membership
from hetjax.training.recovery.notice_sources import Notice
from hetjax.training.recovery.standby_plans import StandbyPlans
from hetjax.training.recovery.step_checking import SpikeRule, StepChecking
from hetjax.training.settings.config import RunConfig, is_virtual
from hetjax.training.settings.run_settings import kept_settings, settings_to_compare
from hetjax.training.start import Start
from hetjax.training.worker import (
    TrainingWork,
    device_kinds,
    first_weights,
    held_out,
    training_feed,
    worker_settings,
)

Metrics = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
ModelFiles = Sequence[tuple[ModelSource, Mapping[str, Path]]]


def start_driver(
    start: Start,
    dataset: Dataset,
    shown: Display,
    on_notice: Callable[[Notice], None],
    on_waiting: Follow | None,
) -> Driver:
    """Start workers, compile the plan's programs and fill in the state to start from.

    Raises NoFeasiblePlan if the compiled programs need more memory than there is. Other
    threads call `on_notice` with the notices that workers receive about their machines.
    For `on_waiting` see `launcher_of`.
    """
    config, plan, cluster = start.config, start.choice.plan, start.hardware.cluster
    validation, is_far = held_out(config, dataset), _may_be_far(config)
    models = model_sources(config) if is_far else []
    with ExitStack() as stack:
        work = partial(_work_here, start, dataset, validation)
        launcher = launcher_of(
            config,
            start.hardware,
            start.number,
            work,
            stack,
            shown.note,
            _files_given(dataset, models) if is_far else {},
            on_waiting,
        )
        launcher.connections.noticed = lambda worker, notice: on_notice(
            Notice(source=notice.source, grace_s=notice.grace_s, node=node_of(worker))
        )
        driver_config = _driver_config(start, dataset, launcher, shown, models)
        stack.callback(driver_config.standby_plans.close)
        controller = Controller(plan, launcher.connections, cluster.nodes)
        controller.new_attempts = AttemptNames(start.run.after + start.number)
        controller.predicts_steps = not is_virtual(config)
        driver = Driver(
            controller,
            launcher,
            driver_config,
            cluster=cluster,
            validation_weights=weights(validation),
        )
        restored = driver.begin()
        driver.resumed = restored and _origin(restored, config)
        driver.stack = stack.pop_all()
        return driver


def _may_be_far(config: RunConfig) -> bool:
    """Return whether workers may be on other machines, and lack files of this one."""
    return not LAUNCHERS[config.launcher].workers_are_here


def _files_given(dataset: Dataset, models: ModelFiles) -> dict[str, Path]:
    """Return the files, by name, that workers on other machines may lack."""
    given = text_files(dataset)
    for _, files in models:
        given |= files
    return given


def _origin(restored: Restored, config: RunConfig) -> dict[str, Any]:
    """Return what `events.jsonl` says about the state to start from."""
    origin = {"bytes": restored.num_bytes, "seconds": restored.seconds}
    if LAUNCHERS[config.launcher].has_worker_processes:
        return origin
    directory = checkpoint_storage(config).at(EMBEDDED)
    origin["checkpoint"] = str(step_directory(directory, restored.step))
    damaged = committed_after(directory, restored.step)
    return origin | ({"passed_over": damaged} if damaged else {})


def _work_here(
    start: Start, dataset: Dataset, validation: Sequence[Batch], settings: Json
) -> TrainingWork:
    """Return the work of the worker in this process, built from its settings."""
    config = start.config
    return TrainingWork(
        runtime=StageRuntime(
            parse_plan(settings["plan"]),
            start.model,
            start.hardware.devices,
            optimizer(config.optimizer, config.steps),
            clip_norm=config.optimizer.clip_norm,
            weights=first_weights(config, start.model),
            kinds=device_kinds(config, parse_cluster(settings["cluster"])),
            deterministic=config.deterministic,
        ),
        feed=training_feed(config, dataset),
        held_out=validation,
    )


def _driver_config(
    start: Start,
    dataset: Dataset,
    launcher: Launcher,
    shown: Display,
    models: ModelFiles,
) -> DriverConfig:
    config, context = start.config, TrainingContext(start, dataset, shown, models)
    # cached: callers that check whether there is a plan then ask for it
    planned = lru_cache(maxsize=4)(partial(next_plan, config, start.model))

    def replan(cluster: Cluster, current: Plan) -> Plan:
        return planned(cluster, current, read_run_slowness(config))

    # no compiling ahead if this process itself runs the steps
    has_workers = LAUNCHERS[config.launcher].has_worker_processes
    ahead_s = config.standby_plans_after_s if has_workers else 0.0
    return DriverConfig(
        context=context,
        loss_scaling=LossScaling(
            config.loss_scale_init, config.loss_scale_growth_interval, context.precise
        ),
        checking=_checking(config, context.metrics),
        standby_plans=StandbyPlans(replan, partial(Planning, config), ahead_s),
        membership=Membership(start.hardware.cluster, config.cluster, launcher.present),
        transport=config.transport,
        seed=config.seed,
        storage=start.storage,
        host={"run": settings_to_compare(config) | start.hashes(dataset)},
        recovery=config.recovery,
        reroutes=config.reroute,
        compiles_ahead=ahead_s > 0 and not on_cpus(config, start.hardware.cluster),
    )


def _checking(config: RunConfig, metrics: Metrics) -> StepChecking:
    """Return the checks of steps, with the losses of the steps that are done."""
    return StepChecking(
        SpikeRule(factor=config.spike_factor, window=config.spike_window),
        {line["step"] - 1: line["loss"] for line in metrics if "loss" in line},
        digest_every=config.digest_every,
        save_every=config.checkpoint.every,
        skips_spikes=config.on_spike == "skip",
    )


class TrainingContext(RunContext):
    """The answers of a training run to its driver."""

    def __init__(
        self, start: Start, dataset: Dataset, shown: Display, models: ModelFiles
    ) -> None:
        self._start, self._dataset, self._shown = start, dataset, shown
        self._storage, self._places = start.storage, dict[str, str]()
        self._models = [source for source, _ in models]
        config, model = start.config, start.model
        self.precise = lru_cache(maxsize=4)(partial(precise_plan, config, model))

    @cached_property
    def metrics(self) -> Metrics:
        """The lines of metrics.jsonl when the run starts."""
        return read_journal(self._start.config.run_dir / rundir.METRICS)

    def worker_settings(self, cluster: Cluster, plan: Plan) -> Mapping[str, Any]:
        config, precise = self._start.config, self.precise(cluster, plan)
        storage, models = self._storage, self._models
        lease = (storage.lease, storage.number, storage.token) if storage.token else ()
        return worker_settings(
            config, cluster_toml(cluster), precise, self._dataset, lease, models
        )

    def compile(
        self, controller: Controller, cluster: Cluster, *, is_first: bool
    ) -> None:
        config, model = self._start.config, self._start.model
        if is_first:
            report = self._shown.compiled
            compile_all(config, model, self.precise, controller, cluster, report)
        else:
            compile_again(config, model, self.precise, controller, cluster)

    def on_workers_started(self, workers: Sequence[str]) -> None:
        launcher = self._start.config.launcher
        self._shown.note(f"workers ({launcher}): {', '.join(workers)}")

    def on_places(
        self, places: Mapping[str, str], storage: CheckpointStorage, num_nodes: int
    ) -> None:
        self._places = dict(places)
        config = self._start.config
        if _may_be_far(config):
            self._shown.note(kept_where(config.run_dir, places, storage, num_nodes))

    def identify(self, found: Sequence[PartialSnapshot]) -> RunIdentity:
        start, hashes = self._start, self._start.hashes(self._dataset)
        claim = replace(start.claim, lease=start.number, hashes=hashes)
        run = identify(claim, self._storage, found, self._shown.note)
        check_is_of_run(self._storage, kept_settings(start.config) | hashes, found)
        return run

    def check_begins(
        self, found: Sequence[PartialSnapshot], asked: Sequence[str], step: int | None
    ) -> None:
        start, folders = self._start, sorted({*self._places.values()})
        is_local = start.config.checkpoint.local is not None
        check_begins(
            replace(self._storage, directory=" and ".join(folders))
            if folders
            else self._storage,
            last_saved(read_journal(start.config.run_dir / rundir.EVENTS)),
            may_have_saved_on(start, self.metrics, is_local or bool(folders)),
            found,
            asked,
            step,
        )


def may_have_saved_on(
    start: Start, metrics: Metrics, on_own_disks: bool
) -> frozenset[str]:
    """Return the nodes on whose own disks the run may have saved without a record.

    A run records a checkpoint only when it makes the next one.
    """
    kept, before = start.config.checkpoint, start.previous
    last = max((line["step"] for line in metrics), default=0)
    if before is None or not on_own_disks or not 0 < kept.every <= last:
        return frozenset()
    if before.plan is None:
        return before.cluster.names
    return before.plan.nodes
