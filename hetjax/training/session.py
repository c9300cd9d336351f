# SPDX-License-Identifier: Apache-2.0
"""Takes one run from its settings to its end: all that surrounds the loop.

Owns the order of set-up, resuming, and what stays open between two calls to train. Does
not own what a start settles (`start.py`), the loop (`loop.py`), what is recorded
(`recorder.py`), the command line (`hetjax/cli/train.py`) nor the class for notebooks
(`hetjax/api/trainer.py`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from hetjax.checkpoint.leases.lease import LeaseLost
from hetjax.cluster.cluster import Cluster
from hetjax.costs.utilization import DeviceUse, device_use
from hetjax.data.batches import Batch
from hetjax.errors import BadInput
from hetjax.launchers.reprovisioning import (
    CommandEnded,
    Reprovisioning,
    nothing_missing,
)
from hetjax.models.model import Model
from hetjax.optimizers.learning_rate import LearningRates
from hetjax.plans.plan import Plan
from hetjax.report.progress import Display, display
from hetjax.training.directory import rundir
from hetjax.training.directory.best import VAL_LOSS
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.own_disks import lacks_results
from hetjax.training.directory.progress import (
    best_so_far,
    evaluated,
)
from hetjax.training.ending import DONE, clear_ends, finish, gather_results
from hetjax.training.interrupts import Interrupted, interruptible
from hetjax.training.layout.hardware import with_needed_launcher
from hetjax.training.loop import Loop
from hetjax.training.observers.dispatch import Dispatcher
from hetjax.training.observers.goodput import Spent
from hetjax.training.observers.loading import ObserverSource
from hetjax.training.observers.run_reports import write_report
from hetjax.training.observers.step_comparison import predict_step
from hetjax.training.open_run import OpenRun, open_run
from hetjax.training.recorder import Recorder, reprovisioned_line
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.notice_sources import Notice, notices_of_workers
from hetjax.training.recovery.notices import StopRequest, Watch
from hetjax.training.recovery.recovered import Recovered, Rerouted, RolledBack
from hetjax.training.saving import Saving
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.config import EvaluationConfig, RunConfig
from hetjax.training.settings.presets import Preset
from hetjax.training.start import Start, settle
from hetjax.training.worker import training_feed

T = TypeVar("T")
_WORKERS_NOTICES_EVERY_S = 0.1


def run(
    config: RunConfig,
    preset: Preset,
    model: Model,
    observers: Sequence[ObserverSource] = (),
    reprovision: Sequence[str] = (),
) -> int:
    """Train, or resume the run in `run_dir`; return the exit code 0 or 4.

    `preset` gives the default cluster and plan. The command `reprovision` asks for
    missing nodes. Raises BadInput before anything is written, RunFailed if training
    cannot continue, and Interrupted by SIGINT or SIGTERM while there is nothing to
    save.
    """
    check_config(config)
    code: int | None = None
    try:
        with (
            interruptible(),
            clear_ends(config),
            rundir.locked(config.run_dir),
            display(config.steps, config.run_dir / rundir.LOG) as shown,
            Session(
                config, preset, model, observers=observers, reprovision=reprovision
            ) as session,
        ):
            code = session.fit(shown)
    except Interrupted:
        if code is None:
            raise
    assert code is not None
    return code  # even if a signal has cut short what came after `fit`


class Session(ExitStack):
    """A run in a locked directory; its state stays open within `with`.

    `cluster` and `plan` take precedence over those of files. `again` names what users
    do to resume. Each call shows its progress, and raises as `run` does.
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
        observers: Sequence[ObserverSource] = (),
        reprovision: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._observers = self.enter_context(Dispatcher(observers))
        self._reprovision = reprovision
        self._config = with_needed_launcher(config, cluster)
        self._preset, self._model = preset, model
        self._cluster, self._plan, self._again = cluster, plan, again
        predict = partial(predict_step, self._config, model)
        self._predict = lru_cache(maxsize=1)(predict)
        self._begin_s = time.perf_counter()
        self._prepared = Spent(after=0)
        self._settled: Start | None = None
        self._opened: OpenRun | None = None
        self._asks: Reprovisioning | None = None
        self._asked_early: list[CommandEnded] = []  # before there was a recorder

    def fit(self, shown: Display, num_steps: int | None = None) -> int:
        """Train to the last step, or for `num_steps`; return the exit code."""
        config = self._config
        if num_steps is not None:
            config = replace(config, stop_after=num_steps)
            check_config(config)
        if self._is_done(shown):
            done = f"{config.run_dir} has done all of its {config.steps} steps"
            if not lacks_results(config):
                shown.note(done)
                if config.trace:
                    shown.note("--trace: no step is left to trace; raise --steps")
                return DONE
            shown.note(f"{done}, but its last checkpoint is on machines' own disks")
        found = self._open(shown)
        try:
            return self._fit(found, config, shown)
        except LeaseLost:
            raise  # the directory is another process's now
        except Exception:
            write_report(config.run_dir, self._predict, shown)
            raise

    def evaluate(self, shown: Display) -> Mapping[str, Any]:
        """Return the line of `metrics.jsonl` with the validation loss of the state."""
        self._look(shown, lambda loop: loop.evaluate(loop.driver.at))
        lines = read_journal(self._config.run_dir / rundir.METRICS)
        return next(line for line in reversed(lines) if VAL_LOSS in line)

    def sample(self, shown: Display, evaluation: EvaluationConfig) -> str:
        """Return a text that is sampled from the model."""
        check_config(replace(self._config, evaluation=evaluation))
        return self._look(shown, lambda loop: loop.sample(loop.driver.at, evaluation))

    def plan(self, shown: Display) -> Plan:
        """Return the current plan; another one may follow when nodes come and go."""
        if self._opened is not None:
            return self._opened.driver.plan
        return self._settle(shown).choice.plan

    def workers(self, shown: Display) -> Mapping[str, int]:
        """Return process ids by worker, for the workers on this machine."""
        return self._open(shown).driver.pids

    def batch(self, shown: Display, step: int) -> Batch:
        """Return the batch of a step, counted from 1; raises BadInput out of range."""
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
        """Settle once from which state, where and by which plan the run resumes."""
        if self._settled is None:
            self._settled = settle(
                self._config,
                self._preset,
                self._model,
                shown,
                cluster=self._cluster,
                plan=self._plan,
            )
            self._config = self._settled.config
        return self._settled

    def _open(self, shown: Display) -> OpenRun:
        """Prepare the state, once, and write the files of this start."""
        if self._opened is None:
            start, asking = self._settle(shown), self._asking(shown)
            try:
                self._opened = open_run(
                    start,
                    self._preset,
                    self._predict,
                    self._prepared,
                    self._observers,
                    shown,
                    stack=self,
                    on_waiting=asking and asking.follow,
                )
            finally:  # no machine is asked for while nothing trains
                if asking is not None:
                    asking.follow(nothing_missing)
        shown.begun()
        return self._opened

    def _asking(self, shown: Display) -> Reprovisioning | None:
        """Return what runs the command that asks for machines, if there is one."""
        if self._reprovision and self._asks is None:

            def on_end(asked: CommandEnded) -> None:
                self._asked_early.append(asked)
                shown.note(reprovisioned_line(asked))

            run_dir = self._config.run_dir
            logs = run_dir / rundir.LOGS
            self._asks = self.enter_context(
                Reprovisioning(
                    self._reprovision, nothing_missing, on_end, run_dir, logs
                )
            )
        return self._asks

    def _fit(self, found: OpenRun, config: RunConfig, shown: Display) -> int:
        run_dir, driver = config.run_dir, found.driver
        recorder, stop = found.recorder(shown), StopRequest()
        loop = self._loop(found, config, recorder, stop)
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(stop)  # other threads receive no signals
            if config.max_hours is not None:
                stack.enter_context(stop.after(config.max_hours, self._begin_s))
            on_notice = partial(_on_notice, driver, stop, recorder)
            stack.enter_context(Watch(on_notice, run_dir))
            # a separate thread, as a cloud's server may be slow to answer
            workers = notices_of_workers(found.worker_notices)
            every_s = {workers: _WORKERS_NOTICES_EVERY_S}
            stack.enter_context(Watch(on_notice, None, every_s))
            if asking := self._asking(shown):
                stack.callback(asking.close)
                self._follow(asking, driver, recorder)
            driver.must_give_up = lambda: stop.leaves_no_time
            shown.doing("the first step")
            step = loop.run(driver.at)
            total_s = time.perf_counter() - self._begin_s
            lines = read_journal(run_dir / rundir.METRICS)
            recorder.goodput(loop.spent.goodput(lines, total_s), step)
            self._begin_s, self._prepared = time.perf_counter(), Spent(after=0)
            if step == config.steps:
                best = loop.saving.best.step
                gather_results(driver, best, config, recorder, stop)
            code = finish(found.start, step, stop, recorder, self._again)
            if not stop.leaves_no_time:
                write_report(run_dir, self._predict, shown)
            return code

    def _follow(
        self, asking: Reprovisioning, driver: Driver, recorder: Recorder
    ) -> None:
        """Let `asking` request the driver's missing nodes until training ends."""
        asking.follow(
            driver.missing, lambda asked: recorder.reprovisioned(asked, driver.at)
        )
        self._asks = None  # the next call to train asks anew
        for asked in self._asked_early:
            recorder.reprovisioned(asked, driver.at, is_noted=True)
        self._asked_early.clear()

    def _loop(
        self, found: OpenRun, config: RunConfig, recorder: Recorder, stop: StopRequest
    ) -> Loop:
        """Return a loop on the state, which follows recoveries."""
        driver = found.driver
        loop = Loop(
            config=config,
            driver=driver,
            dataset=found.dataset,
            learning_rates=LearningRates(config.optimizer, config.steps, driver.at),
            recorder=recorder,
            saving=Saving(
                driver=driver,
                recorder=recorder,
                best=best_so_far(config),
                restore_files=partial(found.restore_files, recorder),
            ),
            slow_devices=found.slow_devices,
            replanning=found.replanning,
            stop=stop,
            spent=Spent(after=driver.at, parts_s={**self._prepared.parts_s}),
            evaluated=evaluated(config.run_dir),
            device_use=self._device_use(driver),
        )

        def on_recovery(what: Recovered | Rerouted) -> None:
            loop.on_recovery(what)
            found.replanning.on_recovery(what)
            if isinstance(what, Rerouted) or what.plan is not None:
                found.slow_devices.begin(driver.plan, driver.cluster)
            else:
                found.slow_devices.resume()
            if isinstance(what, Rerouted):
                return recorder.rerouting(what)
            recorder.recovery(what)
            recorder.apart(driver.places(), driver.at)
            if what.plan is not None:
                loop.device_use = self._device_use(driver)

        driver.on_recovery = on_recovery
        return loop

    def _device_use(self, driver: Driver) -> DeviceUse:
        """Return what is known of the current devices; nothing if simulated."""
        if self._config.simulate:
            return DeviceUse()
        return device_use(driver.plan, self._model, driver.cluster)

    def _look(self, shown: Display, look: Callable[[Loop], T]) -> T:
        """Call `look` without training, again if a worker was lost meanwhile."""
        found = self._open(shown)
        loop = self._loop(found, self._config, found.recorder(shown), StopRequest())
        while True:
            try:
                return look(loop)
            except RolledBack as rolled_back:
                loop.forget_after(rolled_back.step)


def _on_notice(
    driver: Driver, stop: StopRequest, recorder: Recorder, notice: Notice
) -> None:
    """Let the run go on without the notice's node if it can, else stop it."""
    goes_on = False
    try:
        goes_on = notice.node is not None and driver.leave(notice.node)
    finally:  # whatever has failed, the machine will be taken away
        if not goes_on:
            stop.on_notice(notice)
        recorder.notice(notice, driver.at, goes_on)
