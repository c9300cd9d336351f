# SPDX-License-Identifier: Apache-2.0
"""What was found slow, or is as before again: in numbers, and in one line for people.

Owns the words. Does not own how it is found (`detector.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hetjax.costs.slowness.step_times import Ends, Lane, Lanes, Part
from hetjax.plans.plan import StageKey

# `stage` also for one kind of action of it, `batches` for what a replica is fed with,
# `run` for all that works: its batches, or what all devices share
What = Literal["node", "device", "stage", "batches", "link", "run"]
_WHOLE = 0.8  # share of a lane's time that makes the lane slow, and not an action


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is slow: `lanes` of `node`, or a link's `ends`."""

    what: What
    name: str
    lanes: frozenset[StageKey] = frozenset()
    node: str | None = None
    ends: Ends | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """From step `since` on it takes `factor` times as long as before, or than peers.

    `step` is when that was clear, `error` the standard error of the factor's logarithm.
    `is_over`: it is as before again, `factor` then is what it was.
    """

    subject: Subject
    step: int
    since: int
    factor: float
    evidence: str
    is_over: bool = False
    error: float = 0.0

    def values(self) -> dict[str, Any]:
        """Return the figures as they stand in `events.jsonl`."""
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
            return f"recovered: {name} as before since step {self.since}, {times} until"
        return f"slow: {name} {times} since step {self.since}, {self.evidence}"


def link_subject(ends: Ends) -> Subject:
    """Return the link from one worker to another."""
    return Subject(what="link", name=f"link {ends[0]} > {ends[1]}", ends=ends)


def run_subject(lanes: Lanes) -> Subject:
    """Return all that works."""
    every = frozenset(lanes.by_key)
    if len({lane.node for lane in lanes.lanes}) == 1:
        return replica_subject(lanes, every, "all devices")
    return Subject(what="run", name="all devices", lanes=every)


def replica_subject(lanes: Lanes, keys: frozenset[StageKey], name: str) -> Subject:
    """Return a node if these stages are all that it has, else what they are fed with.

    Whether a node or its batches are slow cannot be known where nothing else works on
    the same batches; of the two that does not last which is of batches.
    """
    nodes = {lanes.by_key[key].node for key in keys}
    if len(nodes) == 1 and lanes.on(node := nodes.pop()) == keys:
        return Subject(what="node", name=node, lanes=keys, node=node)
    what: What = "run" if keys == frozenset(lanes.by_key) else "batches"
    return Subject(what=what, name=name, lanes=keys)


def subjects_of(
    slow: Sequence[Part], share_of: dict[Part, float], lanes: Lanes
) -> dict[Subject, list[Part]]:
    """Return the fewest names for these parts, and which are whose.

    A node, if all of its stages are slow; else a device, with all of its stages; else a
    stage, or one kind of action of it. `share_of` is each part's of its lane's time.
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
