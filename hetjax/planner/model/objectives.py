# SPDX-License-Identifier: Apache-2.0
"""Defines planning objectives: a short step, cheap tokens, or progress despite losses.

Owns the objectives, their limits, and the comparison of plans by them. Does not own the
search for plans (`search/find.py`).
"""

import math
from dataclasses import dataclass
from typing import Literal

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

Wish = Literal["time", "cost", "goodput"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What to plan for, and the limits of a plan.

    `tokens` is the number of tokens of the whole run, if known. The times are averages.
    `recovery_s` is from the loss of a node to the next step, `checkpoint_every_s` is
    between two checkpoints. After `node_back_s` a lost node, or its replacement, is
    available again.
    """

    wish: Wish = "time"
    max_usd_per_hour: float | None = None
    min_tokens_per_s: float | None = None
    tokens: float | None = None
    recovery_s: float = 60.0
    checkpoint_every_s: float = 600.0
    node_back_s: float = 600.0


def expected_goodput(
    predicted: Predicted, cluster: Cluster, objective: Objective
) -> float:
    """Return the share of the plan's speed that remains while nodes are preempted.

    Our derivation. A node is lost at its preemption rate while it is there. Until it is
    back, the other nodes do the work at their own speed. Each loss wastes the recovery
    time and, if no other node holds some layer, the work since the last checkpoint:
    half an interval on average. A moment is useful if no loss wastes it, which has the
    probability exp(-rate * wasted seconds).
    """
    plan, speed, wasted = predicted.plan, 0.0, 0.0
    for name, share in _compute_shares(plan, cluster).items():
        per_s = (cluster.node(name).preemptions_per_hour or 0.0) / 3600
        is_there = 1 / (1 + per_s * objective.node_back_s)
        undone_s = 0.0 if survives(plan, name) else objective.checkpoint_every_s / 2
        speed += share * is_there
        wasted += per_s * is_there * (objective.recovery_s + undone_s)
    return speed * math.exp(-wasted)


def _compute_shares(plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Return each node's share of the peak compute of the plan's devices."""
    tflops: dict[str, float] = {}
    for name, _ in sorted(plan.used_devices()):
        peak = device_spec(cluster.node(name)).peak_tflops
        tflops[name] = tflops.get(name, 0.0) + peak
    whole = math.fsum(tflops.values())
    return {name: own / whole for name, own in tflops.items()}


def survives(plan: Plan, node: str) -> bool:
    """Return whether the other nodes hold every layer, and so the state, without
    `node`."""
    ranges = [stage.layers for _, _, stage in plan.stages()]
    left = [stage.layers for _, _, stage in plan.stages() if stage.node != node]
    layers, held = ({n for r in some for n in range(*r)} for some in (ranges, left))
    return layers == held


def wants_fewer(objective: Objective, cluster: Cluster) -> bool:
    """Return whether slower plans on fewer devices may be better."""
    nodes_vanish = any(node.preemptions_per_hour for node in cluster.nodes)
    return (
        objective.wish == "cost"
        or (objective.wish == "goodput" and nodes_vanish)
        or objective.max_usd_per_hour is not None
    )


def within(predicted: Predicted, objective: Objective) -> bool:
    """Return whether the plan keeps to the objective's limits. If the wish is cost, it
    must also have a price."""
    usd, most = predicted.usd_per_hour, objective.max_usd_per_hour
    if most is not None and (usd is None or usd > most):
        return False
    if objective.wish == "cost" and usd is None:
        return False
    least = objective.min_tokens_per_s
    return least is None or predicted.tokens_per_s >= least


def score(predicted: Predicted, cluster: Cluster, objective: Objective) -> float:
    """Return the value to minimise; inf for cost without a price, or no goodput."""
    match objective.wish:
        case "time":
            return predicted.simulation.step_time_s
        case "cost":
            usd = predicted.usd_per_million_tokens
            return math.inf if usd is None else usd
        case "goodput":
            share = expected_goodput(predicted, cluster, objective)
            step_time_s = predicted.simulation.step_time_s
            return step_time_s / share if share else math.inf


def promise(
    predicted: Predicted, cluster: Cluster, objective: Objective, *, filled: float = 0.5
) -> float:
    """Return an estimate of `score` under a better schedule, which fills the share
    `filled` of the time that the busiest devices wait.

    Measured on 234 plans for five clusters under zero-bubble: the best of the five most
    promising plans is at most 1.1 % slower than the best of all. The best of the five
    fastest plans under h1f1b is up to 9.4 % slower.
    """
    step_s = predicted.simulation.step_time_s
    busy_s = predicted.simulation.busiest_s
    left = 1 - filled * (1 - busy_s / step_s) if step_s else 1.0
    return left * score(predicted, cluster, objective)
