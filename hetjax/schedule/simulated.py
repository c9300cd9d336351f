# SPDX-License-Identifier: Apache-2.0
"""Simulates a plan with as little lowering as possible.

Owns the test whether the step time can be found without the programs of nodes. Does not
own the simulation (`simulation/simulator.py`) nor the programs (`programs/`).
"""

from itertools import pairwise

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.plans.schedules import SCHEDULES
from hetjax.schedule.programs.action import UNTIED, Tied
from hetjax.schedule.programs.lower import lower, timed_orders
from hetjax.schedule.simulation.result import Simulation, shares_devices
from hetjax.schedule.simulation.simulator import simulate


def simulated(plan: Plan, costs: Costs, tied: Tied = UNTIED) -> Simulation:
    """Simulate one step of the plan. Raises BadInput for plans that `lower` refuses."""
    if is_plain(plan):
        return simulate(timed_orders(plan, tied), plan, costs)
    return simulate(lower(plan, tied), plan, costs)


def is_plain(plan: Plan) -> bool:
    """Return whether no stages share devices, all run 1F1B or GPipe, and launch-aheads
    do not rise: such stages never wait for each other in a ring."""
    return (
        not plan.programs
        and plan.schedule in SCHEDULES
        and SCHEDULES[plan.schedule].order in ("1f1b", "gpipe")
        and not shares_devices(plan)
        and all(
            one.launch_ahead >= other.launch_ahead
            for replica in plan.replicas
            for one, other in pairwise(replica.stages)
        )
    )
