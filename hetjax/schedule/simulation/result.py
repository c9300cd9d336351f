# SPDX-License-Identifier: Apache-2.0
"""What a simulation says: when every action ran, and what devices did with the step.

Owns the result as data. Does not own how it comes about (`simulator.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hetjax.plans.plan import Plan
from hetjax.schedule.programs.action import Action, Op, StageKey

Lane = tuple[str, tuple[int, ...]]  # (node, devices)
Edge = tuple[StageKey, StageKey]  # (from, to)


class Timed(NamedTuple):
    """One action and when it ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeUse:
    """What one device does with the step; the three add up to it.

    `waiting_s` is idle time in which the next message was on its way, or gradients
    were being summed; `idle_s` has no such excuse.
    """

    busy_s: float
    waiting_s: float
    idle_s: float


@dataclass(frozen=True)
class Simulation:
    """One step: `lanes` holds what was computed where, `reductions` the REDUCEs.

    `messages` gives, by edge, when each microbatch's was sent and when it arrived.
    """

    step_time_s: float
    lanes: Mapping[Lane, tuple[Timed, ...]]
    shares: Mapping[Lane, TimeUse]
    reductions: tuple[Timed, ...]
    messages: Mapping[Edge, tuple[Mapping[int, float], Mapping[int, float]]]

    @cached_property
    def transfers(self) -> tuple[Timed, ...]:
        """SENDs, from leaving their stage to their arrival, then the REDUCEs."""
        sends = [
            Timed(
                Action(Op.SEND, r, s, m, "y" if to > s else "dx", to),
                start_s,
                arrival_s[m],
            )
            for ((r, s), (_, to)), (sent_s, arrival_s) in self.messages.items()
            for m, start_s in sent_s.items()
        ]
        return (*sends, *self.reductions)

    @property
    def busiest_s(self) -> float:
        """For how long the busiest devices compute."""
        return max(share.busy_s for share in self.shares.values())

    @cached_property
    def bubble(self) -> float:
        """The share of device time that is not busy, over all devices of the plan."""
        total = sum(len(lane[1]) for lane in self.lanes) * self.step_time_s
        busy = sum(len(lane[1]) * s.busy_s for lane, s in self.shares.items())
        return 1 - busy / total if total else 0.0


def lane_of(plan: Plan) -> dict[StageKey, Lane]:
    """Return the devices of every stage; interleaved stages share theirs."""
    return {(r, s): (stage.node, stage.devices) for r, s, stage in plan.stages()}


def shares_devices(plan: Plan) -> bool:
    """Say whether some stages run on the same devices: whether they are interleaved."""
    lanes = lane_of(plan)
    return len(set(lanes.values())) < len(lanes)
