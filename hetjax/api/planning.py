# SPDX-License-Identifier: Apache-2.0
"""Finds plans: `find_plan` and `compare_planners`.

Owns the checks between the choices of a search, the sources of model, cluster and
times, the early end of a search, and its progress display. Does not own the choices
(`plan_config.py`), the objective (`plan_objective.py`), the searches
(`planner/search/comparison.py`) nor how results are shown (`report/found.py`).
"""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from hetjax.api.plan_config import PlanConfig, PlannedOptimizer, plan_config
from hetjax.api.plan_objective import needs_prices, objective_of, priced_part
from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.chosen import calibration_from
from hetjax.costs.measured.compiled import read_compiled
from hetjax.costs.measured.layer_profile import check_profile, read_profile
from hetjax.costs.stage_memory import OptimizerInit, adam_state
from hetjax.errors import BadInput, did_you_mean, placed
from hetjax.models.finetuning import fine_tuned, warn_of_profile
from hetjax.models.model import Model
from hetjax.models.named import TypedName, load_named
from hetjax.optimizers.checks import optimizer_problems
from hetjax.optimizers.optimizer import optimizer
from hetjax.optimizers.settings import OptimizerConfig
from hetjax.planner.baselines.by_name import BASELINES
from hetjax.planner.model.costing import (
    all_kinds,
    check_measured,
    check_times,
    compute_dtype,
    known_degrees,
)
from hetjax.planner.model.deadline import Deadline, TimeUp, deadline
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import OFFLOADS, PlanRequest
from hetjax.planner.search.comparison import Questions, planned
from hetjax.planner.search.find import LOCAL_WORK, usual_search_s
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import read_plan
from hetjax.plans.precision import Dtype
from hetjax.report.found import ComparedPlanners, FoundPlan
from hetjax.report.prediction import check_finite
from hetjax.report.progress import say_at_once, working
from hetjax.training.layout.hardware import cluster_of
from hetjax.training.layout.plan_model import check_is_for_model, model_of_plan
from hetjax.training.settings.checks import option
from hetjax.training.settings.presets import Preset
from hetjax.training.settings.presets import preset as preset_of

T = TypeVar("T")
_NONE = "none"


def find_plan(
    preset: str | None = None,
    *,
    model: Model | str | None = None,
    cluster: Cluster | str | Path | None = None,
    profile: str | Path | None = None,
    compiled: str | Path | None = None,
    calibration: str | Path | None = None,
    current: Plan | str | Path | None = None,
    allow_model_code: str | None = None,
    quiet: bool = False,
    **choices: Any,
) -> FoundPlan:
    """Find the best plan for a cluster, and a bound on how much better any plan can be.

    The preset gives everything that you leave out; without a preset, `model`,
    `global_batch` and `seq_len` are required. `cluster` is a cluster, a file or a name;
    by default the preset's cluster, or the devices found here.

    `profile` is a file of measured times, `compiled` a file of the memory that the
    compiler reported for a run, and `calibration` a file of what a run measured of its
    steps. Without `calibration` the search uses what earlier runs measured
    (`docs/sure.md`); with "none" it uses no measured steps.

    `current` is the plan that runs now; a move away from it has to pay off. If its file
    names a function as the model, `allow_model_code` has to name the same function, or
    it is not called. `choices` are the fields of `PlanConfig`: `objective="cost"`,
    `search_s=30`, `microbatch_sizes=(1, 2)` and so on. Ctrl-C ends the search with the
    best plan so far.

    Raises BadInput for invalid arguments, NoFeasiblePlan if no plan fits.

    >>> from hetjax.cluster.cluster import Node
    >>> nodes = tuple(Node(name=d, device=d, count=1) for d in ("L4", "H20"))
    >>> pair = Cluster(name="pair", nodes=nodes)
    >>> few = dict(global_batch=8, microbatch_sizes=(4,), remat=("none",))
    >>> found = find_plan("tiny", cluster=pair, quiet=True, **few)
    >>> found.plan.global_batch, 0 < found.lower_bound_s <= found.step_time_s
    (8, True)
    """
    chosen = None if preset is None else preset_of(preset)
    config = replace(plan_config(chosen), **{"compare": (_NONE,)} | choices)
    path = None if profile is None else Path(profile)
    now = read_plan(current) if isinstance(current, str | Path) else current
    questions = _questions(config, now, f"--from {current}")
    planned_model = _model(model, chosen, now, f"--from {current}", allow_model_code)
    request = _request(
        config, chosen, model=planned_model, cluster=cluster, path=path, now=now
    )
    if compiled is not None:
        request = replace(request, compiled=read_compiled(compiled))
    seen = calibration_from(calibration, request.cluster, request.precisions)
    learnt = seen.applied(request.cluster)
    request = replace(request, calibration=seen, cluster=learnt)
    objective = objective_of(config, request.cluster)
    if now is None and not config.pareto and needs_prices(objective):
        priced = priced_part(request.cluster, config.usd_per_kwh)
        request = replace(request, cluster=priced)
    return _found(request, objective, questions, path, config, quiet)


