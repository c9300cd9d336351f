# SPDX-License-Identifier: Apache-2.0
"""Predicting a step of a plan before it runs: `simulate_plan`.

Owns where plan, model, cluster and times come from, and that they fit together. Does
not own the costs (`planner/model/costing.py`), what is shown (`report/prediction.py`)
nor the simulation (`schedule/`).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.calibration import StepCalibration
from hetjax.costs.certainty.chosen import calibration_from
from hetjax.costs.certainty.kept import plan_precisions
from hetjax.costs.costs import Costs
from hetjax.costs.measured.compiled import NOTHING, CompiledBytes, read_compiled
from hetjax.costs.measured.layer_profile import Profile, check_profile, read_profile
from hetjax.costs.network.wire_bytes import GradientWire
from hetjax.costs.plan_costs import device_kinds, usd_per_hour
from hetjax.costs.stage_memory import adam_state
from hetjax.errors import BadInput
from hetjax.models.finetuning import (
    WHOLE,
    WITHOUT_ADAPTERS,
    LoraConfig,
    TrainConfig,
    fine_tuned,
    warn_of_profile,
)
from hetjax.models.fingerprint import fingerprint
from hetjax.models.model import Model
from hetjax.models.named import TypedName, load_named
from hetjax.optimizers.optimizer import optimizer
from hetjax.planner.model.costing import (
    check_measured,
    checked_costs,
    compute_dtype,
    memory_from,
    times_from,
)
from hetjax.plans.attention import Attention
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import read_plan
from hetjax.plans.precision import Dtype
from hetjax.report.prediction import SimulatedStep, check_finite
from hetjax.report.progress import working
from hetjax.schedule.certainty import Certainty, certainty_of
from hetjax.schedule.predicted import predict
from hetjax.schedule.search import with_schedule
from hetjax.stage.arrays import OptimizerInit
from hetjax.stage.partition import tied_holders
from hetjax.training.layout.hardware import cluster_of
from hetjax.training.layout.plan_choice import check_plan, choose_plan
from hetjax.training.layout.plan_model import model_of_plan
from hetjax.training.settings.presets import (
    PRESETS,
    Preset,
    check_plan_or_preset,
    preset,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """What is simulated: a valid plan with its model, on a cluster.

    The optimizer's `init` is that of training, where a preset tells.
    """

    plan: Plan
    model: Model
    cluster: Cluster
    init: OptimizerInit = adam_state


def simulate_plan(
    plan: Plan | str | Path,
    *,
    model: Model | str | None = None,
    cluster: Cluster | str | Path | None = None,
    profile: str | Path | None = None,
    compiled: str | Path | None = None,
    calibration: str | Path | None = None,
    allow_model_code: str | None = None,
    dtype: Dtype | None = None,
    attention: Attention | None = None,
    schedule: str | None = None,
    gradient_wire: GradientWire = "float32",
    train: TrainConfig = WHOLE,
    lora: LoraConfig = WITHOUT_ADAPTERS,
    quiet: bool = False,
) -> SimulatedStep:
    """Simulate one step of a plan, of a plan file, or of what a preset trains with.

    The model is the plan's unless another is given, with a warning if its layers or
    shapes are others; a function that a plan file names is called only if it is the one
    that `allow_model_code` names. `cluster` is a cluster, a file or a
    name, by default the preset's, or the devices that are here. Times come from the
    file `profile`, or are estimated; what the compiler said of a run's memory from the
    file `compiled`, what it measured of its steps from `calibration`; without it
    counts what earlier runs have taught, with "none" nothing does. `dtype` is the
    precision of computation ("best": what every kind of device does best) and
    `attention` its form, both of stages that do not say theirs, `schedule` another
    schedule than the plan's, `gradient_wire` what workers send gradients in. `train`
    and `lora` say what of the model is trained.

    BadInput for what does not fit together, NoFeasiblePlan for a plan that needs more
    memory than there is.

    >>> step = simulate_plan("tiny", quiet=True)
    >>> step.plan.schedule, step.tokens_per_s == 48 * 64 / step.step_time_s
    ('1f1b', True)
    """
    path, asked = None if profile is None else Path(profile), dtype
    with working("simulating", quiet=quiet) as report_line:
        measured = None if path is None else read_profile(path)
        if isinstance(plan, str) and plan in PRESETS:
            chosen = preset(plan)
            dtype = compute_dtype(dtype, measured, chosen.config.dtype)
            attention = attention or chosen.config.attention
            config = replace(
                chosen.config,
                dtype=dtype,
                attention=attention,
                profile=path,
                calibration=None if calibration is None else Path(calibration),
            )
            whole = load_named(config.model) if model is None else _model(model)
            found = fine_tuned(whole, train, lora)
            subject = _of_preset(
                replace(chosen, config=config), found, cluster, report_line
            )
        else:
            dtype = compute_dtype(dtype, measured, "best")
            read, where = _read(plan)
            if model is None:
                whole = model_of_plan(read, where, allow_model_code)
            else:
                whole = _model(model)
                _warn_of_other_model(read, whole, where)
            subject = _of_plan(read, where, fine_tuned(whole, train, lora), cluster)
        _check_asked(asked, subject.plan)
        known = NOTHING if compiled is None else read_compiled(compiled)
        way = dtype, attention
        there = subject.cluster
        precisions = plan_precisions(subject.plan, there, dtype)
        seen = calibration_from(calibration, there, precisions)
        subject = replace(subject, cluster=seen.applied(there))
        return _simulated(
            subject, measured, path, way, schedule, gradient_wire, known, seen
        )


def _check_asked(asked: Dtype | None, plan: Plan) -> None:
    """Raise BadInput for --dtype with a plan whose stages say another precision."""
    for r, s, stage in plan.stages():
        if asked not in (None, "best") and stage.precision not in (None, asked):
            raise BadInput(
                got=f"--dtype {asked} with replicas[{r}].stages[{s}].precision = "
                f"{stage.precision!r} in the plan",
                allowed="a --dtype for stages that do not say their precision",
                fix="leave --dtype out, or take the precision out of the stages",
            )


def _simulated(
    subject: _Subject,
    profile: Profile | None,
    path: Path | None,
    way: tuple[Dtype, Attention | None],
    schedule: str | None,
    gradient_wire: GradientWire,
    compiled: CompiledBytes,
    calibration: StepCalibration,
) -> SimulatedStep:
    plan, model, cluster = subject.plan, subject.model, subject.cluster
    dtype, attention = way
    if profile is not None:
        check_profile(profile, model.name, plan.seq_len, len(model.layers))
        warn_of_profile(model)
        check_measured(profile, device_kinds(plan, cluster), "plan")

    def costs_on(there: Cluster) -> Costs:
        return checked_costs(
            plan,
            model,
            there,
            profile,
            dtype=dtype,
            attention=attention,
            optimizer=subject.init,
            schedule=schedule,
            gradient_wire=gradient_wire,
            compiled=compiled,
        )

    costs = costs_on(cluster)
    tied = tied_holders(plan, model)
    if schedule is not None:
        plan = with_schedule(plan, schedule, costs, tied)
        check_plan(plan, model, cluster, f"--schedule {schedule}")
    source = times_from(plan, cluster, dtype, profile, path, tied, calibration)
    predicted = predict(
        plan,
        costs,
        tied,
        times_from=memory_from(source, costs),
        usd_per_hour=usd_per_hour(plan, cluster),
    )
    check_finite(predicted)
    measured = frozenset() if profile is None else profile.devices

    @cache
    def surely() -> Certainty:
        return certainty_of(
            predicted, cluster, costs_on, measured=measured, calibration=calibration
        )

    return SimulatedStep(predicted, surely)


def _read(given: Plan | str | Path) -> tuple[Plan, str]:
    """The plan, and what it is called."""
    if isinstance(given, Plan):
        return given, "the plan"
    check_plan_or_preset(str(given))
    return read_plan(given), f"plan file {str(given)!r}"


def _of_plan(
    plan: Plan, where: str, model: Model, cluster: Cluster | str | Path | None
) -> _Subject:
    """Check that what is given fits together."""
    there = cluster_of(cluster)
    plan = replace(plan, model=model.name, fingerprint=fingerprint(model))
    check_plan(plan, model, there, where)
    return _Subject(plan=plan, model=model, cluster=there)


def _of_preset(
    chosen: Preset,
    found: Model,
    cluster: Cluster | str | Path | None,
    report_line: Callable[[str], None],
) -> _Subject:
    """Take the preset's plan, else plan with the times that are simulated with."""
    config = chosen.config
    there = cluster_of(cluster or chosen.cluster)
    config = replace(config, model=found.name)
    plan = choose_plan(config, found, there, chosen, None, report_line).plan
    init = optimizer(config.optimizer, config.steps).init
    return _Subject(plan=plan, model=found, cluster=there, init=init)


def _model(given: Model | str) -> Model:
    return given if isinstance(given, Model) else load_named(TypedName(given))


def _warn_of_other_model(plan: Plan, model: Model, where: str) -> None:
    if plan.fingerprint not in (None, fingerprint(model)):
        warnings.warn(
            f"{where} is for model {plan.model}, whose layers or shapes are not those "
            f"of {model.name}, for which it is simulated",
            stacklevel=2,
        )
