# SPDX-License-Identifier: Apache-2.0
"""One run from its settings to its end: what stands before and after the loop.

Owns the order of set-up (all that the user may have got wrong comes before anything
is written), resuming, and what stays open between two calls to train. Does not own the
loop (`loop.py`), what is said and written (`events.py`), the command line
(`hetjax/cli/train.py`) nor the class for notebooks (`hetjax/api/trainer.py`).
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, TypeVar

from hetjax.checkpoint.lease import LeaseLost
from hetjax.cluster.cluster import Cluster
from hetjax.costs.utilization import seconds_at_peak
from hetjax.data.batches import Batch
from hetjax.data.dataset import Dataset
from hetjax.elastic.driver import Driver
from hetjax.elastic.notices import Notice, StopRequest, Watch, of_workers
from hetjax.elastic.recovered import Recovered, Rerouted, RolledBack
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.models.model import Model
from hetjax.plans.plan import Plan
from hetjax.report.progress import Display, display
from hetjax.training import rundir
from hetjax.training.best import BEST, VAL_LOSS
from hetjax.training.config import EvaluationConfig, RunConfig
from hetjax.training.config_checks import check_config
from hetjax.training.events import (
    DONE,
    begin,
    clear_ends,
    describe,
    event,
    finish,
    record_comparison,
    record_goodput,
    record_recovery,
    record_rerouting,
)
from hetjax.training.goodput import Spent
from hetjax.training.hardware import choose_hardware, with_needed_launcher
from hetjax.training.identity import provisional
from hetjax.training.interrupts import Interrupted, interruptible
from hetjax.training.leases import Leases
from hetjax.training.left_checkpoints import claim_of
from hetjax.training.loop import Loop
from hetjax.training.optimizer import LearningRates
from hetjax.training.placement import choose_plan
from hetjax.training.presets import Preset
from hetjax.training.removed_directory import write_again_if_removed
from hetjax.training.run_data import run_dataset, with_packing
from hetjax.training.run_model import warn_of_other_model, warn_of_random_base
from hetjax.training.run_reports import write_report
from hetjax.training.rundir import Journal, read_journal
from hetjax.training.starting import (
    Start,
    best_so_far,
    check_reached,
    checkpoint_storage,
    driver_of,
    evaluated,
    identified_here,
    read_progress,
)
from hetjax.training.step_comparison import StepComparison, predict_step
from hetjax.training.worker import first_weights, training_feed

T = TypeVar("T")
_TOLD_EVERY_S = 0.1


def run(config: RunConfig, preset: Preset, model: Model) -> int:
    """Train, or go on with the run in `run_dir`; return the exit code 0 or 4.

    `preset` gives the cluster and the plan to fall back on. Raises BadInput before
    anything is written, RunFailed where training cannot go on, Interrupted by SIGINT or
    SIGTERM where there is nothing to save.
    """
    check_config(config)
    code: int | None = None
    try:
        with (
            interruptible(),
            clear_ends(config),
            rundir.locked(config.run_dir),
            display(config.steps, config.run_dir / rundir.LOG) as shown,
            Session(config, preset, model) as session,
        ):
            code = session.fit(shown)
    except Interrupted:
        if code is None:
            raise
    assert code is not None
    return code  # whatever has cut short what came after it


@dataclass(frozen=True, kw_only=True, slots=True)
class _Open:
    """What is there from the first use of the state to the end."""

    start: Start
    dataset: Dataset
    driver: Driver
    metrics: Journal
    events: Journal
    told: SimpleQueue[Notice]  # by workers, from when they start
    comparison: StepComparison


class Session(ExitStack):
    """A run in a directory that is held; its state stays within `with`.

    `cluster` and `plan` come before those of files. `again` is what people are told to
    do to go on. Each call shows how it goes, and raises as `run` does.
    """

    def __init__(
        self,
        config: RunConfig,
        preset: Preset,
        model: Model,
        *,
        cluster: Cluster | None = None,
        plan: Plan | None = None,
        again: str = "the same command",
    ) -> None:
        super().__init__()
        self._config = with_needed_launcher(config, preset, cluster)
        self._preset, self._model = preset, model
        self._cluster, self._plan, self._again = cluster, plan, again
        predict = partial(predict_step, self._config, model)
        self._predict = lru_cache(maxsize=1)(predict)
        self._begin_s = time.perf_counter()
        self._prepared = Spent(after=0)
        self._settled: Start | None = None
        self._opened: _Open | None = None

    def fit(self, shown: Display, num_steps: int | None = None) -> int:
        """Train to the last step, or for so many; return the exit code."""
        config = self._config
        if num_steps is not None:
            config = replace(config, stop_after=num_steps)
            check_config(config)
        if self._is_done(shown):
            shown.note(f"{config.run_dir} has done all of its {config.steps} steps")
            if config.trace:
                shown.note("--trace: no step is left to trace; raise --steps")
            return DONE
        found = self._open(shown)
        try:
            return self._fit(found, config, shown)
        except LeaseLost:
            raise  # the directory is another process's now
        except Exception:
            write_report(config.run_dir, self._predict, shown)
            raise

    def evaluate(self, shown: Display) -> Mapping[str, Any]:
        """Return the line of `metrics.jsonl` on the validation loss of the state."""
        self._look(shown, lambda loop: loop.evaluate(loop.driver.at))
        lines = read_journal(self._config.run_dir / rundir.METRICS)
        return next(line for line in reversed(lines) if "val_loss" in line)

    def sample(self, shown: Display, evaluation: EvaluationConfig) -> str:
        """Return a text that the model goes on with."""
        check_config(replace(self._config, evaluation=evaluation))
        return self._look(shown, lambda loop: loop.sample(loop.driver.at, evaluation))

    def plan(self, shown: Display) -> Plan:
        """Return the plan of now; another one may follow when nodes come and go."""
        if self._opened is not None:
            return self._opened.driver.plan
        return self._settle(shown).choice.plan

    def workers(self, shown: Display) -> Mapping[str, int]:
        """Process ids by worker, of those on this machine."""
        return self._open(shown).driver.pids

    def batch(self, shown: Display, step: int) -> Batch:
        """Return what a step trains on, counted from 1; BadInput for another number."""
        config = self._config
        if not 1 <= step <= config.steps:
            raise BadInput(
                got=f"the batch of step {step}",
                allowed=f"1 to {config.steps}, the steps of the run",
                fix="count steps from 1, as the metrics do",
            )
        dataset = self._open(shown).dataset
        with closing(training_feed(self._config, dataset)) as feed:
            return feed.batch(step - 1)

    def _is_done(self, shown: Display) -> bool:
        if self._opened is None:
            return self._settle(shown).is_done
        return self._opened.driver.at == self._config.steps

    def _settle(self, shown: Display) -> Start:
        """Find out, once, what the run is to go on from, where, and by which plan."""
        if self._settled is not None:
            return self._settled
        config = self._config
        previous = rundir.read_previous(config.run_dir)
        if previous is not None:
            rundir.check_same_run(previous, config)
        config = self._config = with_packing(config, self._model, previous)
        for name in (rundir.METRICS, rundir.EVENTS):
            read_journal(config.run_dir / name)  # a damaged one is refused
        claim = identified_here(config, claim_of(config, previous), shown)
        saved, is_done = read_progress(config, provisional(claim), shown)
        if saved is None:
            first_weights(config, self._model)  # refuses what could not be read
            warn_of_other_model(config)
            warn_of_random_base(config)
        shown.doing("looking for devices")
        hardware = choose_hardware(config, self._preset, self._cluster)
        choice = choose_plan(
            config,
            self._model,
            hardware.cluster,
            self._preset,
            previous,
            shown.doing,
            given=self._plan,
        )
        self._settled = Start(
            config=config,
            model=self._model,
            hardware=hardware,
            choice=choice,
            previous=previous,
            claim=claim,
            saved=saved,
            is_done=is_done,
        )
        return self._settled

    def _open(self, shown: Display) -> _Open:
        """Make the state ready, once, and write what the run goes on with."""
        if self._opened is not None:
            shown.begun()
            return self._opened
        start = self._settle(shown)
        storage, run_dir = checkpoint_storage(start.config), start.config.run_dir
        asks = start.config.adopt is not None
        leases = Leases(run_dir, storage, self, shown.note, start.run.id, asks)
        self._settled = start = replace(start, leases=leases)
        with self._prepared.on("data"):
            dataset = run_dataset(start.config, start.model, start.previous, shown)
        describe(start, dataset, shown)
        shown.doing("preparing the programs")
        told = SimpleQueue[Notice]()
        with self._prepared.on("compiling"):
            driver = self._driver(dataset, shown, told)
        start = self._settle(shown)
        check_reached(driver.at, self._config)
        metrics, events = begin(start, dataset, driver, shown)
        shown.begun()
        self.enter_context(closing(metrics))
        self.enter_context(closing(events))
        comparison = StepComparison(
            predict=self._predict,
            is_simulated=self._config.simulate,
        )
        comparison.begin(driver.plan, start.hardware.cluster)
        self._opened = _Open(
            start=start,
            dataset=dataset,
            driver=driver,
            metrics=metrics,
            events=events,
            told=told,
            comparison=comparison,
        )
        return self._opened

    def _driver(
        self, dataset: Dataset, shown: Display, told: SimpleQueue[Notice]
    ) -> Driver:
        """Compile the plan; once more another one, if the planner thought that a plan
        fits and the compiler says that it does not."""
        start = self._settle(shown)
        try:
            return self.enter_context(driver_of(start, dataset, shown, told.put))
        except NoFeasiblePlan as none:
            if not start.choice.is_searched:
                raise
            shown.note(f"{none.got}; planning again with these figures")
        cluster, previous = start.hardware.cluster, start.previous
        choice = choose_plan(
            self._config, self._model, cluster, self._preset, previous, shown.doing
        )
        self._settled = start = replace(start, choice=choice)
        describe(start, dataset, shown)
        return self.enter_context(driver_of(start, dataset, shown, told.put))

    def _fit(self, found: _Open, config: RunConfig, shown: Display) -> int:
        run_dir, driver, events = config.run_dir, found.driver, found.events
        stop = StopRequest()
        loop = self._loop(found, config, shown, stop)
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(stop)  # others hear no signals
            if config.max_hours is not None:
                stack.enter_context(stop.after(config.max_hours, self._begin_s))
            heard = partial(_hear, driver, stop, events, shown)
            stack.enter_context(Watch(heard, run_dir))
            # a thread of its own: a cloud's server may be slow to answer
            from_workers = {of_workers(found.told): _TOLD_EVERY_S}
            stack.enter_context(Watch(heard, None, from_workers))
            driver.hurried = lambda: stop.leaves_no_time
            shown.doing("the first step")
            step = loop.run(driver.at)
            total_s = time.perf_counter() - self._begin_s
            lines = read_journal(run_dir / rundir.METRICS)
            record_goodput(loop.spent.goodput(lines, total_s), step, events, shown)
            self._begin_s, self._prepared = time.perf_counter(), Spent(after=0)
            code = finish(found.start, step, stop, events, shown, self._again)
            if not stop.leaves_no_time:
                write_report(run_dir, self._predict, shown)
            return code

    def _loop(
        self, found: _Open, config: RunConfig, shown: Display, stop: StopRequest
    ) -> Loop:
        """A loop on the state, which hears of recoveries."""
        driver, run_dir = found.driver, config.run_dir
        loop = Loop(
            config=config,
            driver=driver,
            dataset=found.dataset,
            learning_rates=LearningRates(config.optimizer, config.steps, driver.at),
            metrics=found.metrics,
            evaluated=evaluated(run_dir),
            best=best_so_far(config),
            heard_saved=lambda step: event(found.events, "saved", step),
            heard_best=lambda step, loss: event(
                found.events, BEST, step, **{VAL_LOSS: loss}
            ),
            seconds_at_peak=self._at_peak(driver),
            trace=run_dir / rundir.TRACE if config.trace else None,
            display=shown,
            stop=stop,
            spent=Spent(after=driver.at, parts_s={**self._prepared.parts_s}),
            compared=partial(record_comparison, found.comparison, found.events, shown),
            remark=partial(event, found.events),
            mend=partial(
                write_again_if_removed,
                *(found.start, found.dataset, driver),
                *(found.metrics, found.events, shown),
            ),
        )

        def heard(what: Recovered | Rerouted) -> None:
            loop.hear(what)
            if isinstance(what, Rerouted):
                return record_rerouting(what, found.events, shown)
            record_recovery(what, run_dir, found.events, shown)
            if what.plan is not None and what.cluster is not None:
                found.comparison.begin(what.plan, what.cluster)
                loop.seconds_at_peak = self._at_peak(driver)

        driver.heard = heard
        return loop

    def _at_peak(self, driver: Driver) -> float | None:
        """A step's time at the peak of the devices of now; None if they are others."""
        if self._config.simulate:
            return None
        return seconds_at_peak(driver.plan, self._model, driver.cluster)

    def _look(self, shown: Display, look: Callable[[Loop], T]) -> T:
        """Look at the state without training, again if a worker was lost meanwhile."""
        loop = self._loop(self._open(shown), self._config, shown, StopRequest())
        while True:
            try:
                return look(loop)
            except RolledBack as back:
                loop.forget_after(back.step)


def _hear(
    driver: Driver, stop: StopRequest, events: Journal, shown: Display, notice: Notice
) -> None:
    """Go on without the notice's node, if it names one, else stop."""
    node, source, grace_s = notice.node, notice.source, round(notice.grace_s, 1)
    goes_on = node is not None and driver.leave(node)
    if not goes_on:
        stop.hear(notice)
    event(events, "noticed", driver.at, node=node, source=source, grace_s=grace_s)
    if node is not None:
        then = "goes on without it after this step" if goes_on else "stops"
        shown.note(f"{source}: node {node!r} goes in {grace_s:g} s; the run {then}")
