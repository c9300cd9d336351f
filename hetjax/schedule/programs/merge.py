# SPDX-License-Identifier: Apache-2.0
"""Projects the stages of one node onto one program.

Owns the order in which actions of different stages are interleaved: that of a run in
unit time (F = E = I = W = 1, B = 2, FB = 3, all else 0). In it, stages run
simultaneously and wait for their messages and collectives; stages on the same devices
take turns. Programs cut from one timeline of the whole plan cannot deadlock. Does not
own real times (the simulator).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.schedule.programs.action import (
    COLLECTIVE,
    Action,
    Group,
    Message,
    Op,
    Program,
    StageKey,
)

_DURATION = {Op.F: 1, Op.E: 1, Op.I: 1, Op.W: 1, Op.B: 2, Op.FB: 3}


def merge(
    orders: Mapping[StageKey, list[Action]],
    plan: Plan,
    lanes: Iterable[Sequence[Action]] = (),
) -> dict[str, Program]:
    """Return the program of each node, in the order of the unit-time run.

    `lanes` are compute orders that stages on the same devices keep together. Raises
    BadInput if the stages wait for each other.
    """
    node_of = {(r, s): stage.node for r, s, stage in plan.stages()}
    programs: dict[str, list[Action]] = {node: [] for node in node_of.values()}
    for action in _UnitTimeRun(orders, lanes).actions():
        programs[node_of[action.key]].append(action)
    return {node: tuple(program) for node, program in programs.items()}


@dataclass(slots=True)
class _Turns:
    """The turns on devices that several stages share."""

    order: Sequence[Action]
    done: int = 0
    free: int = 0
    parked: list[StageKey] = field(default_factory=list)


class _UnitTimeRun:
    """One run: at equal times the lowest (replica, stage) goes first."""

    def __init__(
        self,
        orders: Mapping[StageKey, list[Action]],
        lanes: Iterable[Sequence[Action]],
    ) -> None:
        self.orders = orders
        self.turns: dict[StageKey, _Turns] = {}
        for lane in lanes:
            stages = {action.key for action in lane}
            if len(stages) > 1:
                self.turns |= dict.fromkeys(stages, _Turns(lane))
        self.position = dict.fromkeys(orders, 0)
        self.ready = [(0, key) for key in orders]
        heapify(self.ready)
        self.arrival: dict[Message, int] = {}
        self.waiting: dict[Message, StageKey] = {}
        self.arrived: dict[Group | None, list[StageKey]] = defaultdict(list)
        self.holders = Counter(
            action.group
            for order in orders.values()
            for action in order
            if action.op in COLLECTIVE
        )

    def actions(self) -> Iterator[Action]:
        """Yield every action of every stage, in the order of starting times."""
        while self.ready:
            time, key = heappop(self.ready)
            yield from self._run_stage(time, key)
        blocked = [
            str(order[self.position[key]])
            for key, order in self.orders.items()
            if self.position[key] < len(order)
        ]
        if blocked:
            raise BadInput(
                got=f"stages that wait for each other at {', '.join(blocked)}",
                allowed="launch_ahead that does not rise along a pipeline",
                fix="lower launch_ahead where it rises from one stage to the next",
            )

    def _run_stage(self, time: int, key: StageKey) -> Iterator[Action]:
        """Yield the stage's actions until it has to wait or time passes."""
        order = self.orders[key]
        while self.position[key] < len(order):
            action = order[self.position[key]]
            if action.op in COLLECTIVE:
                yield from self._meet(time, key, action.group)
                return
            if action.op is Op.RECV and self._must_wait(time, key, action.message):
                return
            if action.op in _DURATION and self._must_queue(time, action):
                return
            yield action
            self.position[key] += 1
            if action.op is Op.SEND:
                self._deliver(time, action.message)
            if action.op in _DURATION:
                end = time + _DURATION[action.op]
                self._pass_turn(end, key)
                yield from self._follow_up(end, key)
                heappush(self.ready, (end, key))
                return

    def _must_wait(self, time: int, key: StageKey, message: Message) -> bool:
        """Return whether the message comes later; if so, schedule the stage then."""
        if message not in self.arrival:
            self.waiting[message] = key
            return True
        if self.arrival[message] > time:
            heappush(self.ready, (self.arrival[message], key))
            return True
        return False

    def _must_queue(self, time: int, action: Action) -> bool:
        """Return whether other stages come first; if so, schedule the stage later."""
        turns = self.turns.get(action.key)
        if turns is None:
            return False
        if turns.order[turns.done] != action:
            turns.parked.append(action.key)
            return True
        if turns.free > time:
            heappush(self.ready, (turns.free, action.key))
            return True
        return False

    def _pass_turn(self, end: int, key: StageKey) -> None:
        turns = self.turns.get(key)
        if turns is not None:
            turns.done, turns.free = turns.done + 1, end
            for parked in turns.parked:
                heappush(self.ready, (end, parked))
            turns.parked.clear()

    def _follow_up(self, end: int, key: StageKey) -> Iterator[Action]:
        """Yield the SENDs and FREEs of a compute action, which are issued with it.

        A SEND takes effect when its producer ends; a worker need not wait for that.
        """
        order = self.orders[key]
        while self.position[key] < len(order):
            action = order[self.position[key]]
            if action.op not in (Op.SEND, Op.FREE):
                return
            yield action
            self.position[key] += 1
            if action.op is Op.SEND:
                self._deliver(end, action.message)

    def _deliver(self, time: int, message: Message) -> None:
        self.arrival[message] = time
        if message in self.waiting:
            heappush(self.ready, (time, self.waiting.pop(message)))

    def _meet(self, time: int, key: StageKey, group: Group | None) -> Iterator[Action]:
        """Yield the collective's actions of all holders once the last has arrived."""
        self.arrived[group].append(key)
        if len(self.arrived[group]) < self.holders[group]:
            return
        for holder in sorted(self.arrived[group]):
            yield self.orders[holder][self.position[holder]]
            self.position[holder] += 1
            heappush(self.ready, (time, holder))
