# SPDX-License-Identifier: Apache-2.0
"""Defines the times of a step's parts, and the lanes that run them.

Owns the vocabulary of the watched objects: lanes (a stage on its devices), their parts
(a kind of action), links, and which lanes have equal work. Does not own the measuring
(`runtime/execution/step_clock.py`) nor the use of the times (`detector.py`).
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hetjax.plans.plan import Plan, StageKey

Part = tuple[int, int, str]  # replica, stage, kind of action: (0, 1, "FB")
Ends = tuple[str, str]  # a link's sending and receiving worker


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Working seconds of a step's devices, without waiting.

    `parts` are sums over the microbatches of a step, with pauses of the host capped;
    `links` are seconds per byte.
    """

    step: int
    parts: Mapping[Part, float]
    links: Mapping[Ends, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A stage and its place; lanes with the same `work` should take equally long.

    `work` is None if no other stage has equal work.
    """

    key: StageKey
    node: str
    devices: tuple[int, ...]
    work: Hashable = None


@dataclass(frozen=True)
class Lanes:
    """All lanes of a plan."""

    lanes: tuple[Lane, ...]

    @cached_property
    def by_key(self) -> dict[StageKey, Lane]:
        return {lane.key: lane for lane in self.lanes}

    def on(self, node: str) -> frozenset[StageKey]:
        """Return the lanes of a node."""
        return frozenset(lane.key for lane in self.lanes if lane.node == node)

    def of_replica(self, replica: int) -> frozenset[StageKey]:
        """Return the lanes of a replica."""
        return frozenset(lane.key for lane in self.lanes if lane.key[0] == replica)


def lanes_of(plan: Plan, kinds: Mapping[str, Hashable]) -> Lanes:
    """Return the lanes of a plan; `kinds` are the kinds of device by node.

    Stages have equal work if they have equally many blocks, with neither embedding nor
    head, or the same layers; and the same kind and mesh of devices, the same settings
    and the same microbatches.
    """
    return Lanes(
        tuple(
            Lane(
                key=(r, s),
                node=stage.node,
                devices=stage.devices,
                work=_work(plan, r, s, kinds[stage.node]),
            )
            for r, s, stage in plan.stages()
        )
    )


def _work(plan: Plan, r: int, s: int, kind: Hashable) -> Hashable:
    replica, stage = plan.replicas[r], plan.replicas[r].stages[s]
    first, end = stage.layers
    is_inner = first > 0 and end < plan.num_layers
    return (
        kind,
        end - first if is_inner else (first, end),
        stage.mesh,
        stage.remat,
        stage.precision,
        stage.attention,
        stage.offload,
        replica.num_microbatches,
        replica.microbatch_size,
    )
