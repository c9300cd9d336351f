# SPDX-License-Identifier: Apache-2.0
"""Peak memory of every device of a plan, by walking the programs that it will run.

Owns which buffers live at once, on top of what lives through the step:

* each buffer from the action that makes it (a RECV for what is received) to its FREE,
  in program order;
* what is sent waits in the sender's memory, also after its FREE, until the sender can
  be sure that it was received (`programs/receipts.py`): y at the latest when its dy
  comes back, dx when an activation comes that was made after it had been used;
* beside y or dx the boxes that are cut out of it for a receiver that splits the batch
  over more devices, and beside x or dy what it is joined from.

So the peak holds in whatever order the workers run, and some order reaches it. Owns the
refusal of plans that need more than there is. Does not own the sizes
(`costs/stage_memory.py`) nor whether programs free what they make
(`programs/check.py`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetjax.costs.costs import Costs, StageMemory
from hetjax.errors import NoFeasiblePlan
from hetjax.plans.plan import Plan
from hetjax.plans.schedules import SCHEDULES
from hetjax.schedule.programs.action import (
    BUFFERS,
    NO_ACCESS,
    Action,
    Buffer,
    Message,
    Op,
    Program,
    Programs,
    StageKey,
    dataflow,
)
from hetjax.schedule.programs.receipts import Receipts, known_receipts

_RESIDUALS: tuple[Buffer, ...] = ("saved", "half")
_PEERS: Mapping[Buffer, int] = {"y": 1, "dx": -1}  # to which stage it is sent
_GIB = 2**30
_Change = tuple[int, int, int]  # bytes of residuals, of other buffers; in flight
_NO_CHANGE: _Change = (0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes on one device at its peak, by what they are for.

    `in_flight` counts the forwards whose residuals are kept then. The stages of an
    interleaved schedule that share the device are summed.
    """

    static_bytes: int
    residual_bytes: int
    activation_bytes: int
    workspace_bytes: int
    in_flight: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The parts of the total, each under its name for people."""
        return {
            "weights, gradients and optimizer state": self.static_bytes,
            f"residuals of {self.in_flight} forwards in flight": self.residual_bytes,
            "activations and their gradients between stages": self.activation_bytes,
            "workspace": self.workspace_bytes,
        }


def memory_uses(programs: Programs, plan: Plan, costs: Costs) -> dict[str, MemoryUse]:
    """Return what every device of the plan holds at its peak, keyed "node/device"."""
    homes: dict[str, list[StageKey]] = defaultdict(list)
    for r, s, stage in plan.stages():
        for device in stage.devices:
            homes[f"{stage.node}/{device}"].append((r, s))
    ledgers = {keys: _Ledger() for keys in dict.fromkeys(map(tuple, homes.values()))}
    of_stage = {
        key: [ledger for keys, ledger in ledgers.items() if key in keys]
        for key in {key for keys in ledgers for key in keys}
    }
    _walk(programs, plan, costs, of_stage)
    return {
        device: ledgers[tuple(keys)].use([_memory(costs, key) for key in keys])
        for device, keys in homes.items()
    }


def check_memory(uses: Mapping[str, MemoryUse], plan: Plan, costs: Costs) -> None:
    """Raise NoFeasiblePlan for the device that lacks the most memory, if any.

    `uses` is of `memory_uses`.
    """
    has = capacity_bytes(plan, costs)
    worst = max(uses, key=lambda device: uses[device].total_bytes - has[device])
    if uses[worst].total_bytes > has[worst]:
        raise _over_memory(worst, uses[worst], has[worst], plan)


def capacity_bytes(plan: Plan, costs: Costs) -> dict[str, float]:
    """Return what every device of the plan has, infinity where nobody knows."""
    return {
        f"{stage.node}/{device}": costs.memory_bytes.get((r, s), math.inf)
        for r, s, stage in plan.stages()
        for device in stage.devices
    }


@dataclass(slots=True)
class _Ledger:
    """The live buffers of the devices that hold the same stages, and their peak."""

    residual_bytes: int = 0
    activation_bytes: int = 0
    in_flight: int = 0
    peak: tuple[int, int, int] = (0, 0, 0)

    def book(self, change: _Change) -> None:
        self.residual_bytes += change[0]
        self.activation_bytes += change[1]
        self.in_flight += change[2]
        if self.residual_bytes + self.activation_bytes > self.peak[0] + self.peak[1]:
            self.peak = self.residual_bytes, self.activation_bytes, self.in_flight

    def use(self, memory: list[StageMemory]) -> MemoryUse:
        residual_bytes, activation_bytes, in_flight = self.peak
        # an update begins when nothing is in flight on any stage
        free_bytes = residual_bytes + activation_bytes
        updating_bytes = max(m.update_bytes for m in memory) - free_bytes
        return MemoryUse(
            static_bytes=sum(m.static_bytes for m in memory),
            residual_bytes=residual_bytes,
            activation_bytes=activation_bytes,
            # programs of one device run one at a time
            workspace_bytes=max(updating_bytes, *(m.workspace_bytes for m in memory)),
            in_flight=in_flight,
        )


_Kind = tuple[int, int, str, Buffer | None]  # of an action: stage, op, buffer


def _walk(
    programs: Programs,
    plan: Plan,
    costs: Costs,
    ledgers: Mapping[StageKey, list[_Ledger]],
) -> None:
    """Book every action of every program with the ledgers of its stage."""
    changes: dict[_Kind, tuple[_Change, ...]] = {}
    receipts = known_receipts(programs)

    def changes_of(action: Action) -> tuple[_Change, ...]:
        kind = action.replica, action.stage, action.op.value, action.buffer
        found = changes.get(kind)
        if found is None:
            found = changes[kind] = _changes(action, plan, costs)
        return found

    for node, program in programs.items():
        _walk_program(program, receipts[node], changes_of, ledgers)


def _walk_program(
    program: Program,
    receipts: Receipts,
    changes_of: Callable[[Action], tuple[_Change, ...]],
    ledgers: Mapping[StageKey, list[_Ledger]],
) -> None:
    waiting: dict[Message, _Change] = {}  # what the receipt of a message gives back
    for index, action in enumerate(program):
        if index in receipts:
            for message in receipts[index]:
                change = waiting.pop(message)
                for ledger in ledgers[message[:2]]:
                    ledger.book(change)
        found, op = changes_of(action), action.op
        if op is Op.SEND:
            waiting[action.message] = _negative(found[0]) if found else _NO_CHANGE
        elif op is Op.FREE and action.buffer in _PEERS:
            message = _message_of(action)
            if waiting.get(message) is _NO_CHANGE:  # what waits is the buffer itself
                waiting[message] = found[0]
                continue
        for change in found:
            for ledger in ledgers[action.key]:
                ledger.book(change)


def _message_of(action: Action) -> Message:
    """The message that a buffer of a stage is sent as."""
    assert action.buffer is not None and action.microbatch is not None
    r, s = action.key
    return r, s, s + _PEERS[action.buffer], action.microbatch


def _changes(action: Action, plan: Plan, costs: Costs) -> tuple[_Change, ...]:
    """What an action adds to the live buffers of its stage, or takes away, in turn."""
    sizes = _buffer_bytes(_memory(costs, action.key), first=action.key[1] == 0)
    if action.op is Op.SEND:
        assert action.buffer is not None
        cut = _cut_up(plan, action)
        return ((0, sizes[action.buffer], 0),) if cut else ()
    touched = _touched(action, plan)
    if not touched:
        return ()
    sign = -1 if action.op is Op.FREE else 1
    residuals = sum(sizes[buffer] for buffer in touched if buffer in _RESIDUALS)
    others = sum(sizes[buffer] for buffer in touched) - residuals
    change = sign * residuals, sign * others, sign * ("saved" in touched)
    if action.op is Op.RECV and _cut_up(plan, action):
        return (0, others, 0), change, (0, -others, 0)  # its parts, until it is joined
    return (change,)


def _cut_up(plan: Plan, action: Action) -> bool:
    """Whether a transfer needs parts of shards at the action's end of it: its devices
    hold more of the batch each than those of the other end, or other shares."""
    assert action.peer is not None
    stages = plan.replicas[action.replica].stages
    own, other = stages[action.stage].mesh.data, stages[action.peer].mesh.data
    return own % other != 0


def _negative(change: _Change) -> _Change:
    return -change[0], -change[1], -change[2]


def _touched(action: Action, plan: Plan) -> tuple[Buffer, ...]:
    """The buffers that an action makes, or the one that a FREE frees."""
    if action.op is Op.FREE:
        return tuple(buffer for buffer in BUFFERS if buffer == action.buffer)
    r, s = action.key
    flow = dataflow(first=s == 0, last=s == len(plan.replicas[r].stages) - 1)
    return flow.get((action.op, action.buffer), NO_ACCESS)[1]


def _memory(costs: Costs, key: StageKey) -> StageMemory:
    return costs.memory.get(key, StageMemory())


def _buffer_bytes(memory: StageMemory, *, first: bool) -> dict[Buffer, int]:
    # residuals hold on to the stage's input, which x is already, but for tokens
    received = 0 if first else memory.input_bytes
    return {
        "x": memory.input_bytes,
        "saved": max(memory.saved_bytes - received, 0),
        "y": memory.output_bytes,
        "dy": memory.output_bytes,
        "dx": memory.input_bytes,
        "half": memory.half_saved_bytes,
    }


def _over_memory(
    device: str, use: MemoryUse, has_bytes: float, plan: Plan
) -> NoFeasiblePlan:
    parts = sorted(use.parts.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{size / _GIB:.2f} GiB {name}" for name, size in parts if size)
    total, has = use.total_bytes, round(has_bytes)
    stages = [
        f"replicas[{r}].stages[{s}]"
        for r, s, stage in plan.stages()
        if device in {f"{stage.node}/{index}" for index in stage.devices}
    ]
    return NoFeasiblePlan(
        got=f"device {device!r} needs {total} bytes ({total / _GIB:.2f} GiB) for "
        f"{' and '.join(stages)}: {shown}",
        allowed=f"at most the {has} bytes ({has / _GIB:.2f} GiB) that plans may fill",
        fix=_remedy(use, total - has_bytes, stages[0], plan),
    )


def _remedy(use: MemoryUse, lack_bytes: float, where: str, plan: Plan) -> str:
    """What to type to shrink the largest part."""
    largest = max(use.parts.values())
    if largest == use.static_bytes:
        return (
            f"give {where} fewer layers, more devices (mesh.tensor or mesh.data), or "
            "devices with more memory"
        )
    if largest != use.residual_bytes:
        return f"lower the microbatch_size, or give {where} a larger mesh.tensor"
    remat = f'give {where} "remat": "selective" or "full"'
    schedule = SCHEDULES[plan.schedule]
    if schedule.order == "gpipe":
        return f'write "schedule": "1f1b", which keeps fewer in flight, or {remat}'
    if schedule.shares:
        return (
            f'lower "launch_ahead" in the replica, from its first stage on, or {remat}'
        )
    each_bytes = use.residual_bytes / use.in_flight
    room = use.in_flight - math.ceil(lack_bytes / each_bytes)
    if room >= 1:
        return f'lower its "launch_ahead" to {room}, or {remat}'
    return f"{remat}, or lower the microbatch_size"
