# SPDX-License-Identifier: Apache-2.0
"""Simulates a plan's programs: when and on which devices every action would run.

Owns the clock over devices. A lane (the devices of one stage or, interleaved, of
several) runs the compute actions of its stages one at a time, in program order, each as
soon as its message has arrived. SENDs leave when their producer ends, and transfers
overlap with computing (`traffic.py`). A REDUCE starts when its last holder has arrived,
and overlaps, too. NORM waits for the stage's sums, UPDATE for all NORMs. A worker's
enqueuing costs nothing here.

Does not own times and bytes (`costs/`), memory (`memory.py`) nor the programs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hetjax.costs.costs import Costs, Route, StageTimes
from hetjax.plans.plan import Plan
from hetjax.schedule.programs.action import (
    COLLECTIVE,
    COMPUTE,
    Action,
    Group,
    Op,
    Program,
    StageKey,
    dataflow,
)
from hetjax.schedule.simulation.result import (
    Edge,
    Lane,
    Simulation,
    Timed,
    TimeUse,
    lane_of,
)
from hetjax.schedule.simulation.traffic import Traffic

_NEVER = float("inf")
NORM = None  # the name of the only collective without a group


# programs by node, or the timed orders of stages (`programs/lower.py`)
_Programs = Mapping[str, Program] | Mapping[StageKey, list[Action]]


def simulate(programs: _Programs, plan: Plan, costs: Costs) -> Simulation:
    """Return the times of all events in one training step of a checked plan."""
    return _Run(programs, plan, costs).result()


def duration_s(times: StageTimes, op: Op) -> float:
    """Return how long a compute action or an UPDATE takes."""
    seconds = {
        Op.F: times.forward_s,
        Op.B: times.backward_s,
        Op.FB: times.fused_s,
        Op.I: times.input_gradient_s,
        Op.W: times.weight_gradient_s,
        Op.E: times.forward_s,
        Op.UPDATE: times.update_s,
    }[op]
    assert seconds is not None, "costs of a plan that cuts backwards need `halves`"
    return seconds


@dataclass(slots=True)
class _Channel:
    """One direction between neighbours: arrivals and waiting lanes, by microbatch."""

    number: int
    size: float
    sent_s: dict[int, float] = field(default_factory=dict)
    arrival_s: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, "_LaneRun"] = field(default_factory=dict)


# (seconds, channel to wait for, channel to send on); the seconds of REDUCE, NORM and
# UPDATE are _NEVER: `_collective` runs them
_Way = tuple[float, _Channel | None, _Channel | None]
_Step = tuple[Action, float, _Channel | None, _Channel | None]
_Message = tuple[_Channel, int]  # with its microbatch


class _Meetings:
    """The collectives of one step; the lanes in `waiting` go on when one is done."""

    def __init__(self, programs: _Programs) -> None:
        met = [a for program in programs.values() for a in program]
        met = [action for action in met if action.op in COLLECTIVE]
        self._missing = Counter(action.group for action in met)
        self._groups_of: dict[StageKey, list[Group]] = defaultdict(list)
        for action in met:
            if action.group is not None:
                self._groups_of[action.key].append(action.group)
        self.last_s: dict[Group | None, float] = defaultdict(float)
        self.done_s: dict[Group | None, float] = {}
        self.waiting: dict[Group | None, list[_LaneRun]] = defaultdict(list)

    def come(self, group: Group | None, now: float) -> bool:
        """Note the arrival of one holder; return whether it is the last one."""
        self._missing[group] -= 1
        self.last_s[group] = max(self.last_s[group], now)
        return not self._missing[group]

    def waits_for(self, action: Action) -> Group | None | Literal[False]:
        """Return the collective that must end before the action; False if none."""
        if action.op is Op.UPDATE:
            return False if NORM in self.done_s else NORM
        if action.op is Op.NORM:
            for group in self._groups_of[action.key]:
                if group not in self.done_s:
                    return group
        return False

    def reduced_s(self, stage: StageKey) -> float:
        """Return when the last of the stage's groups was summed."""
        return max((self.done_s[g] for g in self._groups_of[stage]), default=0.0)


@dataclass(slots=True)
class _Sum:
    """A group's sum while it crosses its trunks."""

    action: Action
    start_s: float
    missing: int
    end_s: float = 0.0


