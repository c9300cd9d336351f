# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, and between them evaluations, checkpoints and stops.

Owns the order of these. `step` counts steps that are done: metrics of step k describe
the k-th step, a checkpoint or an evaluation of step k the state after it. Does not own
the step (`hetjax/runtime/`), checkpoints (`saving.py`), what is recorded
(`recorder.py`), nor what comes before and after the loop (`session.py`).
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hetjax.costs.slowness.step_times import StepTimes
from hetjax.costs.utilization import DeviceUse
from hetjax.data.dataset import Dataset
from hetjax.optimizers.learning_rate import LearningRates
from hetjax.runtime.execution.commit import StepCommit
from hetjax.training.directory.best import VAL_LOSS
from hetjax.training.observers.goodput import Spent
from hetjax.training.observers.slow_devices import SlowDevices
from hetjax.training.observers.tracing import Tracing
from hetjax.training.recorder import Recorder
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.not_finite import MOST_SKIPPED, diverged, skips_all
from hetjax.training.recovery.notices import StopRequest
from hetjax.training.recovery.recovered import GivenUp, Recovered, Rerouted, RolledBack
from hetjax.training.recovery.rollback import (
    NotFinite,
    RollbackNeeded,
    Rollbacks,
    Spiked,
    keeps_disagreeing,
)
from hetjax.training.replanning.replanning import Replanning
from hetjax.training.sampling import sample_text
from hetjax.training.saving import Saving
from hetjax.training.settings.config import EvaluationConfig, RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """A committed step whose loss is still on the devices."""

    commit: StepCommit
    step: int
    step_time_s: float
    learning_rate: float
    device_use: DeviceUse


