# SPDX-License-Identifier: Apache-2.0
"""Defines the action IR: one instruction, its text form, and the buffers it touches.

Owns `Op`, `Action`, the parser and the printer (exact inverses), and the dataflow of
a stage: which buffers each action reads and writes. One action is one line of text:

    r0.s2.F3  r0.s2.B3  r0.s2.FB3  r0.s2.I3  r0.s2.W3  r0.s2.E3
    r0.s2.SEND_F3>s3   r0.s3.RECV_F3<s2   the activation of microbatch 3
    r0.s3.SEND_B3>s2   r0.s2.RECV_B3<s3   its gradient
    r0.s2.REDUCE[4:9]  r0.s2.REDUCE[embedding.table]
    r0.s2.NORM  r0.s2.UPDATE  r0.s2.FREE_x3

Does not own the order of actions (`generate.py`, `lower.py`) nor the check of an order
(`check.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Literal

from hetjax.costs.costs import Group, StageKey
from hetjax.errors import BadInput


class Op(StrEnum):
    """The kind of an action.

    F and B are forward and backward of one microbatch, FB both in one (last stage). I
    and W are the halves of B: gradients of the input and of the weights. E is a
    forward without residuals. REDUCE sums a group's gradients over its holders, NORM
    is the global norm, UPDATE the optimizer's step, FREE drops a buffer.
    """

    F = "F"
    B = "B"
    FB = "FB"
    I = "I"  # noqa: E741
    W = "W"
    E = "E"
    SEND = "SEND"
    RECV = "RECV"
    REDUCE = "REDUCE"
    NORM = "NORM"
    UPDATE = "UPDATE"
    FREE = "FREE"


# x: received activation (stage 0 reads tokens instead), saved: residuals, y: activation
# to send, dy: received gradient, dx: gradient to send, half: what W needs after I (part
# of x, saved and dy, and gradients within the stage). FREEs are printed in this order.
Buffer = Literal["x", "saved", "y", "dy", "dx", "half"]
BUFFERS: tuple[Buffer, ...] = ("x", "saved", "y", "dy", "dx", "half")

Message = tuple[int, int, int, int]  # (replica, from stage, to stage, microbatch)
Tied = Mapping[str, tuple[StageKey, ...]]  # path of a tied parameter -> its holders
UNTIED: Tied = MappingProxyType({})

COMPUTE = frozenset({Op.F, Op.B, Op.FB, Op.I, Op.W, Op.E})
COLLECTIVE = frozenset({Op.REDUCE, Op.NORM})


@dataclass(frozen=True, slots=True)
class Action:
    """One instruction of one stage; `peer` is a stage of the same replica.

    `group` is set only for REDUCE, `peer` for SEND and RECV, `buffer` for SEND, RECV
    and FREE, `microbatch` for all except REDUCE, NORM and UPDATE.
    """

    op: Op
    replica: int
    stage: int
    microbatch: int | None = None
    buffer: Buffer | None = None
    peer: int | None = None
    group: Group | None = None

    @property
    def key(self) -> StageKey:
        return self.replica, self.stage

    @property
    def message(self) -> Message:
        """The identity of the message, the same for a SEND and its RECV."""
        assert self.peer is not None and self.microbatch is not None
        if self.op is Op.SEND:
            return self.replica, self.stage, self.peer, self.microbatch
        return self.replica, self.peer, self.stage, self.microbatch

    def __str__(self) -> str:
        verb = _VERB_OF.get((self.op, self.buffer), f"{self.op}_{self.buffer}")
        text = f"r{self.replica}.s{self.stage}.{verb}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.peer is not None:
            text += f"{_ARROWS.get(self.op, '?')}s{self.peer}"
        if self.group is not None:
            text += f"[{_group_text(self.group)}]"
        return text


Program = tuple[Action, ...]  # of one worker, that is, of one node
Programs = Mapping[str, Program]  # by the name of the node

_ARROWS = {Op.SEND: ">", Op.RECV: "<"}
_VERBS: dict[str, tuple[Op, Buffer | None]] = {
    **{str(op): (op, None) for op in Op if op not in (Op.SEND, Op.RECV, Op.FREE)},
    "SEND_F": (Op.SEND, "y"),
    "RECV_F": (Op.RECV, "x"),
    "SEND_B": (Op.SEND, "dx"),
    "RECV_B": (Op.RECV, "dy"),
    **{f"FREE_{buffer}": (Op.FREE, buffer) for buffer in BUFFERS},
}
_VERB_OF = {meaning: verb for verb, meaning in _VERBS.items()}

_NUMBER = r"(?:0|[1-9]\d*)"
_LINE = re.compile(
    rf"r(?P<replica>{_NUMBER})\.s(?P<stage>{_NUMBER})\."
    rf"(?P<verb>[A-Z]+(?:_[A-Za-z]+)?)(?P<microbatch>{_NUMBER})?"
    rf"(?:(?P<arrow>[<>])s(?P<peer>{_NUMBER}))?"
    rf"(?:\[(?:(?P<lo>{_NUMBER}):(?P<hi>{_NUMBER})|(?P<path>[A-Za-z_][^\s\[\]:#]*))\])?",
    re.ASCII,
)


def _group_text(group: Group) -> str:
    return group if isinstance(group, str) else f"{group[0]}:{group[1]}"


def format_program(program: Program) -> str:
    """Print a program, one action per line."""
    return "".join(f"{action}\n" for action in program)


def parse_program(text: str, name: str = "program") -> Program:
    """Read a program; `#` starts a comment, blank lines are skipped.

    Raises BadInput, with `name` and the line number, for a line that is no action.
    """
    actions: list[Action] = []
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.partition("#")[0].strip()
        if not code:
            continue
        action = _parse_action(code)
        if action is None:
            raise BadInput(
                got=f"{name}, line {number}: {code!r}",
                allowed="r<replica>.s<stage>. followed by F3 B3 FB3 I3 W3 E3, "
                "SEND_F3>s1 RECV_F3<s0 SEND_B3>s0 RECV_B3<s1, REDUCE[4:9] "
                "REDUCE[embedding.table], NORM, UPDATE, FREE_x3 FREE_saved3 FREE_y3 "
                "FREE_dy3 FREE_dx3 FREE_half3",
                fix="write one action per line, for example r0.s2.SEND_F3>s3",
            )
        actions.append(action)
    return tuple(actions)


@lru_cache(maxsize=2**14)  # a search reads the programs of many similar plans
def _parse_action(code: str) -> Action | None:
    match = _LINE.fullmatch(code)
    if match is None or match["verb"] not in _VERBS:
        return None
    op, buffer = _VERBS[match["verb"]]
    has_group = match["path"] is not None or match["lo"] is not None
    operands = (match["microbatch"] is not None, match["arrow"], has_group)
    needs_microbatch = op not in (Op.REDUCE, Op.NORM, Op.UPDATE)
    if operands != (needs_microbatch, _ARROWS.get(op), op is Op.REDUCE):
        return None
    group = match["path"]
    if match["lo"] is not None:
        group = int(match["lo"]), int(match["hi"])
    return Action(
        op,
        int(match["replica"]),
        int(match["stage"]),
        None if match["microbatch"] is None else int(match["microbatch"]),
        buffer,
        None if match["peer"] is None else int(match["peer"]),
        group,
    )


Access = tuple[tuple[Buffer, ...], tuple[Buffer, ...]]  # (read, written)
NO_ACCESS: Access = ((), ())
Dataflow = Mapping[tuple[Op, Buffer | None], Access]


@cache
def dataflow(*, first: bool, last: bool) -> Dataflow:
    """Return the buffers read and written by (op, buffer) in a stage, without FREE.

    `first` and `last` tell whether the stage is the first or last of its pipeline. Each
    buffer belongs to the action's microbatch.
    """
    x: tuple[Buffer, ...] = () if first else ("x",)
    dx: tuple[Buffer, ...] = () if first else ("dx",)
    y: tuple[Buffer, ...] = () if last else ("y",)
    dy: tuple[Buffer, ...] = () if last else ("dy",)
    return {
        (Op.F, None): (x, ("saved", *y)),
        (Op.B, None): ((*x, "saved", *dy), dx),
        (Op.FB, None): (x, dx),
        (Op.I, None): ((*x, "saved", *dy), ("half", *dx)),
        (Op.W, None): (("half",), ()),
        (Op.E, None): (x, y),
        (Op.SEND, "y"): (("y",), ()),
        (Op.SEND, "dx"): (("dx",), ()),
        (Op.RECV, "x"): ((), ("x",)),
        (Op.RECV, "dy"): ((), ("dy",)),
    }