@dataclass(slots=True)
class _LaneRun:
    """The progress of a lane through its actions."""

    steps: list[_Step]
    position: int = 0
    free_s: float = 0.0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    done: list[Timed] = field(default_factory=list)


class _Run:
    """One simulation; its state is the lanes, the channels and the finished sums."""

    def __init__(self, programs: _Programs, plan: Plan, costs: Costs) -> None:
        self.costs, self.plan = costs, plan
        self.channels: dict[Edge, _Channel] = {}
        routes = self._edge_routes()
        self.sums: dict[Group, dict[int, float]] = {}  # bytes by channel
        for group, reduction in costs.reductions.items():
            first, sizes = len(routes), reduction.trunk_bytes.values()
            self.sums[group] = dict(enumerate(sizes, start=first))
            late_s = reduction.latency_s
            routes += [
                Route(trunks=(trunk,), latency_s=late_s)
                for trunk in reduction.trunk_bytes
            ]
        self.traffic = Traffic(costs.trunks, routes)
        self.lanes = self._lane_runs(programs)
        self.meetings = _Meetings(programs)
        self.reduced: list[Timed] = []

    def result(self) -> Simulation:
        for lane in self.lanes.values():
            self.traffic.at(0.0, self._advance, lane)
        self.traffic.run()
        stuck = [
            lane for lane in self.lanes.values() if lane.position < len(lane.steps)
        ]
        assert not stuck, f"blocked at {stuck[0].steps[stuck[0].position][0]}"
        step_time_s = max(lane.free_s for lane in self.lanes.values())
        return Simulation(
            step_time_s=step_time_s,
            lanes={key: tuple(lane.done) for key, lane in self.lanes.items()},
            reductions=tuple(self.reduced),
            messages={
                edge: (channel.sent_s, channel.arrival_s)
                for edge, channel in self.channels.items()
            },
            shares={
                key: TimeUse(
                    busy_s=lane.busy_s,
                    waiting_s=lane.waiting_s,
                    idle_s=step_time_s - lane.busy_s - lane.waiting_s,
                )
                for key, lane in self.lanes.items()
            },
        )

    def _edge_routes(self) -> list[Route]:
        """Number the channels between neighbours; return routes by channel number."""
        routes: list[Route] = []
        for r, s, _ in self.plan.stages():
            if s + 1 < len(self.plan.replicas[r].stages):
                for edge in (((r, s), (r, s + 1)), ((r, s + 1), (r, s))):
                    size = self.costs.message_bytes.get(edge, 0.0)
                    self.channels[edge] = _Channel(len(routes), size)
                    routes.append(self.costs.routes.get(edge, Route(trunks=())))
        return routes

    def _lane_runs(self, programs: _Programs) -> dict[Lane, _LaneRun]:
        lanes: dict[Lane, _LaneRun] = {}
        home = {}
        for key, lane in lane_of(self.plan).items():
            home[key] = lanes.setdefault(lane, _LaneRun([])).steps
        for program in programs.values():
            self._compile(program, home)
        return lanes

    def _compile(
        self, program: Sequence[Action], home: Mapping[StageKey, list[_Step]]
    ) -> None:
        """Append to lanes the program's actions that take time or wait."""
        ways: dict[tuple[int, int, Op], tuple[_Way, Callable[[_Step], None]]] = {}
        free, send, receive = Op.FREE, Op.SEND, Op.RECV
        for action in program:
            op = action.op
            if op is free or op is send or op is receive:
                continue  # most actions: these neither take time nor wait here
            kind = action.replica, action.stage, op
            way = ways.get(kind)
            if way is None:
                way = ways[kind] = self._way(action.key, op), home[action.key].append
            (seconds, comes, goes), append = way
            append((action, seconds, comes, goes))

    def _way(self, key: StageKey, op: Op) -> _Way:
        """Return (seconds, channel to wait for, channel to send on) of an action."""
        if op not in COMPUTE:
            return _NEVER, None, None
        r, s = key
        before, after = (r, s - 1), (r, s + 1)
        last = s == len(self.plan.replicas[r].stages) - 1
        read, written = dataflow(first=s == 0, last=last)[op, None]
        comes = goes = None
        if op in (Op.F, Op.FB, Op.E) and "x" in read:
            comes = self.channels[before, key]
        elif "dy" in read and op is not Op.W:
            comes = self.channels[after, key]
        if "y" in written:
            goes = self.channels[key, after]
        elif "dx" in written:
            goes = self.channels[key, before]
        return duration_s(self.costs.times[key], op), comes, goes

    def _advance(self, _: float, lane: _LaneRun) -> None:
        """Run a lane until it has to wait for an event whose time is unknown."""
        steps, done, free_s = lane.steps, lane.done, lane.free_s
        for position in range(lane.position, len(steps)):
            action, seconds, comes, goes = steps[position]
            if seconds == _NEVER:
                lane.position, lane.free_s = position, free_s
                if not self._collective(lane, action):
                    return
                free_s = lane.free_s
                continue
            m = action.microbatch
            assert m is not None
            start_s = free_s
            if comes is not None:
                arrival_s = comes.arrival_s.get(m)
                if arrival_s is None:
                    comes.waiting[m] = lane
                    lane.position, lane.free_s = position, free_s
                    return
                if arrival_s > start_s:
                    lane.waiting_s += arrival_s - max(start_s, comes.sent_s[m])
                    start_s = arrival_s
            free_s = start_s + seconds
            lane.busy_s += seconds
            done.append(Timed(action, start_s, free_s))
            if goes is not None:
                self._send(free_s, goes, m)
        lane.position, lane.free_s = len(steps), free_s

    def _send(self, end_s: float, channel: _Channel, m: int) -> None:
        """Send a result made at `end_s`, which may be later than the clock."""
        channel.sent_s[m] = end_s
        number, size = channel.number, channel.size
        if self.traffic.is_alone[number]:
            self._arrive(self.traffic.arrival_s(end_s, number, size), (channel, m))
        else:
            self.traffic.at(end_s, self._depart, (channel, m))

    def _depart(self, now: float, message: _Message) -> None:
        channel, _ = message
        self.traffic.send(now, channel.number, channel.size, self._arrive, message)

    def _arrive(self, arrival_s: float, message: _Message) -> None:
        channel, m = message
        channel.arrival_s[m] = arrival_s
        lane = channel.waiting.pop(m, None)
        if lane is not None:
            self.traffic.at(arrival_s, self._advance, lane)

    def _collective(self, lane: _LaneRun, action: Action) -> bool:
        """Run a REDUCE, NORM or UPDATE; return False if the lane must wait."""
        late = self.meetings.waits_for(action)
        if late is not False:
            self.meetings.waiting[late].append(lane)
            return False
        if action.op is Op.UPDATE:
            self._update(lane, action)
            return True
        if action.op is Op.NORM:
            ready_s = max(lane.free_s, self.meetings.reduced_s(action.key))
            lane.waiting_s += ready_s - lane.free_s
            lane.free_s = ready_s
        if self.meetings.come(action.group, lane.free_s):
            start_s = self.meetings.last_s[action.group]
            self.traffic.at(start_s, self._meet, action)
        return True

    def _update(self, lane: _LaneRun, action: Action) -> None:
        start_s = max(lane.free_s, self.meetings.done_s[NORM])
        seconds = self.costs.times[action.key].update_s
        lane.done.append(Timed(action, start_s, start_s + seconds))
        lane.busy_s += seconds
        lane.free_s = start_s + seconds

    def _meet(self, now: float, action: Action) -> None:
        """Sum a group over its trunks, or finish NORM, after all holders' arrival."""
        group = action.group
        if group is None:
            self.traffic.at(now + self.costs.norm_s, self._done, NORM)
            return
        sizes = self.sums.get(group)
        if not sizes:
            self._done(now, group)
            return
        begun = _Sum(action, now, missing=len(sizes))
        for channel, size in sizes.items():
            self.traffic.send(now, channel, size, self._summed, begun)

    def _summed(self, arrival_s: float, begun: _Sum) -> None:
        """Note that a sum has crossed one of its trunks."""
        begun.missing -= 1
        begun.end_s = max(begun.end_s, arrival_s)
        if not begun.missing:
            self.reduced.append(Timed(begun.action, begun.start_s, begun.end_s))
            self.traffic.at(begun.end_s, self._done, begun.action.group)

    def _done(self, now: float, group: Group | None) -> None:
        self.meetings.done_s[group] = now
        for lane in self.meetings.waiting.pop(group, ()):
            self._advance(now, lane)
