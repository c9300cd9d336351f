# SPDX-License-Identifier: Apache-2.0
"""What is wished of a plan: a short step, cheap tokens, or progress despite losses.

Owns the wishes, their limits and how plans compare by them. Does not own how plans are
found (`find.py`).
"""

import math
from dataclasses import dataclass
from typing import Literal

from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

Wish = Literal["time", "cost", "goodput"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What to plan for, and what a plan may not exceed.

    Seconds of recovery are from a lost node to the next step, those of a checkpoint
    between two of them: half of that is lost with a node, on average.
    """

    wish: Wish = "time"
    max_usd_per_hour: float | None = None
    min_tokens_per_s: float | None = None
    recovery_s: float = 60.0
    checkpoint_every_s: float = 600.0


def goodput(predicted: Predicted, cluster: Cluster, objective: Objective) -> float:
    """Return the share of time that makes progress while nodes are preempted.

    Losses add up over the nodes in use, since one of them stops the step: 1 - hazard *
    (recovery + checkpoint interval / 2), at least 0 (our derivation).
    """
    lost_s = objective.recovery_s + objective.checkpoint_every_s / 2
    return max(0.0, 1 - preemptions_per_hour(predicted.plan, cluster) / 3600 * lost_s)


def preemptions_per_hour(plan: Plan, cluster: Cluster) -> float:
    """Return how often any node that the plan uses vanishes, on average."""
    used = {stage.node for _, _, stage in plan.stages()}
    rates = [n.preemptions_per_hour for n in cluster.nodes if n.name in used]
    return math.fsum(rate or 0.0 for rate in rates)


def wants_fewer(objective: Objective) -> bool:
    """Say whether slower plans on fewer devices may be better."""
    return objective.wish != "time" or objective.max_usd_per_hour is not None


def within(predicted: Predicted, objective: Objective) -> bool:
    """Say whether the plan keeps to the objective's limits."""
    usd, most = predicted.usd_per_hour, objective.max_usd_per_hour
    if most is not None and (usd is None or usd > most):
        return False
    least = objective.min_tokens_per_s
    return least is None or predicted.tokens_per_s >= least


def score(predicted: Predicted, cluster: Cluster, objective: Objective) -> float:
    """Return what is to be as small as can be; inf where nobody tells a price."""
    match objective.wish:
        case "time":
            return predicted.simulation.step_time_s
        case "cost":
            usd = predicted.usd_per_million_tokens
            return math.inf if usd is None else usd
        case "goodput":
            share = goodput(predicted, cluster, objective)
            step_time_s = predicted.simulation.step_time_s
            return step_time_s / share if share else math.inf
