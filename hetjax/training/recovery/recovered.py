# SPDX-License-Identifier: Apache-2.0
"""Defines what a recovery did and cost, and when a run gives up instead.

Owns these values, and the rule for a lost worker, a function of the losses so far. Does
not own the recovery itself (`driver.py`) nor its record (`training/recorder.py`).
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import RunFailed
from hetjax.plans.plan import Plan
from hetjax.plans.worker_map import node_of
from hetjax.runtime.control.recovery_decisions import Restored
from hetjax.runtime.rpc.worker_connections import WorkerLost


class RolledBack(Exception):
    """The state of later steps is lost: the run continues from `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to step {step}")
        self.step = step


def state_lost(saved: int | None) -> RunFailed:
    """Return the error for a run whose state is no longer complete anywhere."""
    newest = "none" if saved is None else f"step {saved}"
    return RunFailed(
        got="no whole copy of the state: the remaining workers, the disks and the "
        f"store together lack parts of it (last checkpoint: {newest})",
        allowed="each layer on a remaining worker, on a disk or in the store",
        fix="bring back a machine with its disk and run the same command again; copies "
        "on a second node (--checkpoint.copies 2) or a store (--checkpoint.cloud) "
        "prevent this",
    )


class GivenUp(Exception):
    """There is no time to recover: only the newest checkpoint remains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """What a change has cost: `seconds` by phase, `tier_s` by tier.

    `started` are the workers that had to be started. `plan` is None unless it has
    changed; if it has, it is for this `cluster`, which may be None otherwise.
    """

    reason: str
    plan: Plan | None
    cluster: Cluster | None
    started: frozenset[str]
    from_step: int
    step: int
    num_bytes: Mapping[str, int]
    tier_s: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rerouted:
    """From now on, after `step` steps, others train on the samples of `replicas`."""

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
    started: frozenset[str] = frozenset(),
) -> Recovered:
    """Return the cost of a change that led to this restored state."""
    return Recovered(
        reason=reason,
        plan=plan,
        cluster=cluster,
        started=started,
        from_step=from_step,
        step=restored.step,
        num_bytes=restored.num_bytes,
        tier_s=restored.seconds,
        seconds=clock.seconds,
    )


@dataclass(slots=True)
class Clock:
    """Seconds by phase; phases follow one another."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """Count the time since the last call as time of this phase."""
        now_s = time.perf_counter()
        spent_s = now_s - self._since_s
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent_s
        self._since_s = now_s


def difference(before: tuple[Cluster, Plan], now: tuple[Cluster, Plan]) -> str:
    """Return in words how the clusters differ; if equal, whether the plan has changed.

    Says which new nodes the plan leaves idle.

    >>> one, two = (Node(name=name, device="L4", count=1) for name in "ab")
    >>> before, now = (Cluster(name="c", nodes=nodes) for nodes in ((one,), (one, two)))
    >>> plan = Plan(model="m", seq_len=1, global_batch=1, replicas=())
    >>> difference((before, plan), (now, plan))
    'continuing; no faster plan was found that uses b'
    >>> difference((before, plan), (before, plan))
    'continuing with the same plan'
    """
    if before == now:
        return "continuing with the same plan"
    (cluster, plan), was = now, before[0]
    if cluster == was:
        return "moved to another plan"
    were, are = ({node.name for node in c.nodes} for c in (was, cluster))
    gone, new = were - are, (are - were) & plan.nodes
    words = [f"without {_listed(gone)}"] * bool(gone)
    words += [f"with {_listed(new)}"] * bool(new)
    idle = are - were - new
    if not (words or idle):
        return "links or devices changed"
    said = " ".join(["continuing", " and ".join(words)]).strip()
    return (
        f"{said}; no faster plan was found that uses {_listed(idle)}" if idle else said
    )


def _listed(names: Set[str]) -> str:
    return ", ".join(sorted(names))


def nodes_used(cluster: Cluster, plan: Plan) -> list[Node]:
    """Return the nodes of the cluster that the plan has stages on."""
    names = plan.nodes
    return [node for node in cluster.nodes if node.name in names]


# Losses without a committed step between them: in all, and of one node
MOST_LOSSES, MOST_OF_A_NODE = 5, 3
LossVerdict = Literal["start again", "leave the node", "give up"]


@dataclass(frozen=True, slots=True)
class Losses:
    """Workers lost since the last committed step, by node."""

    by_node: Mapping[str, int] = field(default_factory=dict)

    def with_one_of(self, node: str) -> "Losses":
        return Losses({**self.by_node, node: self.by_node.get(node, 0) + 1})

    def without(self, node: str) -> "Losses":
        """Return the losses without those of a node that has left."""
        return Losses({name: n for name, n in self.by_node.items() if name != node})


def with_loss(
    losses: Losses, lost: WorkerLost, recovers: bool, leave: Callable[[str], bool]
) -> Losses:
    """Return the losses with this one; raise it if the run gives up.

    If the node is lost again and again, go on without it, if `leave` allows that.
    """
    node = node_of(lost.worker)
    losses = losses.with_one_of(node)
    then = judge_loss(losses, node, recovers)
    if then == "give up":
        raise lost
    if then == "leave the node" and leave(node):
        warnings.warn(_left_out(node, lost.reason), stacklevel=3)
        return losses.without(node)
    return losses


def _left_out(node: str, reason: str) -> str:
    return (
        f"node {node} was lost {MOST_OF_A_NODE} times without a completed step: "
        f"continuing without it ({reason})"
    )


def judge_loss(losses: Losses, node: str, recovers: bool) -> LossVerdict:
    """Return what to do about the last of these losses, which was of this node."""
    if not recovers or sum(losses.by_node.values()) > MOST_LOSSES:
        return "give up"
    if losses.by_node[node] == MOST_OF_A_NODE:
        return "leave the node"
    return "start again"
