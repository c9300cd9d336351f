# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, and between them evaluations, checkpoints and stops.

Owns the order of these and the lines of `metrics.jsonl`. `step` counts steps that are
done: metrics of step k tell of the k-th step, a checkpoint or an evaluation of step k
of the state after it. Does not own the step (`hetjax/runtime/`) nor what comes before
and after the loop (`run.py`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetjax.data.dataset import Dataset
from hetjax.elastic.driver import Driver
from hetjax.elastic.notices import StopRequest
from hetjax.elastic.recovered import GivenUp, Recovered, Rerouted, RolledBack
from hetjax.errors import RunFailed
from hetjax.report.progress import Display, metrics_line
from hetjax.runtime.execution.checks import Disagreement
from hetjax.runtime.execution.commit import StepCommit
from hetjax.training.best import BestCheckpoint
from hetjax.training.config import EvaluationConfig, RunConfig
from hetjax.training.going_back import (
    MustGoBack,
    NotFinite,
    Returns,
    Spiked,
    disagreed,
    keeps_disagreeing,
)
from hetjax.training.goodput import Spent
from hetjax.training.not_finite import MOST_SKIPPED, diverged, skipped_line, skips_all
from hetjax.training.optimizer import LearningRates
from hetjax.training.rundir import Journal
from hetjax.training.sampling import sample_text
from hetjax.training.tracing import steps_to_trace, write_trace

_NUM_LAST_SAVES = 3  # a worker may be lost in one, and a disk full in another


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """A step whose loss is still on the devices."""

    result: StepCommit
    step: int
    step_time_s: float
    learning_rate: float
    seconds_at_peak: float | None


@dataclass(kw_only=True, slots=True)
class Loop:
    """Everything that a loop works with; `run` may be called once.

    `evaluate`, and `forget_after` where it raises RolledBack, may be called without.
    """

    config: RunConfig
    driver: Driver
    dataset: Dataset
    learning_rates: LearningRates
    metrics: Journal
    evaluated: set[int]
    best: BestCheckpoint
    heard_saved: Callable[[int], None]
    heard_best: Callable[[int, float], None]
    seconds_at_peak: float | None
    trace: Path | None
    display: Display
    stop: StopRequest
    spent: Spent
    compared: Callable[[int, float], None]
    remark: Callable[..., None] = lambda name, step, **details: None  # an event
    # writes the run's files again if they were removed, and tells whether it had to
    mend: Callable[[], bool] = lambda: False
    _done: _Done | None = None
    _since_s: float = 0.0
    _is_in_step: bool = False
    _saved: int | None = None
    _best: int | None = None
    _returns: Returns = field(default_factory=Returns)
    _num_skipped: int = 0  # steps in a row, up to now
    _is_late: bool = False  # a checkpoint, as its step was skipped
    _traced: range = range(0)
    _num_traced: int = 0

    def run(self, step: int) -> int:
        """Train from this step on to the last, or until asked to stop.

        Returns the step reached, with its state saved. Raises RunFailed.
        """
        self._traced = steps_to_trace(self.config, step)
        self._saved, self._best = self.driver.saved, self.best.step
        self._since_s = time.perf_counter()
        first = step
        while True:
            try:
                return self._run_well(step, first)
            except RolledBack as back:
                step = back.step
            except GivenUp:
                return self._left()
            self.forget_after(step)

    def _left(self) -> int:
        """End with the newest checkpoint: a later start goes on from there."""
        self.display.note("no time is left to recover: what was not saved is lost")
        return self.driver.saved or 0

    def _run_well(self, step: int, first: int) -> int:
        """Raise RolledBack where bad numbers have come up."""
        try:
            return self._run(step, first)
        except MustGoBack as bad:
            raise RolledBack(self._back_from(bad)) from bad

    def _back_from(self, bad: MustGoBack) -> int:
        """Go back to the newest checkpoint: it may have been chance.

        Raises RolledBack if a worker is lost meanwhile.
        """
        self.driver.wait_saved()
        self._tell_saved()
        kept = self.driver.saved
        if not isinstance(bad, NotFinite):
            self.remark(bad.name, bad.step, reason=bad.got, nodes=[*bad.nodes])
        then = self._returns.judge(bad, kept, self.config)
        if isinstance(bad, Spiked):
            self.driver.leave_out(range(kept or 0, bad.step))
        elif then == "leave the nodes":
            if not all([self.driver.leave(node) for node in bad.nodes]):
                raise keeps_disagreeing(bad, kept)
            self.display.note(f"going on without {', '.join(bad.nodes)}")
        return self.driver.go_back(f"{bad.got}: back to step {kept or 0}")

    def hear(self, recovered: Recovered | Rerouted) -> None:
        """Take what it took, and what it has undone, out of the time of the step."""
        now_s, took_s = time.perf_counter(), sum(recovered.seconds.values())
        self.spent.recoveries.append(recovered.seconds)
        if recovered.step > recovered.from_step:  # the survivors' work has counted
            self._since_s += took_s
            return
        if self._is_in_step:
            self.spent.lost_s += now_s - took_s - self._since_s
        self._since_s = now_s

    def _run(self, step: int, first: int) -> int:
        while step < self.config.steps:
            if self.stop.reason is None and self._due(
                self.config.evaluation.every, step
            ):
                with self.spent.on("evaluating"):
                    self.evaluate(step)
            if self._must_stop(step - first):
                break
            self._train(step, step - first)
            step += 1
            if self._is_late or self._due(self.config.checkpoint.every, step):
                with self.spent.on("saving"):
                    self._save_good(step)
        self._record()
        with self.spent.on("saving"):
            self._save_last(step)
        if step == self.config.steps:
            with self.spent.on("evaluating"):
                self.evaluate(step)
            with self.spent.on("saving"):  # a disk may have gone with a machine
                self._save_last(step)
        self._write_trace()
        return step

    def forget_after(self, step: int) -> None:
        """What came after this step will come again."""
        if self._done is not None:
            self.spent.lost_s += self._done.step_time_s
        self._done, self._is_in_step = None, False
        self._num_skipped, self._is_late = 0, False
        self.spent.undo(self.metrics.rewind(step), step)
        self.evaluated = {at for at in self.evaluated if at <= step}
        self.best.forget_after(step)
        self._tell_best()

    def _due(self, every: int, step: int) -> bool:
        """Whether it is the turn of what happens every so many steps, and at 0."""
        return step % every == 0 if every else step == 0

    def _must_stop(self, num_trained: int) -> bool:
        if num_trained == self.config.stop_after:
            self.stop.reason = self.stop.reason or f"--stop-after {num_trained}"
        return self.stop.reason is not None

    def _train(self, step: int, num_trained: int) -> None:
        """Run one step; record the one before, whose loss has come in meanwhile."""
        self._is_in_step = True
        result = self.driver.step(step, traced=self._is_traced(num_trained))
        self._is_in_step = False
        now_s = time.perf_counter()
        step_time_s, self._since_s = now_s - self._since_s, now_s
        self._record()
        self._done = _Done(
            result=result,
            step=step + 1,
            step_time_s=step_time_s,
            learning_rate=self.learning_rates[step],
            seconds_at_peak=self.seconds_at_peak,
        )
        self._check(step, result.is_finite, result.disagreements)
        if result.is_spike:
            self._remark_spike(step + 1, result)

    def _check(self, step: int, is_finite: bool, found: Sequence[Disagreement]) -> None:
        """Raise MustGoBack unless the weights after this step are in order."""
        if found:
            raise disagreed(step, found, self.driver.plan)
        if not is_finite:
            raise NotFinite(step, f"weights that are not finite after step {step}")

    def _remark_spike(self, step: int, result: StepCommit) -> None:
        """Say so; raise Spiked to go back, if there is a checkpoint."""
        loss, most = result.loss(), result.most_loss
        got = f"loss {loss:.4f} in step {step}, more than {most:.4f}"
        if self.config.on_spike == "rollback":
            self.driver.wait_saved()
            if self.driver.saved is not None:
                raise Spiked(step, f"{got}, {self.config.spike_factor:g} x the usual")
        self.remark(Spiked.name, step, loss=loss, most=most)
        self.display.note(f"{got}: {self.config.spike_factor:g} x the usual")

    def _record(self) -> None:
        """Fetch the last step's loss, write its metrics line and show it."""
        if self._done is None:
            return
        done, self._done = self._done, None
        if done.result.is_skipped:
            return self._record_skipped(done)
        self._num_skipped = 0
        step, loss = done.step, done.result.loss()
        norm, num_tokens = done.result.grad_norm, done.result.num_tokens
        if not (math.isfinite(loss) and math.isfinite(norm)):
            got = f"loss {loss} and grad_norm {norm} in step {step}"
            raise NotFinite(step, got)
        line = {
            "step": step,
            "loss": loss,
            "tokens": num_tokens,
            "step_time_s": done.step_time_s,
            "tokens_per_s": num_tokens / done.step_time_s,
            "grad_norm": norm,
            "learning_rate": done.learning_rate,
        }
        if done.result.loss_scale is not None:
            line["loss_scale"] = done.result.loss_scale
        if done.seconds_at_peak is not None:
            line["mfu"] = done.seconds_at_peak / done.step_time_s
        self.metrics.append(line)
        self.display.trained(line)
        self._compare(step, done.step_time_s)

    def _record_skipped(self, done: _Done) -> None:
        """Write of a step that changed nothing; count those that could have."""
        step, result = done.step, done.result
        line = skipped_line(step, result, done.step_time_s, done.learning_rate)
        self.metrics.append(line)
        self.display.note(f"step {step} skipped: {line['reason']}")
        if result.is_left_out:
            return
        self._num_skipped += 1
        if self._num_skipped == MOST_SKIPPED:
            self.driver.wait_saved()
            raise skips_all(step, result.loss_scale, self.config, self.driver.saved)

    def _compare(self, step: int, step_time_s: float) -> None:
        """Hold a step's time against what was predicted; that is no step's time."""
        start_s = time.perf_counter()
        self.compared(step, step_time_s)
        self._since_s += time.perf_counter() - start_s

    def evaluate(self, step: int) -> None:
        """Record the validation loss and show a sampled text, once per step."""
        self._record()
        if step in self.evaluated:
            return
        losses = []
        for number, weight in enumerate(self.driver.validation_weights):
            losses.append(weight * self.driver.validate(number))
            if self.stop.reason is not None and step < self.config.steps:
                return  # resuming makes up for it
        loss = float(np.mean(losses))
        if not math.isfinite(loss):
            got = f"validation loss {loss} after step {step}"
            self.driver.wait_saved()
            raise diverged(got, self.config, self.driver.saved)
        bits_per_byte = loss / math.log(2) / self.dataset.bytes_per_token
        line = {"step": step, "val_loss": loss, "val_bits_per_byte": bits_per_byte}
        self.metrics.append(line)
        self.evaluated.add(step)
        self.best.hear_loss(step, loss)
        self._tell_best()
        self.display.note(metrics_line(line, self.config.steps))
        if self.config.evaluation.sample_tokens:
            self.display.note(f"sample: {self.sample(step, self.config.evaluation)!r}")
        self._since_s = time.perf_counter()

    def sample(self, step: int, evaluation: EvaluationConfig) -> str:
        """Return a text that the model goes on with after this step."""
        return sample_text(
            self.driver.next_logits,
            self.dataset.tokenizer,
            evaluation,
            seed=(self.config.seed, step),
        )

    def _save_good(self, step: int) -> None:
        """Save as soon as a step is not skipped: weights that give no numbers must not
        take the place of those that did."""
        self._record()
        self._is_late = self._num_skipped > 0
        if not self._is_late:
            self._save(step)

    def _save(self, step: int) -> None:
        """Start a checkpoint, unless the one before is still being written."""
        self._record()  # a state that has no finite loss must not be saved
        self.mend()
        self._check(step, *self.driver.check())
        self._check_finite(step)
        started = self.driver.save(step, self._best_saved)
        self._tell_saved()
        self._check_finite(step)
        if not started:
            self.display.note(
                f"checkpoint of step {step} left out: one is still being written "
                "(a larger --checkpoint.every avoids this)"
            )
        self._since_s = time.perf_counter()

    def _save_last(self, step: int) -> None:
        for number in range(_NUM_LAST_SAVES + 1):
            self.driver.wait_saved()
            self._tell_saved()
            self._check_finite(step)
            is_saved = self.driver.saved == step and self.driver.is_kept
            if is_saved and not self.mend():
                return
            if number < _NUM_LAST_SAVES:
                self._save(step)
        raise RunFailed(
            got=f"no complete checkpoint of step {step}",
            allowed="a run ends with its state saved",
            fix="make room on the disk and run the same command again",
        )

    def _check_finite(self, step: int) -> None:
        if self.driver.is_not_finite:
            got = f"weights that are not finite, to be saved by step {step}"
            raise NotFinite(step, got)

    def _tell_saved(self) -> None:
        if self.driver.saved not in (None, self._saved):
            self._saved = self.driver.saved
            self.heard_saved(self._saved)
            self.best.hear_saved(self._saved)
            self._tell_best()

    def _best_saved(self) -> int | None:
        self._tell_saved()
        return self.best.step

    def _tell_best(self) -> None:
        step, loss = self.best.step, self.best.loss
        if step is not None and loss is not None and step != self._best:
            self.heard_best(step, loss)
        self._best = step

    def _is_traced(self, num_trained: int) -> bool:
        traced = self.trace is not None and num_trained in self._traced
        self._num_traced += traced
        return traced

    def _write_trace(self) -> None:
        if self.trace is not None:
            spans = self.driver.spans() if self._num_traced else ()
            self.display.note(write_trace(self.trace, spans, self._num_traced))
