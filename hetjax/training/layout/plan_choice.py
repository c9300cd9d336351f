# SPDX-License-Identifier: Apache-2.0
"""Chooses the plan that a run follows.

Owns the order of preference among the user's plan, the run directory's, the preset's
and a new one. Does not own plans themselves (`hetjax/plans/`) nor the cluster that they
are for (`hardware.py`).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hetjax.cluster.cluster import Cluster, Precision
from hetjax.cluster.cluster_files import load_cluster
from hetjax.costs.certainty.calibration import (
    UNCALIBRATED,
    StepCalibration,
    read_calibration,
)
from hetjax.costs.certainty.chosen import calibration_from
from hetjax.costs.measured.layer_profile import Profile, check_profile, read_profile
from hetjax.costs.slowness.known import AS_IT_SHOULD_BE, Slowness, read_slowness
from hetjax.errors import BadInput, counted_noun, placed
from hetjax.models.attention.attention import head_sizes
from hetjax.models.finetuning import warn_of_profile
from hetjax.models.fingerprint import fingerprint
from hetjax.models.model import Model, tensor_sizes
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.optimizers.optimizer import optimizer
from hetjax.planner.model.costing import (
    all_kinds,
    check_plan_fits,
    compute_dtype,
    known_degrees,
)
from hetjax.planner.model.deadline import TimeUp, deadline
from hetjax.planner.model.request import OFFLOADS, PlanRequest, check_request
from hetjax.plans.attention import with_attentions, without_kernels
from hetjax.plans.even import even_plan
from hetjax.plans.plan import Plan, StageKey
from hetjax.plans.plan_files import read_plan
from hetjax.plans.precision import node_precision, with_precisions
from hetjax.plans.validation import validate_plan
from hetjax.report.prediction import certificate, found_plan
from hetjax.stage.arrays import OptimizerInit
from hetjax.training.directory.rundir import CALIBRATION, PROFILE, SLOW, Previous
from hetjax.training.layout.compiled_memory import read_run_compiled
from hetjax.training.layout.plan_model import check_is_for_model, is_for_model
from hetjax.training.settings.checks import option
from hetjax.training.settings.config import RunConfig, is_virtual
from hetjax.training.settings.presets import Preset

_SIZES = (1, 2, 4, 8)  # microbatch sizes and tensor degrees that are always tried


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A valid plan; `source` tells users where it comes from."""

    plan: Plan
    source: str
    is_searched: bool = False


def choose_plan(
    config: RunConfig,
    model: Model,
    cluster: Cluster,
    preset: Preset,
    previous: Previous | None,
    progress: Callable[[str], None] = lambda line: None,
    *,
    given: Plan | None = None,
) -> Choice:
    """Return the given plan, else --plan, the run's, the preset's, or a new one.

    The run's and the preset's must be for the same cluster. `progress` gets lines on
    the state of planning. Raises BadInput if the plan does not fit the cluster, the
    model or the settings, NoFeasiblePlan if it does not fit into memory.
    """
    choice = (
        _given(config, model, given)
        or _of_run(config, model, cluster, previous)
        or _of_preset(config, model, cluster, preset)
    )
    if choice is None and config.planner == "hetjax":
        progress(f"planning for {counted_noun(cluster.num_devices, 'device')}")
        choice = _searched(config, model, cluster, progress)
    choice = choice or _even(config, model, cluster)
    plan = replace(_packing(config, choice.plan), fingerprint=fingerprint(model))
    choice = replace(choice, plan=plan)
    check_plan(choice.plan, model, cluster, f"plan ({choice.source})")
    if is_virtual(config):
        without_kernels(choice.plan, config.attention)  # raises if one is asked for
    check_plan_fits(
        choice.plan,
        model,
        cluster,
        dtype=config.dtype,
        attention=config.attention,
        optimizer=optimizer_init(config),
        compiled=read_run_compiled(config),
    )
    return choice


def check_plan(plan: Plan, model: Model, cluster: Cluster, where: str) -> None:
    """Raise BadInput, beginning with `where`, unless the plan fits both."""
    with placed(where):
        validate_plan(
            plan, cluster, len(model.layers), tensor_sizes(model), model.max_seq_len
        )


def _given(config: RunConfig, model: Model, given: Plan | None) -> Choice | None:
    if given is not None:
        plan, what, source = given, "the given plan", "given"
    elif config.plan is not None:
        plan, source = read_plan(config.plan), f"file {config.plan}"
        what = f"plan file {str(config.plan)!r}"
    else:
        return None
    names = {config.model, model.name}
    check_is_for_model(plan, model, names, what, _plan_for(config, plan))
    for name, in_plan, in_config in _shared(plan, config):
        if in_plan != in_config:
            raise BadInput(
                got=f"{what}: {name} = {in_plan!r}, but the run's {name} is "
                f"{in_config!r}",
                allowed=f"the same {name} in both",
                fix=f"add {option(name)} {in_plan}, or correct the plan file",
            )
    return Choice(plan=plan, source=source)