def compare_planners(
    preset: str | None = None, *, compare: tuple[str, ...] | None = (), **given: Any
) -> ComparedPlanners:
    """Plan with hetjax and with other planners; judge all plans by one simulator.

    Arguments are those of `find_plan`; `compare` names the other planners, by default
    all of them.

    >>> from hetjax.cluster.cluster import Node
    >>> nodes = tuple(Node(name=d, device=d, count=1) for d in ("L4", "H20"))
    >>> few = dict(global_batch=8, microbatch_sizes=(4,), compare=("megatron",))
    >>> cluster = Cluster(name="pair", nodes=nodes)
    >>> steps = compare_planners("tiny", cluster=cluster, quiet=True, **few).steps
    >>> steps["hetjax"].step_time_s <= steps["megatron"].step_time_s
    True
    """
    return ComparedPlanners(find_plan(preset, compare=compare, **given).planned)


def _found(
    request: PlanRequest,
    objective: Objective,
    questions: Questions,
    profile_path: Path | None,
    config: PlanConfig,
    quiet: bool,
) -> FoundPlan:
    """Search until there is nothing more to try or a limit is reached; say which.

    Raises BadInput if the limit came before a first plan, KeyboardInterrupt if Ctrl-C
    did.
    """
    limit_s, work = config.search_s, config.search_work or ()
    with working("planning", quiet=quiet) as progress:
        search_s = limit_s or math.inf
        if limit_s is None and not work:
            search_s = usual_search_s(request, progress)
        with deadline(search_s, work) as limit, _stopped_by_ctrl_c(limit):
            try:
                found = planned(
                    request,
                    objective,
                    questions,
                    profile_path=profile_path,
                    progress=progress,
                    local_work=math.inf if limit_s or work else LOCAL_WORK,
                )
            except TimeUp:
                if limit.is_stopped:
                    raise KeyboardInterrupt from None
                raise _nothing_found(search_s, work) from None
    check_times(found.best.costs)
    check_finite(found.best)
    if limit.is_stopped:
        return FoundPlan(found, "interrupted")
    if limit.left_s > 0:
        return FoundPlan(found)
    if work:
        return FoundPlan(found, "search_work", work)
    return FoundPlan(found, "search_s", limit.work.done if limit_s else ())


def _nothing_found(search_s: float, work: tuple[int, ...]) -> BadInput:
    got, fix = f"--search-s {search_s:g}", f"give --search-s {4 * search_s:g}"
    if work:
        typed = ",".join(map(str, work))
        got, fix = f"--search-work {typed}", f"give --search-work {4 * work[-1]}"
    return BadInput(
        got=f"{got}, in which the search found no plan",
        allowed="enough for the search to find a first plan",
        fix=fix,
    )


@contextmanager
def _stopped_by_ctrl_c(limit: Deadline) -> Iterator[None]:
    """Let the first SIGINT end the search; later ones reach the previous handler."""

    def stop(number: int, frame: FrameType | None) -> None:
        limit.stop()
        signal.signal(signal.SIGINT, before)
        say_at_once("ending with the best plan so far; Ctrl-C again: stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _model(
    given: Model | str | None,
    preset: Preset | None,
    now: Plan | None,
    where: str,
    allow_model_code: str | None,
) -> Model | None:
    """Return the given model, otherwise the preset's, otherwise that of the plan `now`.
    Raises BadInput if `now` is for another model."""
    typed = _first(given, preset and preset.config.model)
    if typed is None:
        return now and model_of_plan(now, where, allow_model_code)
    model = typed if isinstance(typed, Model) else load_named(TypedName(typed))
    if now is not None and now.fingerprint is not None:
        fix = "give --from a plan for this model, or leave --from out"
        check_is_for_model(now, model, (), where, fix)
    return model


