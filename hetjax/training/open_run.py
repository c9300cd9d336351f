# SPDX-License-Identifier: Apache-2.0
"""Opens a run: workers that have its state, and journals to write to.

Owns building these from what a start has settled, and what is written before the first
step. Does not own what a start settles (`start.py`), the driver (`driver_setup.py`),
nor training (`session.py`).
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

from hetjax.data.dataset import Dataset
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.launchers.reprovisioning import Follow
from hetjax.launchers.table import LAUNCHERS
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import write_plan
from hetjax.report.progress import Display
from hetjax.training.directory import rundir
from hetjax.training.directory.identity import BASE
from hetjax.training.directory.journal import Journal
from hetjax.training.directory.leases import Leases
from hetjax.training.directory.leftover_checkpoints import check_store
from hetjax.training.directory.progress import check_reached, checkpoint_storage
from hetjax.training.directory.removed import rewriting, was_removed
from hetjax.training.directory.reopened import keep_model
from hetjax.training.driver_setup import start_driver
from hetjax.training.observers.dispatch import Dispatcher
from hetjax.training.observers.goodput import Spent
from hetjax.training.observers.records import StartRecord
from hetjax.training.observers.slow_devices import SlowDevices, watches
from hetjax.training.observers.step_comparison import (
    Predict,
    StepComparison,
    learn_step,
)
from hetjax.training.recorder import Recorder
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.notice_sources import Notice
from hetjax.training.replanning.replanning import Replanning
from hetjax.training.replanning.weighing_process import WeighingProcess
from hetjax.training.run_data import run_dataset
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset
from hetjax.training.settings.run_settings import PASSING
from hetjax.training.settings.values import flat_values
from hetjax.training.start import Start, describe, with_other_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    """The run's workers, text and journals, from the first use of its state on."""

    start: Start
    dataset: Dataset
    driver: Driver
    metrics: Journal
    events: Journal
    worker_notices: SimpleQueue[Notice]  # from the start of the workers on
    comparison: StepComparison
    slow_devices: SlowDevices
    replanning: Replanning

    def recorder(self, shown: Display) -> Recorder:
        return Recorder(
            self.start.config.run_dir,
            self.metrics,
            self.events,
            shown,
            self.comparison,
        )

    def restore_files(self, recorder: Recorder) -> bool:
        """Rewrite the run's files and return True if its directory was removed."""
        start, driver = self.start, self.driver
        run_dir, identity = start.config.run_dir, driver.run or start.run
        if not was_removed(run_dir, identity):
            return False
        with rewriting(run_dir, identity):
            if start.leases is not None:
                start.leases.assert_again()
            with suppress(BadInput):  # the model's folder may be gone, too
                keep_model(start.config)
            rundir.write_start(
                run_dir,
                identity,
                start.config,
                self.dataset,
                driver.cluster,
                driver.plan,
                start.base.get(BASE),
            )
            recorder.write_again()
        recorder.event("rewritten", driver.at)
        recorder.note(f"{run_dir} was removed: its files are written again")
        return True


def open_run(
    start: Start,
    preset: Preset,
    predict: Predict,
    spent: Spent,
    observers: Dispatcher,
    shown: Display,
    stack: ExitStack,
    on_waiting: Follow | None,
) -> OpenRun:
    """Prepare the state, and write the files of this start.

    `stack` releases what the run holds; `spent` gets the time that this took. For
    `on_waiting` see `launcher_of`.
    """
    storage, run_dir = checkpoint_storage(start.config), start.config.run_dir
    adopts = start.config.adopt is not None
    leases = Leases(run_dir, storage, stack, shown.note, start.run.id, adopts)
    start = replace(start, leases=leases)
    with spent.on("data"):
        dataset = run_dataset(start.config, start.model, start.previous, shown)
    if LAUNCHERS[start.config.launcher].has_worker_processes:
        check_store(replace(start.claim, hashes=start.hashes(dataset)), storage)
    describe(start, dataset, shown)
    shown.doing("preparing the programs")
    notices = SimpleQueue[Notice]()
    with spent.on("compiling"):
        begin = partial(
            start_driver,
            dataset=dataset,
            shown=shown,
            on_notice=notices.put,
            on_waiting=on_waiting,
        )
        start, driver = _driver(start, preset, dataset, shown, begin, stack)
    check_reached(driver.at, start.config)
    metrics, events = _begin(start, dataset, driver)
    _begin_observers(observers, start, driver, shown)
    metrics.observed = events.observed = observers.see_line
    comparison = _comparison(start, predict)
    comparison.begin(driver.plan, start.hardware.cluster)
    slow_devices = _slow_devices(start.config, driver)
    slow_devices.begin(driver.plan, start.hardware.cluster)
    replanning = _replanning(start.config, driver, spent.parts_s.get("compiling", 0.0))
    stack.callback(replanning.close)
    replanning.begin(driver.plan, start.hardware.cluster)
    found = OpenRun(
        start=start,
        dataset=dataset,
        driver=driver,
        metrics=stack.enter_context(closing(metrics)),
        events=stack.enter_context(closing(events)),
        worker_notices=notices,
        comparison=comparison,
        slow_devices=slow_devices,
        replanning=replanning,
    )
    _record_origin(start, driver, found.recorder(shown))
    return found


