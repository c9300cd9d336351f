# SPDX-License-Identifier: Apache-2.0
"""Predicts a step of a plan before it runs: `simulate_plan`.

Owns the sources of plan, model, cluster and times, and the check that they fit
together. Does not own the costs (`planner/model/costing.py`), the display
(`report/prediction.py`) nor the simulation (`schedule/`).
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
from hetjax.training.layout.plan_choice import check_plan, choose_plan, optimizer_init
from hetjax.training.layout.plan_model import model_of_plan
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import (
    PRESETS,
    Preset,
    check_plan_or_preset,
    preset,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """A valid plan to simulate, with its model and its cluster.

    If a preset names the optimizer, `init` is that of training.
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
    """Simulate one step of a plan, of a plan file, or of the plan of a preset.

    The model is the plan's, unless you give another; a warning says if its layers or
    shapes differ. If a plan file names a function as the model, `allow_model_code` has
    to name the same function, or it is not called. `cluster` is a cluster, a file or a
    name; by default the preset's cluster, or the devices found here.

    A preset, or a plan whose model is one, has the preset's precision, form of
    attention and optimizer. Times come from the file `profile`, or are estimated.
    `compiled` is a file of the memory that the compiler reported for a run,
    `calibration` a file of what a run measured of its steps. Without `calibration` the
    simulation uses what earlier runs measured; with "none" it uses no measured steps.

    `dtype` is the precision of computation ("best": the best that each kind of device
    has) and `attention` the form of attention; both apply to stages that do not name
    their own. `schedule` replaces the plan's schedule. `gradient_wire` is the precision
    of gradients between workers. `train` and `lora` say what of the model is trained.

    Raises BadInput for arguments that do not fit together, NoFeasiblePlan for a plan
    that needs more memory than there is.

    >>> step = simulate_plan("tiny", quiet=True)
    >>> step.plan.schedule, step.tokens_per_s == 48 * 64 / step.step_time_s
    ('1f1b', True)
    """
    path = None if profile is None else Path(profile)
    asked, form = dtype, attention
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
            read, where = _read(plan)
            config = None
            if model is None:
                whole = model_of_plan(read, where, allow_model_code)
                config = preset(read.model).config if read.model in PRESETS else None
            else:
                whole = _model(model)
                _warn_of_other_model(read, whole, where)
            dtype = compute_dtype(dtype, measured, config.dtype if config else "best")
            attention = attention or (config.attention if config else None)
            tuned = fine_tuned(whole, train, lora)
            subject = _of_plan(read, where, tuned, cluster, config)
        _check_asked(asked, form, subject.plan)
        known = NOTHING if compiled is None else read_compiled(compiled)
        way = dtype, attention
        there = subject.cluster
        precisions = plan_precisions(subject.plan, there, dtype)
        seen = calibration_from(calibration, there, precisions)
        subject = replace(subject, cluster=seen.applied(there))
        return _simulated(
            subject, measured, path, way, schedule, gradient_wire, known, seen
        )


def _check_asked(dtype: Dtype | None, attention: Attention | None, plan: Plan) -> None:
    """Raise BadInput for options with a plan whose stages name another precision or
    form of attention."""
    for r, s, stage in plan.stages():
        for option, asked, name, own in (
            ("--dtype", dtype, "precision", stage.precision),
            ("--attention", attention, "attention", stage.attention),
        ):
            if asked not in (None, "best") and own not in (None, asked):
                raise BadInput(
                    got=f"{option} {asked} with replicas[{r}].stages[{s}].{name} = "
                    f"{own!r} in the plan",
                    allowed=f"{option} for a plan whose stages name no {name}",
                    fix=f"leave {option} out, or remove the {name} from the stages",
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
    # a plan keeps its own order under the schedule that it has
    if schedule is not None and (schedule != plan.schedule or not plan.programs):
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
    """Return the plan, and its name for error messages."""
    if isinstance(given, Plan):
        return given, "the plan"
    check_plan_or_preset(str(given))
    return read_plan(given), f"plan file {str(given)!r}"


def _of_plan(
    plan: Plan,
    where: str,
    model: Model,
    cluster: Cluster | str | Path | None,
    config: RunConfig | None,
) -> _Subject:
    """Return the subject of a given plan, and of its preset's `config` if it has one.

    Raises BadInput if its parts do not fit.
    """
    there = cluster_of(cluster)
    plan = replace(plan, model=model.name, fingerprint=fingerprint(model))
    check_plan(plan, model, there, where)
    if config is None:
        return _Subject(plan=plan, model=model, cluster=there)
    init = optimizer_init(config)
    return _Subject(plan=plan, model=model, cluster=there, init=init)


def _of_preset(
    chosen: Preset,
    found: Model,
    cluster: Cluster | str | Path | None,
    report_line: Callable[[str], None],
) -> _Subject:
    """Take the preset's plan, otherwise plan with the times of the simulation."""
    config = chosen.config
    there = cluster_of(cluster or chosen.cluster)
    config = replace(config, model=found.name)
    plan = choose_plan(config, found, there, chosen, None, report_line).plan
    init = optimizer_init(config)
    return _Subject(plan=plan, model=found, cluster=there, init=init)


def _model(given: Model | str) -> Model:
    return given if isinstance(given, Model) else load_named(TypedName(given))


def _warn_of_other_model(plan: Plan, model: Model, where: str) -> None:
    if plan.fingerprint not in (None, fingerprint(model)):
        warnings.warn(
            f"{where} is for model {plan.model}, but is simulated for a model "
            f"{model.name} with different layers or shapes",
            stacklevel=2,
        )