@dataclass(kw_only=True, slots=True)
class Loop:
    """Steps of a driver; `run` may be called once.

    `evaluate` and `sample` may be called on their own; if they raise RolledBack, call
    `forget_after`. `evaluated` holds the steps whose validation loss is recorded.
    """

    config: RunConfig
    driver: Driver
    dataset: Dataset
    learning_rates: LearningRates
    recorder: Recorder
    saving: Saving
    stop: StopRequest
    spent: Spent
    evaluated: set[int] = field(default_factory=set)
    device_use: DeviceUse = DeviceUse()
    slow_devices: SlowDevices = field(default_factory=SlowDevices)  # watches none
    replanning: Replanning = field(default_factory=Replanning)  # weighs nothing
    _pending: _Pending | None = None
    _since_s: float = 0.0
    _is_in_step: bool = False
    _rollbacks: Rollbacks = field(default_factory=Rollbacks)
    _num_skipped: int = 0  # steps in a row, up to now
    _is_late: bool = False  # a checkpoint is overdue, as its step was skipped

    def run(self, step: int) -> int:
        """Train from this step on to the last, or until asked to stop.

        Returns the step reached, with its state saved. Raises RunFailed.
        """
        tracing, first = Tracing(self.config, step), step
        self.saving.begin()
        self._since_s = time.perf_counter()
        while True:
            try:
                return self._run_or_roll_back(step, first, tracing)
            except RolledBack as rolled_back:
                step = rolled_back.step
            except GivenUp:
                return self._give_up()
            self.forget_after(step)

    def _give_up(self) -> int:
        """End with the newest checkpoint: a later start goes on from there."""
        self.recorder.note("no time is left to recover: all unsaved steps are lost")
        return self.driver.saved or 0

    def _run_or_roll_back(self, step: int, first: int, tracing: Tracing) -> int:
        """Train as `run` does; after bad numbers, roll back and raise RolledBack."""
        try:
            return self._run(step, first, tracing)
        except RollbackNeeded as bad:
            raise RolledBack(self._roll_back(bad)) from bad

    def _roll_back(self, bad: RollbackNeeded) -> int:
        """Roll back to the newest checkpoint and return its step.

        The fault may have been chance. Raises RolledBack if a worker is lost meanwhile.
        """
        saved = self.saving.newest()
        self.saving.record()
        if not isinstance(bad, NotFinite):
            self.recorder.event(bad.name, bad.step, reason=bad.got, nodes=[*bad.nodes])
        verdict = self._rollbacks.judge(bad, saved, self.config)
        if isinstance(bad, Spiked):
            self.driver.leave_out(range(saved or 0, bad.step))
        elif verdict == "leave the nodes":
            if not all([self.driver.leave(node) for node in bad.nodes]):
                raise keeps_disagreeing(bad, saved)
            self.recorder.note(f"continuing without {', '.join(bad.nodes)}")
        return self.driver.roll_back(f"{bad.got}: back to step {saved or 0}")

    def on_recovery(self, recovered: Recovered | Rerouted) -> None:
        """Exclude the recovery, and the work that it undid, from the step's time."""
        now_s, took_s = time.perf_counter(), sum(recovered.seconds.values())
        self.spent.recoveries.append(recovered.seconds)
        if recovered.step > recovered.from_step:  # the survivors' work counts
            self._since_s += took_s
            return
        if self._is_in_step:
            self.spent.lost_s += now_s - took_s - self._since_s
        self._since_s = now_s

    def _run(self, step: int, first: int, tracing: Tracing) -> int:
        config = self.config
        while step < config.steps:
            if self.stop.reason is None and _is_due(config.evaluation.every, step):
                with self.spent.on("evaluating"):
                    self.evaluate(step)
            if self._must_stop(step - first):
                break
            self._train(step, is_traced=tracing.includes(step - first))
            step += 1
            is_due = self._is_late or _is_due(config.checkpoint.every, step)
            if is_due and not self._ends_at(step, first):  # it is saved below
                with self.spent.on("saving"):
                    self._save_unless_skipped(step)
        self._record()
        self._save_last(step)
        if step == config.steps:
            with self.spent.on("evaluating"):
                self.evaluate(step)
            self._save_last(step)  # a machine may have been lost with its disk
        if (said := tracing.write(lambda: self.driver.spans())) is not None:
            self.recorder.note(said)
        return step

    def forget_after(self, step: int) -> None:
        """Forget all that came after this step: these steps will be trained again."""
        if self._pending is not None:
            self.spent.lost_s += self._pending.step_time_s
        self._pending, self._is_in_step = None, False
        self._num_skipped, self._is_late = 0, False
        self.spent.undo(self.recorder.rewind(step), step)
        self.evaluated = {at for at in self.evaluated if at <= step}
        self.saving.best.forget_after(step)
        self.saving.record_best()

    def _ends_at(self, step: int, first: int) -> bool:
        """Return whether the run ends with this step, as far as is known."""
        is_last = step in (self.config.steps, first + (self.config.stop_after or 0))
        return is_last or self.stop.reason is not None

    def _must_stop(self, num_trained: int) -> bool:
        if num_trained == self.config.stop_after:
            self.stop.reason = self.stop.reason or f"--stop-after {num_trained}"
        return self.stop.reason is not None

    def _train(self, step: int, *, is_traced: bool) -> None:
        """Run one step; record the previous one, whose loss has arrived meanwhile."""
        self._is_in_step = True
        self.slow_devices.before(step)
        commit = self.driver.step(step, traced=is_traced)
        self._is_in_step = False
        now_s = time.perf_counter()
        step_time_s, self._since_s = now_s - self._since_s, now_s
        times = self.slow_devices.timing.pop_times()
        self._record(times)
        found = self.slow_devices.after(step_time_s, times)
        for finding in found:
            self.recorder.slow(finding)
        num_left = self.config.steps - step - 1
        slow = self.slow_devices.known if found else None
        after = self.replanning.after(step + 1, step_time_s, num_left, found, slow)
        for outcome in after:
            self.recorder.replanning(outcome)
        self._pending = _Pending(
            commit=commit,
            step=step + 1,
            step_time_s=step_time_s,
            learning_rate=self.learning_rates[step],
            device_use=self.device_use,
        )
        self.saving.check_state(step, commit.is_finite, commit.disagreements)
        if commit.is_spike:
            self._on_spike(step + 1, commit)

    def _on_spike(self, step: int, commit: StepCommit) -> None:
        """Record a spike; raise Spiked instead if the run can and should roll back."""
        loss, most, factor = commit.loss(), commit.most_loss, self.config.spike_factor
        got = f"loss {loss:.4f} in step {step}, above {most:.4f}"
        if self.config.on_spike == "rollback" and self.saving.newest() is not None:
            raise Spiked(step, f"{got} ({factor:g} x the usual)")
        self.recorder.event(Spiked.name, step, loss=loss, most=most)
        self.recorder.note(f"{got} ({factor:g} x the usual)")

    def _record(self, times: StepTimes | None = None) -> None:
        """Fetch the last step's loss and record it, with the times of its parts."""
        if self._pending is None:
            return
        done, self._pending = self._pending, None
        if done.commit.is_skipped:
            return self._record_skipped(done)
        self._num_skipped = 0
        loss, norm = done.commit.loss(), done.commit.grad_norm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            got = f"loss {loss} and grad_norm {norm} in step {done.step}"
            raise NotFinite(done.step, got)
        self.recorder.step(_metrics(done, loss))
        start_s = time.perf_counter()
        self.recorder.compare(done.step, done.step_time_s, times)
        self._since_s += time.perf_counter() - start_s  # not part of a step's time

    def _record_skipped(self, done: _Pending) -> None:
        """Record a step that changed nothing; count it unless it was left out."""
        step, commit = done.step, done.commit
        self.recorder.skipped(step, commit, done.step_time_s, done.learning_rate)
        if commit.is_left_out:
            return
        self._num_skipped += 1
        if self._num_skipped == MOST_SKIPPED:
            saved = self.saving.newest()
            raise skips_all(step, commit.loss_scale, self.config, saved)

    def evaluate(self, step: int) -> None:
        """Record the validation loss and show a sampled text, once per step."""
        self._record()
        if step in self.evaluated:
            return
        losses = []
        for number, weight in enumerate(self.driver.validation_weights):
            losses.append(weight * self.driver.validate(number))
            if self.stop.reason is not None and step < self.config.steps:
                return  # the resumed run evaluates this step
        loss = float(np.mean(losses))
        if not math.isfinite(loss):
            got = f"validation loss {loss} after step {step}"
            raise diverged(got, self.config, self.saving.newest())
        bits_per_byte = loss / math.log(2) / self.dataset.bytes_per_token
        line = {"step": step, VAL_LOSS: loss, "val_bits_per_byte": bits_per_byte}
        self.recorder.evaluation(line, self.config.steps)
        self.evaluated.add(step)
        self.saving.best.on_evaluated(step, loss)
        self.saving.record_best()
        if self.config.evaluation.sample_tokens:
            text = self.sample(step, self.config.evaluation)
            self.recorder.note(f"sample: {text!r}")
        self._since_s = time.perf_counter()

    def sample(self, step: int, evaluation: EvaluationConfig) -> str:
        """Return a text that is sampled from the model after this step."""
        return sample_text(
            self.driver.next_logits,
            self.dataset.tokenizer,
            evaluation,
            seed=(self.config.seed, step),
        )

    def _save_unless_skipped(self, step: int) -> None:
        """Save as soon as a step is not skipped.

        Weights that give no finite numbers must not replace those that did.
        """
        self._record()  # a state that has no finite loss must not be saved
        self._is_late = self._num_skipped > 0
        if not self._is_late:
            self.saving.save(step)
            self._since_s = time.perf_counter()

    def _save_last(self, step: int) -> None:
        with self.spent.on("saving"):
            self.saving.save_last(step)


def _is_due(every: int, step: int) -> bool:
    """Return whether an action is due that runs at step 0 and every `every` steps."""
    return step % every == 0 if every else step == 0


def _metrics(done: _Pending, loss: float) -> dict[str, Any]:
    """Return the line of `metrics.jsonl` for a step that was trained."""
    commit, step_time_s = done.commit, done.step_time_s
    line = {
        "step": done.step,
        "loss": loss,
        "tokens": commit.num_tokens,
        "step_time_s": step_time_s,
        "tokens_per_s": commit.num_tokens / step_time_s,
        "grad_norm": commit.grad_norm,
        "learning_rate": done.learning_rate,
    }
    if commit.loss_scale is not None:
        line["loss_scale"] = commit.loss_scale
    return line | done.device_use.metrics(line)