def _driver(
    start: Start,
    preset: Preset,
    dataset: Dataset,
    shown: Display,
    begin: Callable[[Start], Driver],
    stack: ExitStack,
) -> tuple[Start, Driver]:
    """Begin a driver that has compiled the plan; return it with its start.

    If the planner's plan does not fit by the compiler's figures, plan again with these.
    """
    try:
        return start, stack.enter_context(begin(start))
    except NoFeasiblePlan as none:
        if not start.choice.is_searched:
            raise
        shown.note(f"{none.got}; planning again with these figures")
    start = with_other_plan(start, preset, shown)
    describe(start, dataset, shown)
    return start, stack.enter_context(begin(start))


def _begin_observers(
    observers: Dispatcher, start: Start, driver: Driver, shown: Display
) -> None:
    """Tell observers that the run has started, and from here on of lost workers."""
    observers.begin(_start_record(start, driver), shown.note)
    driver.on_lost = lambda lost: observers.see_lost(
        driver.at, lost.worker, lost.reason
    )


def _comparison(start: Start, predict: Predict) -> StepComparison:
    return StepComparison(
        predict=predict,
        learn=partial(learn_step, start.config, start.model),
        is_simulated=start.config.simulate,
    )


def _slow_devices(config: RunConfig, driver: Driver) -> SlowDevices:
    """Return the run's `SlowDevices`, without what an earlier start has found."""
    path = config.run_dir / rundir.SLOW
    path.unlink(missing_ok=True)
    return SlowDevices(
        is_on=watches(config),
        is_one_process=not LAUNCHERS[config.launcher].has_worker_processes,
        path=path,
        timing=driver.timing,
        changed=driver.forget_plans,
    )


def _replanning(config: RunConfig, driver: Driver, start_s: float) -> Replanning:
    """Return a `Replanning` that reports plans or moves to them, by the settings."""

    def keep(plan: Plan) -> str:
        path = config.run_dir / rundir.PROPOSED
        try:
            write_plan(path, plan)
        except OSError as error:  # a full disk must not end the run
            warnings.warn(f"cannot keep the other plan: {error.strerror}", stacklevel=2)
            return ""
        return str(path)

    moves = config.replan == "auto" and config.recovery != "none"
    return Replanning(
        weighs=None if config.replan == "never" else partial(WeighingProcess, config),
        move_to=driver.move_to if moves else None,
        keep=keep,
        start_s=start_s,
    )


def _begin(start: Start, dataset: Dataset, driver: Driver) -> tuple[Journal, Journal]:
    """Write the files of this start; open metrics.jsonl and events.jsonl."""
    config, run_dir, check = start.config, start.config.run_dir, start.check_leases
    keep_model(config)
    rundir.write_start(
        run_dir,
        driver.run or start.run,
        config,
        dataset,
        start.hardware.cluster,
        start.choice.plan,
        start.base.get(BASE),
    )
    return (
        Journal(run_dir / rundir.METRICS, last_step=driver.at, may_write=check),
        Journal(run_dir / rundir.EVENTS, last_step=config.steps, may_write=check),
    )


def _start_record(start: Start, driver: Driver) -> StartRecord:
    return StartRecord(
        run=(driver.run or start.run).id,
        run_dir=start.config.run_dir,
        step=driver.at,
        steps=start.config.steps,
        settings=flat_values(start.config),
    )


def _record_origin(start: Start, driver: Driver, recorder: Recorder) -> None:
    """Record where the state is from, and how plan and settings have changed."""
    at, source = driver.at, start.choice.source
    recorder.apart(driver.places(), at)
    if driver.resumed is not None:
        recorder.resumed(driver.resumed, at)
    if start.previous is None:
        return recorder.event("started", at, plan=source)
    if start.previous.plan != start.choice.plan:
        recorder.event("replanned", at, plan=source)
        recorder.note(f"new plan, from {source}")
    for name, (was, now) in rundir.changes(start.previous, start.config).items():
        if name not in PASSING:
            recorder.note(f"{name} is {now} from here on (was {was})")
            recorder.event("reconfigured", at, setting=name, was=was, now=now)
