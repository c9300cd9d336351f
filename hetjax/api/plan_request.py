# SPDX-License-Identifier: Apache-2.0
"""From the options of `plan` to what is planned, wished and asked.

Owns what must hold between options, and where model, cluster and times come from. Does
not own the options (`plan_options.py`) nor the searches (`planner/comparison.py`).
"""

import math
from typing import TypeVar

from hetjax.cli.plan_options import PlanOptions
from hetjax.cluster.catalogue import device_price_per_hour
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.record import did_you_mean, placed
from hetjax.costs.profile import check_profile
from hetjax.costs.profile_files import read_profile
from hetjax.costs.static import OptimizerInit, adam_state
from hetjax.errors import BadInput
from hetjax.models.presets import model_preset
from hetjax.planner.baselines.table import BASELINES
from hetjax.planner.comparison import Questions
from hetjax.planner.costing import (
    all_kinds,
    check_measured,
    compute_dtype,
    known_degrees,
)
from hetjax.planner.objectives import Objective
from hetjax.planner.request import Request
from hetjax.plans.files import read_plan
from hetjax.plans.plan import Plan
from hetjax.training.config import option
from hetjax.training.optimizer import optimizer
from hetjax.training.placement import cluster_of
from hetjax.training.presets import Preset

T = TypeVar("T")
_NONE = "none"


def request_of(
    options: PlanOptions, preset: Preset | None, current: Plan | None
) -> Request:
    """Return what is to be planned; what nobody says is as in the current plan.

    BadInput if something is missing, or does not go together.
    """
    model = model_preset(_given("model", options.model, current and current.model))
    batch = current and current.global_batch
    global_batch = _given("global_batch", options.global_batch, batch)
    seq_len = _given("seq_len", options.seq_len, current and current.seq_len)
    profile = None if options.profile is None else read_profile(options.profile)
    if profile is not None:
        with placed(f"profile file {str(options.profile)!r}"):
            check_profile(profile, model.name, seq_len, len(model.layers))
    for name in ("microbatch_sizes", "tensor"):
        _check_from_1(name, getattr(options, name))
    cluster = cluster_of(options.cluster or (preset.cluster if preset else None))
    if profile is not None:
        check_measured(profile, all_kinds(cluster), "cluster")
    otherwise = preset.config.dtype if preset else "bfloat16"
    return Request(
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        global_batch=global_batch,
        dtype=compute_dtype(options.dtype, profile, otherwise),
        optimizer=_optimizer(preset),
        profile=profile,
        microbatch_sizes=options.microbatch_sizes,
        tensor_degrees=known_degrees(options.tensor, cluster, profile),
        remats=options.remat,
        unequal_tensor=options.unequal_tensor,
    )


def _given(name: str, *values: T | None) -> T:
    for value in values:
        if value is not None:
            return value
    example = {"model": "llama-1b", "global_batch": "128", "seq_len": "2048"}[name]
    raise BadInput(
        got=f"no {option(name)}",
        allowed="a preset's name before the options, or all of --model, --global-batch "
        "and --seq-len",
        fix=f"add {option(name)} {example}, say",
    )


def _optimizer(preset: Preset | None) -> OptimizerInit:
    if preset is None:
        return adam_state
    return optimizer(preset.config.optimizer, preset.config.steps).init


def _check_from_1(name: str, values: tuple[int, ...]) -> None:
    if min(values) < 1:
        raise BadInput(
            got=f"{option(name)} {','.join(map(str, values))}",
            allowed="numbers from 1",
            fix=f"give {option(name)} 1,2,4, say",
        )


def objective_of(options: PlanOptions, cluster: Cluster) -> Objective:
    """Return what is wished, and its limits."""
    for name in (
        "max_usd_per_hour",
        "deadline_hours",
        "tokens",
        "horizon_s",
        "search_s",
    ):
        _check_positive(name, getattr(options, name))
    for name in ("recovery_s", "checkpoint_every_s", "node_back_s"):
        _check_positive(name, getattr(options, name), zero=True)
    least = None
    if (options.deadline_hours is None) != (options.tokens is None):
        given = "deadline_hours" if options.tokens is None else "tokens"
        other = "tokens" if options.tokens is None else "deadline_hours"
        raise BadInput(
            got=f"{option(given)} without {option(other)}",
            allowed="both, or neither",
            fix=f"add {option(other)} {'300e9' if other == 'tokens' else '240'}, say",
        )
    if options.tokens is not None and options.deadline_hours is not None:
        least = options.tokens / (options.deadline_hours * 3600)
    found = Objective(
        wish=options.objective,
        max_usd_per_hour=options.max_usd_per_hour,
        min_tokens_per_s=least,
        recovery_s=options.recovery_s,
        checkpoint_every_s=options.checkpoint_every_s,
        node_back_s=options.node_back_s,
    )
    _check_prices(found, cluster)
    return found


def _check_positive(name: str, value: float | None, *, zero: bool = False) -> None:
    least = 0.0 if zero else math.ulp(0.0)
    if value is not None and not least <= value < math.inf:
        raise BadInput(
            got=f"{option(name)} {value:g}",
            allowed=f"a number {'from' if zero else 'above'} 0",
            fix=f"correct {option(name)}",
        )


def _check_prices(objective: Objective, cluster: Cluster) -> None:
    """A wish about money needs a price of some device."""
    asked = "--objective cost" if objective.wish == "cost" else None
    if objective.max_usd_per_hour is not None:
        asked = f"--max-usd-per-hour {objective.max_usd_per_hour:g}"
    if asked and not any(
        device_price_per_hour(node) is not None for node in cluster.nodes
    ):
        raise BadInput(
            got=f"{asked}, and no node of cluster {cluster.name!r} has a known price",
            allowed="devices whose price the catalogue or the cluster file tells",
            fix="add price_per_hour = ... (USD, of the whole node) to the nodes",
        )


def questions_of(options: PlanOptions) -> Questions:
    names = options.compare
    if names == ():
        names = tuple(BASELINES)
    elif names == (_NONE,):
        names = ()
    for name in names or ():
        if name not in BASELINES:
            raise BadInput(
                got=f"--compare {','.join(options.compare or ())}",
                allowed=f"planners of {', '.join(BASELINES)}, or {_NONE}",
                fix=did_you_mean(name, list(BASELINES)),
            )
    current = None if options.from_ is None else read_plan(options.from_)
    if current is not None and options.pareto:
        raise BadInput(
            got=f"--from {options.from_} with --pareto",
            allowed="--from with one --objective at a time",
            fix="leave --from or --pareto out",
        )
    return Questions(
        baselines=names,
        pareto=options.pareto,
        what_if=options.what_if,
        current=current,
        horizon_s=options.horizon_s,
    )
