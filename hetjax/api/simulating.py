# SPDX-License-Identifier: Apache-2.0
"""Predicting a step of a plan before it runs: `simulate_plan`.

Owns where plan, model, cluster and times come from, and that they fit together. Does
not own the costs (`planner/model/costing.py`), what is shown (`report/prediction.py`)
nor the simulation (`schedule/`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.costs.measured.profile import check_profile
from hetjax.costs.measured.profile_files import read_profile
from hetjax.costs.plan_costs import costs_of, device_kinds, usd_per_hour
from hetjax.costs.static import adam_state
from hetjax.models.model import Model
from hetjax.models.presets import model_preset
from hetjax.planner.model.costing import (
    check_measured,
    check_times,
    compute_dtype,
    times_from,
)
from hetjax.plans.files import read_plan
from hetjax.plans.plan import Plan
from hetjax.report.prediction import SimulatedStep, check_finite
from hetjax.report.progress import working
from hetjax.schedule.named import may_split, with_schedule
from hetjax.schedule.predicted import predict
from hetjax.stage.arrays import OptimizerInit
from hetjax.stage.partition import tied_holders
from hetjax.training.optimizer import optimizer
from hetjax.training.placement import check_plan, choose_plan, cluster_of
from hetjax.training.presets import PRESETS, check_plan_or_preset, preset


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What is given besides the plan; None where it is to follow from the rest."""

    model: Model | str | None
    cluster: Cluster | str | Path | None
    profile: Path | None
    dtype: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """What is simulated: a valid plan with its model, on a cluster.

    `dtype` and the optimizer's `init` are those of training, where a preset tells.
    """

    plan: Plan
    model: Model
    cluster: Cluster
    dtype: str = "bfloat16"
    init: OptimizerInit = adam_state


def simulate_plan(
    plan: Plan | str | Path,
    *,
    model: Model | str | None = None,
    cluster: Cluster | str | Path | None = None,
    profile: str | Path | None = None,
    dtype: str | None = None,
    schedule: str | None = None,
    quiet: bool = False,
) -> SimulatedStep:
    """Simulate one step of a plan, of a plan file, or of what a preset trains with.

    The model is the plan's unless another is given; `cluster` is a cluster, a file or a
    name, else the preset's, else the devices that are here. Times are those of a
    `profile` file, else estimates. `dtype` is what is computed in ("float32" or
    "bfloat16"), `schedule` another schedule than the plan's.

    BadInput for what does not fit together, NoFeasiblePlan for a plan over memory.

    >>> step = simulate_plan("tiny", quiet=True)
    >>> step.plan.schedule, step.tokens_per_s == 48 * 64 / step.step_time_s
    ('1f1b', True)
    """
    path = None if profile is None else Path(profile)
    asked = _Asked(model=model, cluster=cluster, profile=path, dtype=dtype)
    with working("simulating", quiet=quiet) as told:
        return _simulated(_subject(plan, asked, told), asked, schedule)


def _simulated(subject: _Subject, asked: _Asked, schedule: str | None) -> SimulatedStep:
    plan, model, cluster = subject.plan, subject.model, subject.cluster
    profile = None if asked.profile is None else read_profile(asked.profile)
    dtype = compute_dtype(asked.dtype, profile, subject.dtype)
    if profile is not None:
        check_profile(profile, model.name, plan.seq_len, len(model.layers))
        check_measured(profile, device_kinds(plan, cluster), "plan")
    costs = costs_of(
        plan,
        model,
        cluster,
        profile,
        dtype=dtype,
        optimizer=subject.init,
        # programs written by hand may split backwards under any schedule
        halves=may_split(schedule or plan.schedule) or bool(plan.programs),
    )
    check_times(costs)
    tied = tied_holders(plan, model)
    if schedule is not None:
        plan = with_schedule(plan, schedule, costs, tied)
        check_plan(plan, model, cluster, f"--schedule {schedule}")
    predicted = predict(
        plan,
        costs,
        tied,
        times_from=times_from(plan, cluster, dtype, profile, asked.profile, tied),
        usd_per_hour=usd_per_hour(plan, cluster),
    )
    check_finite(predicted)
    return SimulatedStep(predicted)


def _subject(
    given: Plan | str | Path, asked: _Asked, told: Callable[[str], None]
) -> _Subject:
    """Read what is given, and check that it fits together."""
    if isinstance(given, str) and given in PRESETS:
        return _of_preset(given, asked, told)
    plan, where = _plan(given)
    model = _model(asked.model or plan.model)
    plan = replace(plan, model=model.name)
    cluster = cluster_of(asked.cluster)
    check_plan(plan, model, cluster, where)
    return _Subject(plan=plan, model=model, cluster=cluster)


def _plan(given: Plan | str | Path) -> tuple[Plan, str]:
    """The plan, and what to call it in errors."""
    if isinstance(given, Plan):
        return given, "the plan"
    check_plan_or_preset(str(given))
    return read_plan(given), f"plan file {str(given)!r}"


def _model(given: Model | str) -> Model:
    return given if isinstance(given, Model) else model_preset(given)


def _of_preset(name: str, asked: _Asked, told: Callable[[str], None]) -> _Subject:
    """Take the preset's plan, else plan with the times that are simulated with."""
    chosen = preset(name)
    model = _model(asked.model or chosen.config.model)
    profile = None if asked.profile is None else read_profile(asked.profile)
    dtype = compute_dtype(asked.dtype, profile, chosen.config.dtype)
    config = replace(chosen.config, dtype=dtype, profile=asked.profile)
    chosen = replace(chosen, config=config)
    config = replace(config, model=model.name)
    cluster = cluster_of(asked.cluster or chosen.cluster)
    plan = choose_plan(config, model, cluster, chosen, None, told).plan
    init = optimizer(config.optimizer, config.steps).init
    return _Subject(
        plan=plan, model=model, cluster=cluster, dtype=config.dtype, init=init
    )
