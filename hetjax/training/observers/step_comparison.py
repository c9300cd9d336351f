# SPDX-License-Identifier: Apache-2.0
"""Compares the measured step time of a run with the predicted one, and learns from it.

Owns which steps count, and the message. Does not own the prediction
(`hetjax/schedule/predicted.py`) nor the costs that it is made of.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, Protocol

from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.calibration import StepCalibration, write_calibration
from hetjax.costs.certainty.kept import keep, plan_precisions
from hetjax.costs.certainty.priors import RUN
from hetjax.costs.certainty.work import measured_parts
from hetjax.costs.costs import Costs
from hetjax.costs.slowness.known import Slowness
from hetjax.costs.slowness.step_times import Part, StepTimes
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.launchers.table import LAUNCHERS
from hetjax.models.model import Model
from hetjax.planner.model.costing import checked_costs, memory_from, times_from
from hetjax.plans.plan import Plan
from hetjax.report.metrics import ms
from hetjax.report.plans.binding import Binding, binding, largest_term
from hetjax.report.prediction import (
    CPU_GUESS,
    SimulatedStep,
    check_finite,
    guesses_a_cpu,
)
from hetjax.schedule.certainty import (
    Certainty,
    CostsOn,
    certainty_of,
    learnt,
    plan_digest,
)
from hetjax.schedule.predicted import Predicted, predict
from hetjax.stage.partition import tied_holders
from hetjax.training.directory.rundir import CALIBRATION
from hetjax.training.layout.compiled_memory import read_run_compiled
from hetjax.training.layout.plan_choice import (
    optimizer_init,
    read_run_calibration,
    read_run_profile,
    read_run_slowness,
)
from hetjax.training.settings.config import RunConfig

# How many steps each look at a plan's times covers. The first look leaves out the
# warm-up step; it compares and learns. As learning may take a second, later looks learn
# only if the median has changed by more than _UNLIKE, or if they are the first with
# times of parts
_LOOKS = (4, 8, 16, 32)
_UNLIKE = 1.03
_FAR_OFF = 1.25

Predict = Callable[[Plan, Cluster], SimulatedStep]


def predict_step(
    config: RunConfig, model: Model, plan: Plan, cluster: Cluster
) -> SimulatedStep:
    """Predict a step of the run with this plan, at the speeds learnt so far.

    Raises BadInput for devices without figures, NoFeasiblePlan for a plan over memory.
    """
    found = predict_at(config, model, plan, cluster, read_run_slowness(config))
    return SimulatedStep(found.predicted, lambda: found.certainty)


def learn_step(
    config: RunConfig,
    model: Model,
    plan: Plan,
    cluster: Cluster,
    measured_s: float,
    parts: Mapping[Part, float] | None = None,
    *,
    again: bool = False,
) -> None:
    """Write a measured step, the `parts` of its time and their prediction to the run's
    calibration. With `again`, replace the last step, if that was of this plan.

    From the first step on, the run no longer uses steps of other runs: devices may have
    been faster or slower then. Later runs get every step, unless CPUs have stood in for
    other devices. Raises as `predict_step` does, and OSError if the step cannot be
    kept.
    """
    slow = read_run_slowness(config)
    at = predict_at(config, model, plan, cluster, slow)
    seen, before = at.calibration, ()
    if again and seen.lesson == RUN and seen.ends_with(plan_digest(plan)):
        seen, before = seen.without_last_step(), seen.last_step
    if not (config.run_dir / CALIBRATION).exists():
        seen = seen.only_sums()
    # what is slow now must not be learnt as the speed of its kind
    found = learnt(
        at.predicted,
        slow.applied(cluster),
        at.costs_on,
        seen,
        measured_s,
        parts,
    )
    write_calibration(config.run_dir / CALIBRATION, found)
    if not config.simulate:
        precisions = plan_precisions(plan, cluster, config.dtype)
        keep(found.last_step, cluster, precisions, instead_of=before)


@dataclass(frozen=True, kw_only=True)
class RunPrediction:
    """A predicted step of a run, and what it was predicted from.

    `cluster` has the speeds that the run has learnt, including what is slow; `measured`
    are the device kinds in the run's profile.
    """

    predicted: Predicted
    cluster: Cluster
    costs_on: CostsOn
    calibration: StepCalibration
    measured: frozenset[str]

    @cached_property
    def certainty(self) -> Certainty:
        """How certain the prediction is, found by more simulations."""
        return certainty_of(
            self.predicted,
            self.cluster,
            self.costs_on,
            measured=self.measured,
            calibration=self.calibration,
        )


def predict_at(
    config: RunConfig, model: Model, plan: Plan, cluster: Cluster, slow: Slowness
) -> RunPrediction:
    """Predict a step at the speeds that the run has learnt, given what is `slow`.

    Raises as `predict_step` does.
    """
    profile, path = read_run_profile(config, model)
    seen = read_run_calibration(config, cluster)
    cluster = slow.applied(seen.applied(cluster))
    has_workers = LAUNCHERS[config.launcher].has_worker_processes
    compiled = read_run_compiled(config)

    def costs_on(there: Cluster) -> Costs:
        return checked_costs(
            plan,
            model,
            there,
            profile,
            dtype=config.dtype,
            attention=config.attention,
            optimizer=optimizer_init(config),
            transport=config.transport if has_workers else "in-process",
            gradient_wire=config.gradient_wire,
            compiled=compiled,
        )

    costs = costs_on(cluster)
    tied = tied_holders(plan, model)
    source = times_from(plan, cluster, config.dtype, profile, path, tied, seen)
    predicted = predict(plan, costs, tied, times_from=memory_from(source, costs))
    check_finite(predicted)
    return RunPrediction(
        predicted=predicted,
        cluster=cluster,
        costs_on=costs_on,
        calibration=seen,
        measured=frozenset() if profile is None else profile.devices,
    )


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """A measured step time, and the predicted step, or `why` there is none."""

    measured_s: float
    predicted: Predicted | None = None
    why: str = ""
    is_simulated: bool = False
    is_cpu_guessed: bool = False

    @cached_property
    def _binds(self) -> Binding | None:
        return self.predicted and binding(self.predicted)

    def values(self) -> dict[str, Any]:
        """Return the figures as they stand in `events.jsonl`."""
        found = self.predicted
        return {
            "measured_s": self.measured_s,
            "predicted_s": found and found.simulation.step_time_s,
            "binds": self._binds and self._binds.what,
            "times_from": found.times_from if found else "",
        }

    def __str__(self) -> str:
        measured = f"step time {ms(self.measured_s)} ms measured"
        if self.predicted is None or self._binds is None:
            return f"{measured}; no prediction: {self.why}"
        predicted_s = self.predicted.simulation.step_time_s
        predicted = f"{ms(predicted_s)} ms predicted"
        times_from = self.predicted.times_from
        if self.is_simulated:
            return (
                f"{measured} on the CPU here, {predicted} for the devices that it "
                f"simulates; {largest_term(self._binds)}"
            )
        if self.is_cpu_guessed:
            return f"{measured}, {predicted}; {CPU_GUESS}"
        off = self.measured_s / predicted_s
        line = (
            f"{measured}, {predicted} ({off - 1:+.1%}; {times_from}); "
            f"{largest_term(self._binds)}"
        )
        estimated = times_from.startswith("estimated")
        if estimated and not 1 / _FAR_OFF < off < _FAR_OFF:
            line += "; `hetjax profile` measures times to predict and plan with"
        return line


class Learn(Protocol):
    """Keeps a measured step of a plan, if `again` in the place of its last one."""

    def __call__(
        self,
        plan: Plan,
        cluster: Cluster,
        measured_s: float,
        parts: Mapping[Part, float],
        /,
        *,
        again: bool,
    ) -> None: ...


@dataclass(kw_only=True, slots=True)
class StepComparison:
    """Compares once per plan, after its fourth step, and learns from that step.

    Learns again from later steps if these are unlike: devices warm up, and a few steps
    on a shared machine tell little.
    """

    predict: Predict
    learn: Learn
    is_simulated: bool
    _plan: tuple[Plan, Cluster] | None = None
    _num_looks: int = 0
    _has_kept: bool = False  # a step of this plan
    _kept_s: float | None = None  # its time; None: the next look learns any time
    _num_kept_parts: int = 0  # the number of steps whose parts it has
    _times_s: list[float] = field(default_factory=list)
    _parts: list[StepTimes] = field(default_factory=list)

    def begin(self, plan: Plan, cluster: Cluster) -> None:
        """Collect the times of this plan's steps from now on."""
        self._plan, self._num_looks = (plan, cluster), 0
        self._has_kept, self._kept_s, self._num_kept_parts = False, None, 0
        self._times_s, self._parts = [], []

    def stop(self) -> None:
        """Ignore further steps of this plan, as when not all of its replicas train."""
        self._plan = None

    def slow(self) -> None:
        """Begin the current look anew: speeds have changed at some step before."""
        self._times_s, self._parts, self._kept_s = [], [], None

    def add(
        self, step_time_s: float, parts: StepTimes | None = None
    ) -> ComparedStep | None:
        """Take the time of a step, and of its parts if they were measured.

        Return the comparison if it is due.
        """
        if self._plan is None:
            return None
        self._times_s.append(step_time_s)
        is_warm = self._num_looks > 0 or len(self._times_s) > 1
        if parts is not None and is_warm:
            self._parts.append(parts)
        if len(self._times_s) < _LOOKS[self._num_looks]:
            return None
        plan, cluster = self._plan
        if self._num_looks > 0:
            self._look_again(plan, cluster)
            found = None
        else:
            found = self._compared(plan, cluster, median(self._times_s[1:]))
        self._num_looks, self._times_s, self._parts = self._num_looks + 1, [], []
        if self._num_looks == len(_LOOKS):
            self.stop()
        return found

    def _compared(
        self, plan: Plan, cluster: Cluster, measured_s: float
    ) -> ComparedStep:
        try:
            found = self.predict(plan, cluster).predicted
        except (BadInput, NoFeasiblePlan) as bad:
            self.stop()
            return ComparedStep(measured_s=measured_s, why=bad.got)
        if self.is_simulated:
            self.stop()
        else:
            self._learn(plan, cluster, measured_s)
        return ComparedStep(
            measured_s=measured_s,
            predicted=found,
            is_simulated=self.is_simulated,
            is_cpu_guessed=guesses_a_cpu(found, cluster),
        )

    def _look_again(self, plan: Plan, cluster: Cluster) -> None:
        num_parts, measured_s = len(self._parts), median(self._times_s)
        if num_parts < self._num_kept_parts:
            return  # short steps are not all timed, and single ones tell little
        has_new_parts = num_parts > 0 and self._num_kept_parts == 0
        if self._kept_s is not None and not has_new_parts:
            if 1 / _UNLIKE < measured_s / self._kept_s < _UNLIKE:
                return
        try:
            self._learn(plan, cluster, measured_s)
        except (BadInput, NoFeasiblePlan) as bad:  # a file has changed since
            self.stop()
            line = f"the run learns no more from its steps: {bad.got}"
            warnings.warn(line, stacklevel=2)

    def _learn(self, plan: Plan, cluster: Cluster, measured_s: float) -> None:
        """Keep the step for later predictions; a full disk must not end the run."""
        parts = measured_parts(self._parts)
        try:
            self.learn(plan, cluster, measured_s, parts, again=self._has_kept)
        except OSError as error:
            warnings.warn(
                "cannot keep the measured step times: "
                f"{error.filename}: {error.strerror or error}",
                stacklevel=2,
            )
            return
        self._has_kept, self._kept_s = True, measured_s
        self._num_kept_parts = len(self._parts)
