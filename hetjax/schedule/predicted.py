# SPDX-License-Identifier: Apache-2.0
"""Predicts a plan's step by simulation, which is how all plans are compared.

Owns the figures that follow, such as tokens per second, the gap to the bound and the
price of tokens. Does not own the simulation (`simulation/simulator.py`), nor the
display and the files of predictions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hetjax.cluster.catalogue import backend_of
from hetjax.costs.certainty.memory import MemoryCertainty, memory_certainty
from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.plans.schedules import SCHEDULES
from hetjax.schedule.bound import LowerBound, prefix_bound_s
from hetjax.schedule.programs.action import UNTIED, Tied
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulated import is_plain, simulated
from hetjax.schedule.simulation.memory import (
    MemoryUse,
    capacity_bytes,
    check_memory,
    memory_uses,
)
from hetjax.schedule.simulation.memory_bound import surely_fits
from hetjax.schedule.simulation.result import Simulation
from hetjax.schedule.simulation.simulator import simulate


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A plan and one simulated step of it; `times_from` names the source of times.

    `usd_per_hour` is the price of its nodes, None if unknown.
    """

    plan: Plan
    costs: Costs
    simulation: Simulation
    tied: Tied
    times_from: str
    usd_per_hour: float | None = None

    @cached_property
    def memory(self) -> Mapping[str, MemoryUse]:
        """Each device's memory use at its peak, by "node/device"."""
        return memory_uses(lower(self.plan, self.tied), self.plan, self.costs)

    @cached_property
    def memory_certainty(self) -> Mapping[str, MemoryCertainty]:
        """How sure each device's memory use is; none without kinds of device."""
        found: dict[str, MemoryCertainty] = {}
        for (r, s), kind in self.costs.devices.items():
            stage = self.plan.replicas[r].stages[s]
            is_compiled = (r, s) in self.costs.compiled
            for device in (f"{stage.node}/{index}" for index in stage.devices):
                if device in found and is_compiled:
                    continue  # one estimated stage makes the sum uncertain
                use, has_bytes = self.memory[device], self.capacity_bytes[device]
                found[device] = memory_certainty(
                    use.total_bytes - use.workspace_bytes,
                    use.pass_bytes,
                    has_bytes if math.isfinite(has_bytes) else None,
                    None if is_compiled else backend_of(kind),
                    updating_bytes=use.updating_bytes,
                )
        return found

    @cached_property
    def tokens_per_s(self) -> float:
        return self.plan.tokens_per_step / self.simulation.step_time_s

    @cached_property
    def bound(self) -> LowerBound:
        """The lower bound on the step time, if one is known for the plan's schedule."""
        if SCHEDULES[self.plan.schedule].shares or self.plan.programs:
            return LowerBound(why="none is known for such a schedule")
        bound = LowerBound(step_s=prefix_bound_s(self.plan, self.costs))
        return bound.held_against(self.simulation.step_time_s, "this plan")

    @property
    def lower_bound_s(self) -> float | None:
        return self.bound.step_s

    @property
    def gap(self) -> float | None:
        """The excess of the step time over the bound, as a share of the bound."""
        return self.bound.gap(self.simulation.step_time_s)

    @cached_property
    def usd_per_million_tokens(self) -> float | None:
        """The price of training on a million tokens; None if unknown."""
        if self.usd_per_hour is None:
            return None
        return self.usd_per_hour / 3600 / self.tokens_per_s * 1e6

    @cached_property
    def capacity_bytes(self) -> Mapping[str, float]:
        return capacity_bytes(self.plan, self.costs)


def predict(
    plan: Plan,
    costs: Costs,
    tied: Tied = UNTIED,
    *,
    times_from: str = "",
    usd_per_hour: float | None = None,
) -> Predicted:
    """Simulate one step of the plan.

    Raises NoFeasiblePlan if a device has less memory than the programs need.
    """
    if is_plain(plan) and surely_fits(plan, costs):
        simulation = simulated(plan, costs, tied)
    else:
        programs = lower(plan, tied)
        check_memory(memory_uses(programs, plan, costs), plan, costs)
        simulation = simulate(programs, plan, costs)
    return Predicted(
        plan=plan,
        costs=costs,
        simulation=simulation,
        tied=tied,
        times_from=times_from,
        usd_per_hour=usd_per_hour,
    )
