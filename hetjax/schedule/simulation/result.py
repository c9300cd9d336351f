# SPDX-License-Identifier: Apache-2.0
"""Defines the result of a simulation: the times of actions, and the use of devices.

Owns the result as data. Does not own the simulation (`simulator.py`).
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
    """One action, with its start and end."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeUse:
    """The use of a step by one device; the three parts add up to the step time.

    `waiting_s` is time without work while the next message was in transfer, or while
    gradients were being summed; `idle_s` is all other time without work.
    """

    busy_s: float
    waiting_s: float
    idle_s: float


@dataclass(frozen=True)
class Simulation:
    """One step: `lanes` holds the actions by devices, `reductions` the REDUCEs.

    `messages` gives, by edge, when each microbatch's message was sent and arrived.
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
        """The computing time of the busiest devices."""
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
    """Return whether stages share devices, that is, whether they are interleaved."""
    lanes = lane_of(plan)
    return len(set(lanes.values())) < len(lanes)