def _plan_for(config: RunConfig, plan: Plan) -> str:
    """Return what to type if a plan is for another model."""
    on = "" if config.cluster is None else f" --cluster {config.cluster}"
    command = (
        f"python -m hetjax.plan --model {config.model} --global-batch "
        f"{config.global_batch} --seq-len {config.seq_len}{on} --output plan.json"
    )
    is_known = plan.model in MODEL_CONFIGS
    other = f"add --model {plan.model}, or " if is_known else ""
    return f"{other}make a plan for this model: {command}"


def _of_run(
    config: RunConfig, model: Model, cluster: Cluster, previous: Previous | None
) -> Choice | None:
    if previous is None or not cluster.has_machines_of(previous.cluster):
        return None
    # the run's plan has the former values
    is_other = any(
        getattr(config, name) != getattr(previous.config, name)
        for name in ("dtype", "attention")
    )
    if is_other or _how(config) != _how(previous.config):
        return None  # the user asks for a new plan
    if previous.plan is None:
        warnings.warn(f"{previous.no_plan}: the run gets a new plan", stacklevel=2)
        return None
    if previous.plan.fingerprint is not None:
        where = f"the plan in {str(config.run_dir)!r}"
        fix = "restore the files of the model, or train it in another --run-dir"
        check_is_for_model(previous.plan, model, (), where, fix)
    return Choice(plan=previous.plan, source="the run directory's")


def _of_preset(
    config: RunConfig, model: Model, cluster: Cluster, preset: Preset
) -> Choice | None:
    if preset.plan is None or preset.cluster is None:
        return None
    is_otherwise = _how(config) != _how(preset.config)  # the user asks for a new plan
    if is_otherwise or not cluster.has_machines_of(load_cluster(preset.cluster)):
        return None
    plan = read_plan(preset.plan)
    if not is_for_model(plan, model, {config.model}):
        return None
    if any(in_plan != in_config for _, in_plan, in_config in _shared(plan, config)):
        return None
    return Choice(plan=plan, source="the preset's")


def _even(config: RunConfig, model: Model, cluster: Cluster) -> Choice:
    plan = even_plan(
        cluster,
        model=model.name,
        fingerprint=fingerprint(model),
        num_layers=len(model.layers),
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        microbatch_size=config.microbatch_size,
        tensor_sizes=tensor_sizes(model),
        offload=OFFLOADS[config.offload][0],
    )
    return Choice(plan=plan, source="planner 'even'")


def _packing(config: RunConfig, plan: Plan) -> Plan:
    """Return the plan with sequences packed as in the run, whatever it was made for."""
    return replace(plan, packed=bool(config.data.pack))


def next_plan(
    config: RunConfig,
    model: Model,
    cluster: Cluster,
    current: Plan,
    slow: Slowness = AS_IT_SHOULD_BE,
) -> Plan:
    """Plan for a cluster that has changed: quickly, and counting what has to move.

    `slow` devices and links have their present speed; planner even ignores speeds.
    Raises NoFeasiblePlan if the model does not fit there.
    """
    config = _as_now(config, current)
    if config.planner == "even":
        plan = _packing(config, _even(config, model, cluster).plan)
        check_plan_fits(
            plan,
            model,
            cluster,
            dtype=config.dtype,
            attention=config.attention,
            optimizer=optimizer_init(config),
            compiled=read_run_compiled(config),
        )
        return plan
    from hetjax.planner.search.replan import replan  # as in `_searched`

    return replan(_request(config, model, cluster, slow), current).best.plan


def searched_again(
    config: RunConfig,
    model: Model,
    cluster: Cluster,
    current: Plan,
    slow: Slowness,
    horizon_s: float,
) -> tuple[Plan, float]:
    """Return the simplest of the plans that do best until the horizon, and `move_s`.

    `move_s` is how long moving the state to this plan takes; the search counts such a
    time against each plan.
    """
    from hetjax.planner.search.replan import replan

    request = _request(_as_now(config, current), model, cluster, slow)
    found = replan(request, current, horizon_s, as_simple=True)
    return found.best.plan, found.move_s


def _as_now(config: RunConfig, current: Plan) -> RunConfig:
    """Return the settings; allow offloading to hosts if the current plan offloads."""
    away = {stage.offload for _, _, stage in current.stages()} != {"none"}
    if config.offload != "none" or not away:
        return config
    is_even = config.planner == "even"
    return replace(config, offload="optimizer" if is_even else "auto")


