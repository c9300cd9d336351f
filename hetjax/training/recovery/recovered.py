# SPDX-License-Identifier: Apache-2.0
"""What a recovery did and cost, and when there is to be none.

Owns these values, and the rule what to do about a lost worker, a function of the losses
so far. Does not own recovering (`driver.py`) nor recording it (`training/recorder.py`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import RunFailed
from hetjax.plans.plan import Plan
from hetjax.runtime.control.recovery_decisions import Restored


class RolledBack(Exception):
    """State of later steps is lost: the run goes on from `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to step {step}")
        self.step = step


def state_lost(saved: int | None) -> RunFailed:
    """A run of whose state too little is left anywhere."""
    newest = "none" if saved is None else f"step {saved}"
    return RunFailed(
        got="no whole copy of the state: workers that are left, disks and the store do "
        f"not have all of it together (the last checkpoint was of {newest})",
        allowed="each layer on a worker that is left, a disk or in the store",
        fix="bring back a machine with its disk and run the same command again; copies "
        "on a second node (--checkpoint.copies 2) or a store (--checkpoint.cloud) keep "
        "a run from this",
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rerouted:
    """Others have the samples of these `replicas` from now on, after `step` steps."""

    reason: str
    replicas: Sequence[int]
    from_step: int
    step: int
    seconds: Mapping[str, float]


def recovered(
    reason: str,
    from_step: int,
    restored: Restored,
    clock: "Clock",
    cluster: Cluster,
    plan: Plan | None = None,
    gone: frozenset[str] = frozenset(),
) -> Recovered:
    """What a change has cost that led to this state."""
    return Recovered(
        reason=reason,
        plan=plan,
        cluster=cluster,
        gone=gone,
        from_step=from_step,
        step=restored.step,
        num_bytes=restored.num_bytes,
        tier_s=restored.seconds,
        seconds=clock.seconds,
    )


@dataclass(slots=True)
class Clock:
    """Seconds by phase, one after the other."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """Count the time since the last call to this phase."""
        now_s = time.perf_counter()
        spent_s = now_s - self._since_s
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent_s
        self._since_s = now_s


def difference(before: Cluster, now: Cluster) -> str:
    """What is other about the nodes, in words; nothing, where a run moves by itself."""
    if before == now:
        return "moved to another plan"
    were, are = ({node.name for node in c.nodes} for c in (before, now))
    gone, new = ", ".join(sorted(were - are)), ", ".join(sorted(are - were))
    words = [f"without {gone}"] * bool(gone) + [f"with {new}"] * bool(new)
    return "going on " + " and ".join(words) if words else "other links or devices"


def nodes_used(cluster: Cluster, plan: Plan) -> list[Node]:
    """The nodes of the cluster that the plan has stages on."""
    names = plan.nodes
    return [node for node in cluster.nodes if node.name in names]


# Losses without a committed step between them: in all, and of one node
MOST_LOSSES, MOST_OF_A_NODE = 5, 3
Verdict = Literal["start again", "leave the node", "give up"]


@dataclass(frozen=True, slots=True)
class Losses:
    """Workers lost since the last committed step, by node."""

    by_node: Mapping[str, int] = field(default_factory=dict)

    def with_one_of(self, node: str) -> "Losses":
        return Losses({**self.by_node, node: self.by_node.get(node, 0) + 1})

    def without(self, node: str) -> "Losses":
        """The node has left: what it lost counts no more."""
        return Losses({name: n for name, n in self.by_node.items() if name != node})


def left_out(node: str, reason: str) -> str:
    """What is said of a node that is lost again and again."""
    return (
        f"node {node} was lost {MOST_OF_A_NODE} times without a step between: "
        f"going on without it ({reason})"
    )


def verdict(losses: Losses, node: str, recovers: bool) -> Verdict:
    """What follows from the last of these losses, which was of this node."""
    if not recovers or sum(losses.by_node.values()) > MOST_LOSSES:
        return "give up"
    if losses.by_node[node] == MOST_OF_A_NODE:
        return "leave the node"
    return "start again"
