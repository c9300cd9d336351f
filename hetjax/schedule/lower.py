# SPDX-License-Identifier: Apache-2.0
"""Lowering: from the compute order of each stage to the program of each node.

Owns the passes `communicate`, `reduce`, `finish` and `free`, each from stage orders
to stage orders, and `lower`, which runs them and projects the result on the nodes.
Does not own the compute order (`generate.py`), the projection (`merge.py`) nor the
proof that the result is right (`check.py`).
"""

from collections.abc import Mapping, Sequence

from hetjax.plans.plan import Plan
from hetjax.schedule.action import (
    BUFFERS,
    NO_ACCESS,
    UNTIED,
    Action,
    Buffer,
    Dataflow,
    Group,
    Op,
    Program,
    StageKey,
    Tied,
    dataflow,
    parse_program,
)
from hetjax.schedule.check import check
from hetjax.schedule.generate import by_stage, evaluation_actions, lane_orders
from hetjax.schedule.groups import reduce_groups
from hetjax.schedule.merge import merge

Orders = Mapping[StageKey, list[Action]]  # the actions of each stage, in order
_Positions = dict[int, int]  # microbatch -> index in a stage's compute order


def lower(plan: Plan, tied: Tied = UNTIED, prefetch: int = 0) -> dict[str, Program]:
    """Return the training program of every node.

    A program in the plan replaces the generated one of its node; then the whole is
    checked. Raises BadInput for what the checker refuses.
    """
    programs = lower_lanes(plan, lane_orders(plan), tied, prefetch)
    if plan.programs:
        for node, text in plan.programs.items():
            programs[node] = parse_program(text, f"program of node {node!r}")
        check(programs, plan, tied)
    return programs


def lower_lanes(
    plan: Plan,
    lanes: Sequence[Sequence[Action]],
    tied: Tied = UNTIED,
    prefetch: int = 0,
) -> dict[str, Program]:
    """Return the program of every node that keeps the compute order of every lane."""
    orders = communicate(by_stage(lanes), prefetch)
    orders = reduce(orders, reduce_groups(plan, tied))
    return merge(free(finish(orders)), plan, lanes)


def lower_evaluation(plan: Plan) -> dict[str, Program]:
    """Return the forward-only program of every node."""
    return merge(free(communicate(evaluation_actions(plan))), plan)


def communicate(orders: Orders, prefetch: int = 0) -> dict[StageKey, list[Action]]:
    """Add a SEND right after each producer and a RECV before each first use.

    A RECV stands `prefetch` compute actions before its use, or later where the
    sender could not send before the receiver has got that far: it never moves above
    a SEND that its own message waits for, so blocking RECVs cannot deadlock.
    """
    slots: dict[StageKey, list[list[Action]]] = {
        key: [[] for _ in order] for key, order in orders.items()
    }
    for r, s in orders:
        if (r, s + 1) in orders:
            _place_receives(orders, slots, (r, s), (r, s + 1), prefetch)
    return {
        key: _with_transfers(key, order, slots[key], orders)
        for key, order in orders.items()
    }


def _place_receives(
    orders: Orders,
    slots: dict[StageKey, list[list[Action]]],
    up: StageKey,
    down: StageKey,
    prefetch: int,
) -> None:
    """Put the RECVs of one edge, of both directions, into the slots of its stages.

    Two neighbours deadlock if each waits for a message that the other sends later.
    Activations are placed first, gradients then against the placed activations.
    """
    made_y, use_x = _made(orders, up, "y"), _used(orders, down, "x")
    made_dx, use_dy = _made(orders, down, "dx"), _used(orders, up, "dy")
    wait_x = _earliest(use_x, made_y, use_dy, made_dx, prefetch)
    wait_dy = _earliest(use_dy, made_dx, wait_x, made_y, prefetch)
    for m, slot in wait_x.items():
        slots[down][slot].append(Action(Op.RECV, *down, m, "x", up[1]))
    for m, slot in wait_dy.items():
        slots[up][slot].append(Action(Op.RECV, *up, m, "dy", down[1]))


