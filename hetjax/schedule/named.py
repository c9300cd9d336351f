# SPDX-License-Identifier: Apache-2.0
"""A plan under another schedule, by the schedule's name.

Owns the names, and the launch-aheads that come with each: defaults, or fitted to the
plan's costs within memory. Does not own how they are fitted (`launch_ahead.py`,
`search.py`) nor any order of actions (`programs/generate.py`).
"""

from dataclasses import replace

from hetjax.cluster.user_files import did_you_mean
from hetjax.costs.costs import Costs
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Replica
from hetjax.plans.schedules import FITTED, SCHEDULES, default_launch_ahead
from hetjax.schedule.launch_ahead import fitted, harp_delta, launch_limits, with_rule
from hetjax.schedule.programs.action import Tied
from hetjax.schedule.search import searched

NAMES = (*SCHEDULES, *FITTED)


def may_split(name: str) -> bool:
    """Say whether backwards may be split under the schedule of that name."""
    return name == "searched" or (name in SCHEDULES and SCHEDULES[name].splits)


def with_schedule(plan: Plan, name: str, costs: Costs, tied: Tied) -> Plan:
    """Return the plan under the schedule of that name, its own programs left out.

    Besides the schedules of plans: "harp" is h1f1b by HARP's thresholds, "searched" the
    fastest that the search finds. BadInput for another name.
    """
    limits = launch_limits(plan, costs)
    match name:
        case "h1f1b":
            return fitted(plan, costs, limits, tied)
        case "harp":
            return with_rule(plan, costs, harp_delta, limits)
        case "searched":
            split = launch_limits(plan, costs, split=True)
            return searched(plan, costs, limits, split_limits=split, tied=tied)
    if name not in SCHEDULES:
        raise BadInput(
            got=f"schedule {name!r}",
            allowed=f"one of {', '.join(NAMES)}",
            fix=did_you_mean(name, NAMES),
        )
    replicas = tuple(_by_default(replica, name) for replica in plan.replicas)
    return replace(plan, schedule=name, replicas=replicas, programs={})


def _by_default(replica: Replica, schedule: str) -> Replica:
    stages = tuple(
        replace(
            stage,
            launch_ahead=default_launch_ahead(
                schedule,
                num_stages=len(replica.stages),
                stage=s,
                num_microbatches=replica.num_microbatches,
            ),
        )
        for s, stage in enumerate(replica.stages)
    )
    return replace(replica, stages=stages)
