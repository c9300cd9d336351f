# SPDX-License-Identifier: Apache-2.0
"""What is told of a recovery: what it cost, or how it ended otherwise.

Owns the values alone. Does not own recovering (`driver.py`) nor who is told of it.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan


class RolledBack(Exception):
    """State of later steps is lost: the run goes on from `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to step {step}")
        self.step = step


class GivenUp(Exception):
    """There is no time to recover: what is left is the newest checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """What a change has cost; `seconds` by what they went into, `tier_s` by tier.

    `gone` are the workers that were started anew. `plan` is there if it is another one
    than before, for this `cluster`, which may be left out otherwise.
    """

    reason: str
    plan: Plan | None
    cluster: Cluster | None
    gone: frozenset[str]
    from_step: int
    step: int
    num_bytes: Mapping[str, int]
    tier_s: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(slots=True)
class Clock:
    """Seconds by phase, one after the other."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now_s = time.perf_counter()
        spent_s = now_s - self._since_s
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent_s
        self._since_s = now_s


def difference(before: Cluster, now: Cluster) -> str:
    """What is other about the nodes, in words."""
    were, are = ({node.name for node in c.nodes} for c in (before, now))
    gone, new = ", ".join(sorted(were - are)), ", ".join(sorted(are - were))
    words = [f"without {gone}"] * bool(gone) + [f"with {new}"] * bool(new)
    return "going on " + " and ".join(words) if words else "other links or devices"
