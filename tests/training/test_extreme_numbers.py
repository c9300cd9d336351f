# SPDX-License-Identifier: Apache-2.0
"""Extreme numbers in every numeric field of every file are refused or usable."""

import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import pytest

from hetjax.cluster import ranges
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.costs.measured.layer_profile import (
    LinkMeasurement,
    Measurement,
    Profile,
    parse_profile,
    profile_json,
)
from hetjax.costs.plan_costs import costs_of
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.models.model import tensor_sizes
from hetjax.optimizers.learning_rate import LearningRates
from hetjax.optimizers.optimizer import optimizer
from hetjax.planner.model.costing import check_times
from hetjax.plans.plan import Plan, Prediction, Replica
from hetjax.plans.plan_files import parse_plan, plan_json
from hetjax.plans.validation import validate_plan
from hetjax.report.prediction import check_finite
from hetjax.schedule.predicted import predict
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.config import CheckpointConfig, OptimizerConfig, RunConfig
from hetjax.training.settings.values import config_values, read_config
from tests.training.small import MODEL, small_preset, stage

REFUSED = (BadInput, NoFeasiblePlan)
MOST_SIMULATED = 2000  # forwards; the time of a simulation is proportional

_BOUNDS = {b for r in (*ranges.NODE.values(), ranges.COUNT, ranges.TOKENS) for b in r}
WHOLE = {0, -1, 1, 10**12, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 10**30}
WHOLE |= {int(bound) + step for bound in _BOUNDS if bound >= 1 for step in (0, 1)}
REAL = {-0.0, 5e-324, 1e-300, 1e-30, 1e-7, 1e-3, 1e10, 1e30, 1e300, 1.7e308, -1e-9}
REAL |= {0.97, 0.9999999999, float("nan"), math.inf} | {float(b) for b in _BOUNDS}
NUMBERS = sorted(WHOLE) + sorted(REAL, key=str)

FIGURES: dict[str, Any] = {
    "peak_tflops": 10.0,
    "memory_gib": 4.0,
    "memory_gb_per_s": 100.0,
}
FIGURES |= {"intra_node_gb_per_s": 10.0, "network_gbit_per_s": 10.0}
CLUSTER = Cluster(
    name="c",
    nodes=tuple(
        Node(
            name=name,
            device="own",
            count=2,
            price_per_hour=2.0,
            preemptions_per_hour=0.5,
            **FIGURES,
        )
        for name in ("a", "b")
    ),
    links=(Link(between=("a", "b"), bandwidth_gbit_per_s=1.0, latency_ms=1.0),),
)
PLAN = Plan(
    model=MODEL.name,
    seq_len=16,
    global_batch=4,
    replicas=(
        Replica(
            num_microbatches=4,
            microbatch_size=1,
            stages=(stage("a", (0,), (0, 2), 2), stage("b", (0,), (2, 4), 1)),
        ),
    ),
)
PROFILE = Profile(
    model=MODEL.name,
    seq_len=16,
    dtype="float32",
    layers=("embedding", "block", "block", "head"),
    measurements=tuple(
        Measurement(
            device="own",
            kind=kind,
            tensor=1,
            microbatch_size=1,
            forward_s=0.1,
            backward_s=0.2,
            update_s=0.1,
            input_gradient_s=0.1,
            weight_gradient_s=0.1,
            workspace_bytes=1000,
            shared_update_s=0.1,
        )
        for kind in ("embedding", "block", "head")
    ),
    links=(LinkMeasurement(between=("a", "b"), bandwidth_gbit_per_s=1, latency_ms=1),),
)


def used(plan: Plan, cluster: Cluster, profile: Profile | None = None) -> None:
    """Use the plan as commands do; every resulting number must be finite."""
    validate_plan(plan, cluster, 4, tensor_sizes(MODEL), MODEL.max_seq_len)
    forwards = sum(r.num_microbatches * len(r.stages) for r in plan.replicas)
    if forwards > MOST_SIMULATED:
        assert forwards <= ranges.MOST_FORWARDS
        return
    costs = costs_of(plan, MODEL, cluster, profile, dtype="float32")
    check_times(costs)
    predicted = predict(plan, costs, usd_per_hour=4.0)
    check_finite(predicted)
    assert 0 < predicted.simulation.step_time_s < math.inf
    assert 0 < predicted.tokens_per_s < math.inf
    assert all(0 <= m.total_bytes < 2**63 for m in predicted.memory.values())