def _request(
    config: PlanConfig,
    preset: Preset | None,
    *,
    model: Model | None,
    cluster: Cluster | str | Path | None,
    path: Path | None,
    now: Plan | None,
) -> PlanRequest:
    """Return the request; the plan `now` gives a missing batch and sequence length.

    Raises BadInput if something is missing, or does not fit together.
    """
    global_batch = _first(config.global_batch, now and now.global_batch)
    seq_len = _first(config.seq_len, now and now.seq_len)
    if model is None or global_batch is None or seq_len is None:
        raise _not_given(model=model, global_batch=global_batch, seq_len=seq_len)
    model = fine_tuned(model, config.train, config.lora)
    profile = None if path is None else read_profile(path)
    if profile is not None:
        with placed(f"profile file {str(path)!r}"):
            check_profile(profile, model.name, seq_len, len(model.layers))
        warn_of_profile(model)
    for name in ("microbatch_sizes", "tensor"):
        values = getattr(config, name)
        if min(values, default=0) < 1:
            raise BadInput(
                got=f"{option(name)} {','.join(map(str, values))}",
                allowed="numbers from 1",
                fix=f"give {option(name)} 1,2,4, say",
            )
    cluster = cluster_of(cluster or (preset.cluster if preset else None))
    if profile is not None:
        check_measured(profile, all_kinds(cluster), "cluster")
    otherwise: Dtype = "best"
    if preset is not None:
        otherwise = preset.config.dtype
    return PlanRequest(
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        global_batch=global_batch,
        dtype=compute_dtype(config.dtype, profile, otherwise),
        attention=config.attention or (preset.config.attention if preset else None),
        optimizer=_optimizer_init(config, preset),
        profile=profile,
        microbatch_sizes=config.microbatch_sizes,
        tensor_degrees=known_degrees(config.tensor, cluster, profile),
        remats=config.remat,
        offloads=OFFLOADS[config.offload],
        unequal_tensor=config.unequal_tensor,
        usd_per_kwh=config.usd_per_kwh,
        gradient_wire=config.gradient_wire,
    )


def _optimizer_init(config: PlanConfig, preset: Preset | None) -> OptimizerInit:
    """Return the function that makes the optimizer's state. Raises BadInput for
    settings that no optimizer has."""
    if preset is None and config.optimizer == PlannedOptimizer():
        return adam_state
    usual = OptimizerConfig() if preset is None else preset.config.optimizer
    # the learning rate does not matter here, and one rule refuses other schedules
    rule = replace(usual, **asdict(config.optimizer), schedule="constant")
    for problem in optimizer_problems(rule):
        raise problem
    return optimizer(rule, 1 if preset is None else preset.config.steps).init


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


def _not_given(**values: object) -> BadInput:
    examples = {"model": "llama-1b", "global_batch": "128", "seq_len": "2048"}
    missing = [name for name, value in values.items() if value is None]
    added = " ".join(f"{option(name)} {examples[name]}" for name in missing)
    return BadInput(
        got=" and ".join(f"no {option(name)}" for name in missing),
        allowed="a preset's name before the options, or all of --model, --global-batch "
        "and --seq-len",
        fix=f"add {added}, say",
    )


def _questions(config: PlanConfig, now: Plan | None, given: str) -> Questions:
    """Return the questions besides the best plan; `given` is the option that named
    `now`."""
    names = config.compare
    if names == ():
        names = tuple(BASELINES)
    elif names == (_NONE,):
        names = ()
    for name in names or ():
        if name not in BASELINES:
            raise BadInput(
                got=f"--compare {','.join(config.compare or ())}",
                allowed=f"any of {', '.join(BASELINES)}, or {_NONE}",
                fix=did_you_mean(name, list(BASELINES)),
            )
    if now is not None and config.pareto:
        raise BadInput(
            got=f"{given} with --pareto",
            allowed="--from with one --objective at a time",
            fix="leave --from or --pareto out",
        )
    return Questions(
        baselines=names,
        pareto=config.pareto,
        what_if=config.what_if,
        current=now,
        horizon_s=config.horizon_s,
    )
