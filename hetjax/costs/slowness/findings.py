# SPDX-License-Identifier: Apache-2.0
"""Describes slowdowns and recoveries: in numbers, and in one line for people.

Owns the words. Does not own the detection (`detector.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hetjax.costs.slowness.step_times import Ends, Lane, Lanes, Part
from hetjax.plans.plan import StageKey

# `stage` is a stage or one kind of its actions, `batches` the input of a replica, `run`
# all devices: their batches, or something that they share
What = Literal["node", "device", "stage", "batches", "link", "run"]
_WHOLE = 0.8  # share of a lane's time from which the lane is slow, not just an action


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The slow part: `lanes` of `node`, or a link's `ends`."""

    what: What
    name: str
    lanes: frozenset[StageKey] = frozenset()
    node: str | None = None
    ends: Ends | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """A subject that, since step `since`, takes `factor` times as long as before or as
    its peers.

    `step` is when that became clear, `error` the standard error of the factor's
    logarithm. `is_over`: the subject has recovered; `factor` is then the former one.
    """

    subject: Subject
    step: int
    since: int
    factor: float
    evidence: str
    is_over: bool = False
    error: float = 0.0

    def values(self) -> dict[str, Any]:
        """Return the values for `events.jsonl`."""
        return {
            "what": self.subject.what,
            "who": self.subject.name,
            "factor": round(self.factor, 3),
            "since": self.since,
            "evidence": self.evidence,
        }

    def __str__(self) -> str:
        name, times = self.subject.name, f"{self.factor:.1f}x"
        if self.is_over:
            since = f"since step {self.since}, {times} until then"
            return f"recovered: {name} as before {since}"
        return f"slow: {name} {times} since step {self.since}, {self.evidence}"


def link_subject(ends: Ends) -> Subject:
    """Return the subject for the link from one worker to another."""
    return Subject(what="link", name=f"link {ends[0]} > {ends[1]}", ends=ends)


def run_subject(lanes: Lanes) -> Subject:
    """Return the subject for all devices."""
    every = frozenset(lanes.by_key)
    if len({lane.node for lane in lanes.lanes}) == 1:
        return replica_subject(lanes, every, "all devices")
    return Subject(what="run", name="all devices", lanes=every)


def replica_subject(lanes: Lanes, keys: frozenset[StageKey], name: str) -> Subject:
    """Return a node as subject if these are all its stages, else their batches.

    A slow node cannot be told from slow batches if nothing else works on the same
    batches; but slowness of batches does not last.
    """
    nodes = {lanes.by_key[key].node for key in keys}
    if len(nodes) == 1 and lanes.on(node := nodes.pop()) == keys:
        return Subject(what="node", name=node, lanes=keys, node=node)
    what: What = "run" if keys == frozenset(lanes.by_key) else "batches"
    return Subject(what=what, name=name, lanes=keys)


def subjects_of(
    slow: Sequence[Part], share_of: dict[Part, float], lanes: Lanes
) -> dict[Subject, list[Part]]:
    """Return the fewest subjects that cover these parts, each with its parts.

    A subject is a node if all of its stages are slow; else a device if all of its
    stages are; else a stage, or one kind of its actions. `share_of` is each part's
    share of its lane's time.
    """
    by_lane: dict[StageKey, list[Part]] = {}
    for part in slow:
        by_lane.setdefault(part[:2], []).append(part)
    whole = {
        key
        for key, parts in by_lane.items()
        if sum(share_of[part] for part in parts) >= _WHOLE
    }
    found: dict[Subject, list[Part]] = {}
    for key, parts in by_lane.items():
        subject = (
            _place_of(lanes.by_key[key], whole, lanes)
            if key in whole
            else _kind_of(key, parts)
        )
        found.setdefault(subject, []).extend(parts)
    return found


def _place_of(lane: Lane, slow: set[StageKey], lanes: Lanes) -> Subject:
    on_node = lanes.on(lane.node)
    if on_node <= slow:
        return Subject(what="node", name=lane.node, lanes=on_node, node=lane.node)
    on_devices = frozenset(
        other.key
        for other in lanes.lanes
        if other.node == lane.node and {*other.devices} & {*lane.devices}
    )
    if on_devices <= slow:
        numbers = ",".join(map(str, lane.devices))
        return Subject(
            what="device",
            name=f"{lane.node}/{numbers}",
            lanes=on_devices,
            node=lane.node,
        )
    return Subject(what="stage", name=_stage(lane.key), lanes=frozenset({lane.key}))


def _kind_of(key: StageKey, parts: Sequence[Part]) -> Subject:
    kinds = "+".join(kind for _, _, kind in parts)
    name = f"{kinds} of {_stage(key)}"
    return Subject(what="stage", name=name, lanes=frozenset({key}))


def _stage(key: StageKey) -> str:
    return f"r{key[0]}.s{key[1]}"