def leaves(raw: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths of all numbers in a JSON value."""
    if isinstance(raw, dict | list):
        entries = raw.items() if isinstance(raw, dict) else enumerate(raw)
        for key, value in entries:
            yield from leaves(value, (*path, key))
    elif isinstance(raw, int | float) and not isinstance(raw, bool):
        yield path


def with_number(raw: Any, path: tuple, number: float) -> Any:
    copy = json.loads(json.dumps(raw))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = number
    return copy


NODE_KEYS = ["count", "hosts", *ranges.NODE, *ranges.LINK]


@pytest.mark.parametrize("key", NODE_KEYS)
def test_numbers_in_a_cluster_file(key: str):
    accepted = []
    for number in NUMBERS:
        lines = cluster_toml(CLUSTER).splitlines()
        at = next((i for i, t in enumerate(lines) if t.startswith(f"{key} ")), None)
        lines.insert(lines.index("[[node]]") + 1, "") if at is None else lines.pop(at)
        lines.insert(at or lines.index("[[node]]") + 1, f"{key} = {number!r}")
        try:
            cluster = parse_cluster("\n".join(lines))
        except BadInput:
            continue
        accepted.append(number)
        try:
            used(PLAN, cluster)
        except REFUSED:
            assert key in ("count", "memory_gib"), (key, number)  # too few, too little
    assert accepted, "no number at all"
    known = ranges.NODE | ranges.LINK | {"count": ranges.COUNT, "hosts": ranges.COUNT}
    assert all(known[key].has(number) for number in accepted)


def plan_raw() -> dict[str, Any]:
    predicted = Prediction(step_time_s=1.0, lower_bound_s=1.0, gap=0.0)
    return json.loads(plan_json(replace(PLAN, predicted=predicted)))


@pytest.mark.parametrize("path", list(leaves(plan_raw())), ids=str)
def test_numbers_in_a_plan_file(path: tuple):
    """Each number is tried alone, and with the fields that depend on it."""
    for number in NUMBERS:
        raw = with_number(plan_raw(), path, number)
        others = [raw]
        if path[-1] in ("num_microbatches", "microbatch_size"):
            replica = with_number(raw, ("replicas", 0, "microbatch_size"), 1)
            both = raw if path[-1] == "num_microbatches" else replica
            pairs = both["replicas"][0]
            total = number * (1 if path[-1] == "num_microbatches" else 4)
            pairs[path[-1]] = number
            others.append(with_number(both, ("global_batch",), total))
        for other in others:
            try:
                plan = parse_plan(json.dumps(other))
                used(plan, CLUSTER)
            except REFUSED:
                continue
            assert str(plan) and parse_plan(plan_json(plan)) == plan


@pytest.mark.parametrize(
    ("number", "field"),
    [(10**12, "global_batch"), (2**16 + 1, r"replicas\[0\].num_microbatches")],
)
def test_microbatches_without_end_are_refused(number: int, field: str):
    (replica,) = PLAN.replicas
    many = replace(replica, num_microbatches=number)
    plan = replace(PLAN, replicas=(many,), global_batch=number)
    with pytest.raises(BadInput, match=f"1 <= {field} <= "):
        used(plan, CLUSTER)


def test_more_forwards_than_can_be_simulated_are_refused():
    (replica,) = PLAN.replicas
    many = tuple(replace(replica, num_microbatches=2**16) for _ in range(9))
    plan = replace(PLAN, replicas=many, global_batch=9 * 2**16)
    with pytest.raises(BadInput, match="1179648 forwards in a step"):
        used(plan, CLUSTER)


def profile_raw() -> dict[str, Any]:
    return json.loads(profile_json(PROFILE))


@pytest.mark.parametrize("path", list(leaves(profile_raw())), ids=str)
def test_numbers_in_a_profile(path: tuple):
    for number in NUMBERS:
        text = json.dumps(with_number(profile_raw(), path, number))
        try:
            profile = parse_profile(text)
        except BadInput:
            continue
        assert parse_profile(profile_json(profile)) == profile
        try:
            used(PLAN, CLUSTER, profile)
        except REFUSED:
            continue


def settings(cls: Any = RunConfig, room: str = "") -> Iterator[str]:
    """Yield the dotted names of all numeric settings."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from settings(hint, f"{room}{field.name}.")
        elif {int, float} & {hint, *get_args(hint)}:
            yield f"{room}{field.name}"


@pytest.mark.parametrize("name", list(settings()))
def test_numbers_in_settings(name: str, tmp_path):
    store = CheckpointConfig(cloud=str(tmp_path))
    config = replace(small_preset(tmp_path).config, checkpoint=store)
    raw, path = config_values(config), tuple(name.split("."))
    accepted = []
    for number in NUMBERS:
        try:
            found = read_config(with_number(raw, path, number), "settings")
            check_config(found)
        except BadInput:
            continue
        accepted.append(number)
        assert not math.isnan(number), name
        assert read_config(config_values(found), "settings") == found
    assert accepted, name
    for number in {min(accepted), max(accepted)}:
        found = read_config(with_number(raw, path, number), "settings")
        if name.startswith("optimizer.") or name == "steps":
            trains(found.optimizer, found.steps)


def trains(config: OptimizerConfig, num_steps: int) -> None:
    """Assert that updates and learning rates are finite."""
    rates = LearningRates(config, num_steps)
    assert all(math.isfinite(rates[step]) for step in (0, num_steps - 1))
    rule, weights = optimizer(config, num_steps), {"w": jnp.ones((2, 2))}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        changes, _ = rule.update(weights, rule.init(weights), weights)
    assert all(jnp.isfinite(change).all() for change in jax.tree.leaves(changes))