def _searched(
    config: RunConfig,
    model: Model,
    cluster: Cluster,
    progress: Callable[[str], None],
) -> Choice:
    """Search as `plan` does; the search counts work, so equal runs get equal plans."""
    # imported late: the solvers take longer to import than JAX, and a run that has its
    # plan does not need them
    from hetjax.planner.search.find import find_plan, usual_search_s

    request = _request(config, model, cluster)
    check_request(request)
    try:
        with deadline(usual_search_s(request, progress)):
            found = find_plan(request)
    except TimeUp:
        raise BadInput(
            got=f"no plan found in time for the {len(model.layers):,} layers of "
            f"{model.name}",
            allowed="a plan made beforehand, by hetjax plan with more time",
            fix="give it with --plan; or give --planner even",
        ) from None
    except BadInput as bad:  # for example, a device without figures
        fix = f"{bad.fix}; or give --planner even, which needs no figures"
        raise BadInput(got=bad.got, allowed=bad.allowed, fix=fix) from bad
    return Choice(
        plan=found_plan(found),
        source=f"planner 'hetjax', {certificate(found)}",
        is_searched=True,
    )


def _request(
    config: RunConfig,
    model: Model,
    cluster: Cluster,
    slow: Slowness = AS_IT_SHOULD_BE,
) -> PlanRequest:
    profile, _ = read_run_profile(config, model)
    if profile is not None and not profile.devices & all_kinds(cluster):
        known = ", ".join(sorted(profile.devices)) or "no devices"
        warnings.warn(
            f"the profile covers only {known}: all times of this cluster are estimates",
            stacklevel=2,
        )
    seen = read_run_calibration(config, cluster)
    return PlanRequest(
        model=model,
        cluster=slow.applied(seen.applied(cluster)),
        calibration=seen,
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        dtype=config.dtype,
        attention=config.attention,
        packed=bool(config.data.pack),
        optimizer=optimizer_init(config),
        profile=profile,
        compiled=read_run_compiled(config),
        microbatch_sizes=tuple(sorted({*_SIZES, config.microbatch_size})),
        tensor_degrees=known_degrees(_SIZES, cluster, profile),
        offloads=OFFLOADS[config.offload],
        gradient_wire=config.gradient_wire,
    )


def read_run_profile(
    config: RunConfig, model: Model
) -> tuple[Profile, Path] | tuple[None, None]:
    """Return --profile, else the run directory's, with its path; None if neither."""
    path = config.profile or config.run_dir / PROFILE
    if config.profile is None and not path.exists():
        return None, None
    profile = read_profile(path)
    with placed(f"profile file {str(path)!r}"):
        check_profile(profile, model.name, config.seq_len, len(model.layers))
        warn_of_profile(model)
        compute_dtype(config.dtype, profile, config.dtype)
    return profile, path


def read_run_calibration(config: RunConfig, cluster: Cluster) -> StepCalibration:
    """Return the calibration by the run's own steps so far.

    Before there is one, return that of --calibration, else that of earlier runs on the
    same devices. A simulated run uses no earlier runs, as CPUs stand in for devices.
    """
    path = config.run_dir / CALIBRATION
    if path.exists():
        return read_calibration(path)
    if config.simulate and config.calibration is None:
        return UNCALIBRATED
    of_node = {node.name: node_precision(node, config.dtype) for node in cluster.nodes}
    return calibration_from(config.calibration, cluster, of_node)


def read_run_slowness(config: RunConfig) -> Slowness:
    """Return what the run has found slow and is still slow."""
    return read_slowness(config.run_dir / SLOW)


def optimizer_init(config: RunConfig) -> OptimizerInit:
    """Return the function that makes the state of the run's optimizer."""
    return optimizer(config.optimizer, config.steps).init


def _how(config: RunConfig) -> tuple[object, ...]:
    """Return the settings of the planner; a change to one asks for a new plan."""
    return config.planner, config.microbatch_size, config.profile, config.offload


def _shared(plan: Plan, config: RunConfig) -> list[tuple[str, object, object]]:
    names = ("seq_len", "global_batch")
    return [(name, getattr(plan, name), getattr(config, name)) for name in names]


def precise_plan(config: RunConfig, model: Model, cluster: Cluster, plan: Plan) -> Plan:
    """Return the plan with the precision and the attention of its stages.

    CPUs that stand in for the cluster's devices have none of their kernels.
    """
    plan = with_precisions(plan, cluster, config.dtype)
    if is_virtual(config):
        return without_kernels(plan, config.attention)
    precisions: dict[StageKey, Precision] = {
        (r, s): stage.precision for r, s, stage in plan.stages() if stage.precision
    }
    sizes = head_sizes(model)
    return with_attentions(plan, cluster, sizes, precisions, config.attention)
