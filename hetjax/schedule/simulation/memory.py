# SPDX-License-Identifier: Apache-2.0
"""Computes the peak memory of every device of a plan by walking its programs.

Owns which buffers are live at once, in addition to static memory:

* each buffer from the action that makes it (for a received one, the RECV) to its FREE,
  in program order;
* a sent buffer in the sender's memory, even after its FREE, until the sender can be
  sure of its receipt (`programs/receipts.py`): y at the latest when its dy comes back,
  dx when an activation arrives that the receiver made after it had used that dx;
* in addition to y or dx, the parts that are cut out of it for a receiver that splits
  the batch over more devices; in addition to x or dy, the parts that it is joined from.

So the peak holds for any order in which the workers run, and some order reaches it.
Owns the refusal of plans that need more memory than devices have. Does not own the
sizes (`costs/stage_memory.py`) nor the check that programs free their buffers
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
_PEERS: Mapping[Buffer, int] = {"y": 1, "dx": -1}  # offset of the receiving stage
_GIB = 2**30
_Change = tuple[int, int, int]  # bytes of residuals, of other buffers; in flight
_NO_CHANGE: _Change = (0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes on one device at its peak, by purpose.

    `in_flight` counts the forwards whose residuals exist at the peak. If stages of an
    interleaved schedule share the device, their bytes are summed. `pass_bytes` is the
    workspace of the passes, `updating_bytes` what the update needs beyond the peak.
    """

    static_bytes: int
    residual_bytes: int
    activation_bytes: int
    pass_bytes: int
    updating_bytes: int = 0
    in_flight: int

    @property
    def workspace_bytes(self) -> int:
        """What a program needs while it runs: a pass, or the update."""
        return max(self.pass_bytes, self.updating_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The parts of the total, by readable names."""
        return {
            "weights, gradients and optimizer state": self.static_bytes,
            f"residuals of {self.in_flight} forwards in flight": self.residual_bytes,
            "activations and their gradients between stages": self.activation_bytes,
            "workspace": self.workspace_bytes,
        }


def memory_uses(programs: Programs, plan: Plan, costs: Costs) -> dict[str, MemoryUse]:
    """Return each device's memory use at its peak, by "node/device"."""
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

    `uses` is the result of `memory_uses`.
    """
    has = capacity_bytes(plan, costs)
    worst = max(uses, key=lambda device: uses[device].total_bytes - has[device])
    if uses[worst].total_bytes > has[worst]:
        raise _over_memory(worst, uses[worst], has[worst], plan)


def capacity_bytes(plan: Plan, costs: Costs) -> dict[str, float]:
    """Return the memory of every device of the plan, infinity if unknown."""
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
        # an update starts when nothing is in flight on any stage
        free_bytes = residual_bytes + activation_bytes
        updating_bytes = max(0, max(m.update_bytes for m in memory) - free_bytes)
        return MemoryUse(
            static_bytes=sum(m.static_bytes for m in memory),
            residual_bytes=residual_bytes,
            activation_bytes=activation_bytes,
            # programs of one device run one at a time
            pass_bytes=max(m.workspace_bytes for m in memory),
            updating_bytes=updating_bytes,
            in_flight=in_flight,
        )


_Kind = tuple[int, int, str, Buffer | None]  # of an action: stage, op, buffer


def _walk(
    programs: Programs,
    plan: Plan,
    costs: Costs,
    ledgers: Mapping[StageKey, list[_Ledger]],
) -> None:
    """Book every action of every program in the ledgers of its stage."""
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
    waiting: dict[Message, _Change] = {}  # to book at the receipt of a message
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
            if waiting.get(message) is _NO_CHANGE:  # the buffer itself waits
                waiting[message] = found[0]
                continue
        for change in found:
            for ledger in ledgers[action.key]:
                ledger.book(change)


def _message_of(action: Action) -> Message:
    """Return the message that carries a buffer of a stage."""
    assert action.buffer is not None and action.microbatch is not None
    r, s = action.key
    return r, s, s + _PEERS[action.buffer], action.microbatch


def _changes(action: Action, plan: Plan, costs: Costs) -> tuple[_Change, ...]:
    """Return an action's successive changes to the live buffers of its stage."""
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
        return (0, others, 0), change, (0, -others, 0)  # the parts, until joined
    return (change,)


def _cut_up(plan: Plan, action: Action) -> bool:
    """Return whether a transfer needs parts of shards at the action's end.

    It does if each device there holds more of the batch than a device at the other end,
    or different shares.
    """
    assert action.peer is not None
    stages = plan.replicas[action.replica].stages
    own, other = stages[action.stage].mesh.data, stages[action.peer].mesh.data
    return own % other != 0


def _negative(change: _Change) -> _Change:
    return -change[0], -change[1], -change[2]


def _touched(action: Action, plan: Plan) -> tuple[Buffer, ...]:
    """Return the buffers that an action makes, or the one that a FREE frees."""
    if action.op is Op.FREE:
        return tuple(buffer for buffer in BUFFERS if buffer == action.buffer)
    r, s = action.key
    flow = dataflow(first=s == 0, last=s == len(plan.replicas[r].stages) - 1)
    return flow.get((action.op, action.buffer), NO_ACCESS)[1]


def _memory(costs: Costs, key: StageKey) -> StageMemory:
    return costs.memory.get(key, StageMemory())


def _buffer_bytes(memory: StageMemory, *, first: bool) -> dict[Buffer, int]:
    # residuals include the stage's input; unless it is tokens, x already counts it
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
    """Return what to type to shrink the largest part."""
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
