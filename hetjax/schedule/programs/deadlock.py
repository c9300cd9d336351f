# SPDX-License-Identifier: Apache-2.0
"""Checks that the programs of all workers together cannot deadlock.

Owns the total order of collectives and the symbolic run of all programs. In that run
each worker is one thread that executes its program and may block:

* RECV blocks until its message was sent. REDUCE and NORM block at the worker's last
  holder of the group until every holder has arrived (a worker contributes its other
  holders' parts earlier). NORM also blocks until its stage's groups are reduced, UPDATE
  until NORM is complete.
* SEND does not block while fewer messages wait on its edge than the stage upstream
  may have in flight (two in an evaluation); at that bound it blocks until one is
  received. Each waiting message belongs to a microbatch in flight, so this costs no
  memory beyond the model's. A fixed smaller bound is not enough: if launch-ahead
  falls by d along an edge, (d + 1) // 2 messages wait (GPipe: half of all messages).

The runtime blocks less (it posts a RECV and waits for it at the first use), so programs
that pass here cannot deadlock there. Under plain rendezvous, a SEND blocks until its
RECV is reached, and correct 1F1B deadlocks: one stage sends an activation while the
next sends it a gradient. `rendezvous=True` is the strictest run that 1F1B passes with
one stage per node: it lets two workers exchange such a pair of SENDs, as one batched
send and receive. With several stages per node rings of three SENDs can occur, so
`rendezvous` is optional. Does not own rules per stage or per edge (`check.py`).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.schedule.programs.action import (
    COLLECTIVE,
    Action,
    Group,
    Message,
    Op,
    Programs,
    StageKey,
)

_Groups = Mapping[Group, tuple[StageKey, ...]]
_Edge = tuple[int, int, int]  # (replica, from stage, to stage)
_Event = Message | _Edge | Group | None  # that a worker may wait for; None is NORM


def check_total_order(programs: Programs) -> None:
    """Raise BadInput unless every program keeps one common order of collectives."""
    before: dict[Group | None, set[Group | None]] = defaultdict(set)
    reason: dict[tuple[Group | None, Group | None], str] = {}
    for node, program in programs.items():
        met = [action for action in program if action.op in COLLECTIVE]
        # A worker blocks in a collective only at the last of its holders.
        last = {action.group: index for index, action in enumerate(met)}
        ordered = [met[index] for index in sorted(last.values())]
        for one, other in pairwise(ordered):
            before[other.group].add(one.group)
            reason[one.group, other.group] = f"node {node!r} has {one} before {other}"
    try:
        TopologicalSorter(before).prepare()
    except CycleError as cycle:
        raise BadInput(
            got="; ".join(reason[pair] for pair in pairwise(cycle.args[1])),
            allowed="one order of REDUCEs and NORM that every program keeps",
            fix="put the REDUCEs of higher layers first, then tied parameters, then "
            "NORM, in every program",
        ) from None


def check_deadlock(
    programs: Programs,
    plan: Plan,
    groups: _Groups,
    limits: Mapping[StageKey, int],
    *,
    rendezvous: bool = False,
) -> None:
    """Raise BadInput, with each blocked worker's action, unless all programs end.

    `limits` bounds the messages that wait on the edges to and from the next stage.
    """
    run = _Run(programs, plan, groups, limits, rendezvous=rendezvous)
    run.to_the_end()
    blocked = [
        f"node {node!r} at action {run.position[node] + 1} {run.head(node)}"
        for node in programs
        if run.position[node] < len(programs[node])
    ]
    if blocked:
        raise BadInput(
            got=f"deadlock: {', '.join(blocked)}",
            allowed="programs that all finish"
            + (", with SENDs that block until their RECV" if rendezvous else ""),
            fix="move the action that the first of these waits for up in its node's "
            "program, or leave that program out of the plan to have it generated",
        )


class _Run:
    """The symbolic run; its outcome does not depend on the order of workers."""

    def __init__(
        self,
        programs: Programs,
        plan: Plan,
        groups: _Groups,
        limits: Mapping[StageKey, int],
        *,
        rendezvous: bool,
    ) -> None:
        self.programs = programs
        self.rendezvous = rendezvous
        self.position = dict.fromkeys(programs, 0)
        self.runnable = deque(programs)
        self.waiting: dict[_Event, list[str]] = defaultdict(list)
        self.node_of = {(r, s): stage.node for r, s, stage in plan.stages()}
        self.room: dict[_Edge, int] = {}
        for (r, s), limit in limits.items():
            self.room[r, s, s + 1] = self.room[r, s + 1, s] = limit
        self.asleep: set[str] = set()
        self.sent: set[Message] = set()
        self.entered: set[tuple[StageKey, Group | None]] = set()
        self.groups_of: dict[StageKey, list[Group]] = defaultdict(list)
        for group, holders in groups.items():
            for key in holders:
                self.groups_of[key].append(group)
        met: Mapping[Group | None, tuple[StageKey, ...]]
        met = {**groups, None: tuple(self.node_of)}
        # Holders that have not arrived: in total, and per worker.
        self.missing = {group: len(holders) for group, holders in met.items()}
        self.missing_here = {
            group: Counter(self.node_of[key] for key in holders)
            for group, holders in met.items()
        }

    def head(self, node: str) -> Action:
        return self.programs[node][self.position[node]]

    def to_the_end(self) -> None:
        """Run every worker until it is done or blocked forever."""
        while self.runnable:
            node = self.runnable.popleft()
            program = self.programs[node]
            while self.position[node] < len(program) and self._step(node):
                self.position[node] += 1

    def _step(self, node: str) -> bool:
        """Run the worker's next action, or let the worker wait for an event."""
        action = self.head(node)
        if action.op is Op.SEND:
            message = action.message
            if self.rendezvous:
                return self._offer(node, message)
            return self._send(node, message)
        if action.op is Op.RECV:
            return self._receive(node, action.message)
        if action.op in COLLECTIVE:
            return self._enter(node, action)
        if action.op is Op.UPDATE and self.missing[None]:
            return self._wait(node, None)
        return True

    def _wait(self, node: str, event: _Event) -> bool:
        self.waiting[event].append(node)
        self.asleep.add(node)
        return False

    def _wake(self, event: _Event) -> None:
        """Let the workers that wait for the event retry their actions."""
        nodes = self.waiting.pop(event, ())
        self.runnable.extend(nodes)
        self.asleep.difference_update(nodes)

    def _send(self, node: str, message: Message) -> bool:
        edge = message[:3]
        if self.room[edge] == 0:
            return self._wait(node, edge)
        self.room[edge] -= 1
        self._deliver(message)
        return True

    def _offer(self, node: str, message: Message) -> bool:
        """Send by rendezvous: with the matching RECV, or against an opposite SEND."""
        if message in self.sent:
            return True
        peer = self.node_of[message[0], message[2]]
        other = self.head(peer) if peer in self.asleep else None
        if other is not None and other.op is Op.SEND:
            theirs = other.message
            if self.node_of[theirs[0], theirs[2]] == node:
                self._deliver(theirs)
                self._deliver(message)
                return True
        met = other is not None and other.op is Op.RECV and other.message == message
        # Within one worker a SEND is a local move.
        if not met and peer != node:
            return self._wait(node, message)
        self._deliver(message)
        return True

    def _deliver(self, message: Message) -> None:
        self.sent.add(message)
        self._wake(message)

    def _receive(self, node: str, message: Message) -> bool:
        sender = self.node_of[message[0], message[1]]
        if self.rendezvous and sender in self.asleep:
            offer = self.head(sender)
            if offer.op is Op.SEND and offer.message == message:
                self._deliver(message)
        if message not in self.sent:
            return self._wait(node, message)
        self.room[message[:3]] += 1
        self._wake(message[:3])
        return True

    def _enter(self, node: str, action: Action) -> bool:
        """Enter a collective; block in it at the worker's last holder."""
        group = action.group
        if action.op is Op.NORM:
            for needed in self.groups_of[action.key]:
                if self.missing[needed]:
                    return self._wait(node, needed)
        if (action.key, group) not in self.entered:
            self.entered.add((action.key, group))
            self.missing[group] -= 1
            self.missing_here[group][node] -= 1
            if not self.missing[group]:
                self._wake(group)
        if self.missing[group] and not self.missing_here[group][node]:
            return self._wait(node, group)
        return True