def _earliest(
    used: _Positions,
    made_by_peer: _Positions,
    waits_of_peer: _Positions,
    made: _Positions,
    prefetch: int,
) -> _Positions:
    """Return the slot of each RECV, an index into the receiver's compute order.

    Before it makes message m, the peer waits for all that it receives up to there;
    the receiver must have sent those before it waits for m.
    """
    waits = sorted(waits_of_peer.items(), key=lambda wait: -wait[1])
    slots: _Positions = {}
    floor = 0
    for m, peer_index in sorted(made_by_peer.items(), key=lambda item: item[1]):
        while waits and waits[-1][1] <= peer_index:
            floor = max(floor, made[waits.pop()[0]] + 1)
        slots[m] = min(used[m], max(used[m] - prefetch, floor))
    return slots


def _made(orders: Orders, key: StageKey, buffer: Buffer) -> _Positions:
    flow = _flow(orders, key)
    return {
        action.microbatch: index
        for index, action in enumerate(orders[key])
        if buffer in flow[action.op, None][1] and action.microbatch is not None
    }


def _used(orders: Orders, key: StageKey, buffer: Buffer) -> _Positions:
    flow = _flow(orders, key)
    first_use: _Positions = {}
    for index, action in enumerate(orders[key]):
        if buffer in flow[action.op, None][0] and action.microbatch is not None:
            first_use.setdefault(action.microbatch, index)
    return first_use


def _with_transfers(
    key: StageKey, order: list[Action], receives: list[list[Action]], orders: Orders
) -> list[Action]:
    flow = _flow(orders, key)
    peers: dict[Buffer, int] = {"y": key[1] + 1, "dx": key[1] - 1}
    out: list[Action] = []
    for action, before in zip(order, receives, strict=True):
        out += before
        out.append(action)
        for buffer in flow[action.op, None][1]:
            if buffer in peers:
                m = action.microbatch
                out.append(Action(Op.SEND, *key, m, buffer, peers[buffer]))
    return out


def reduce(
    orders: Orders, groups: Mapping[Group, tuple[StageKey, ...]]
) -> dict[StageKey, list[Action]]:
    """Add each stage's REDUCEs after its last action, in the order of the groups.

    Nothing but backward work and its SEND can come last, so the gradients are done.
    """
    out = {key: list(order) for key, order in orders.items()}
    for group, holders in groups.items():
        for key in holders:
            out[key].append(Action(Op.REDUCE, *key, group=group))
    return out


def finish(orders: Orders) -> dict[StageKey, list[Action]]:
    """Add NORM, the commit point, and then UPDATE to every stage."""
    return {
        key: [*order, Action(Op.NORM, *key), Action(Op.UPDATE, *key)]
        for key, order in orders.items()
    }


def free(orders: Orders) -> dict[StageKey, list[Action]]:
    """Add a FREE right after the last use of every buffer."""
    return {key: _freed(order, _flow(orders, key)) for key, order in orders.items()}


def _freed(order: list[Action], flow: Dataflow) -> list[Action]:
    needed_later: set[tuple[Buffer, int | None]] = set()
    backwards: list[Action] = []
    for action in reversed(order):
        read, written = flow.get((action.op, action.buffer), NO_ACCESS)
        m = action.microbatch
        last: list[Buffer] = [
            buffer
            for buffer in BUFFERS
            if (buffer in read or buffer in written) and (buffer, m) not in needed_later
        ]
        for buffer in reversed(last):
            needed_later.add((buffer, m))
            backwards.append(Action(Op.FREE, *action.key, m, buffer))
        backwards.append(action)
    return backwards[::-1]


def _flow(orders: Orders, key: StageKey) -> Dataflow:
    return dataflow(first=key[1] == 0, last=(key[0], key[1] + 1) not in orders)
