# SPDX-License-Identifier: Apache-2.0
"""Lowers the compute order of each stage to the program of each node.

Owns the passes `communicate`, `reduce`, `finish` and `free`, each from stage orders
to stage orders, and `lower`, which runs them and projects the result on the nodes;
`timed_orders` and `timed_lanes` run only the passes that affect the time.
Does not own the compute order (`generate.py`), the projection (`merge.py`) nor the
check of the result (`check.py`).
"""

from collections.abc import Mapping, Sequence

from hetjax.plans.plan import Plan, reduce_groups
from hetjax.schedule.programs.action import (
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
from hetjax.schedule.programs.check import check
from hetjax.schedule.programs.generate import by_stage, evaluation_actions, lane_orders
from hetjax.schedule.programs.merge import merge

Orders = Mapping[StageKey, Sequence[Action]]  # the actions of each stage, in order


def lower(plan: Plan, tied: Tied = UNTIED) -> dict[str, Program]:
    """Return the training program of every node.

    A program in the plan replaces the generated one of its node; then all programs are
    checked. Raises BadInput for programs that the checker refuses.
    """
    nodes = [stage.node for _, _, stage in plan.stages()]
    programs: dict[str, Program] = dict.fromkeys(nodes, ())
    if not programs.keys() <= plan.programs.keys():
        programs = lower_lanes(plan, lane_orders(plan), tied)
    if plan.programs:
        for node, text in plan.programs.items():
            programs[node] = parse_program(text, f"program of node {node!r}")
        check(programs, plan, tied)
    return programs


def lower_lanes(
    plan: Plan, lanes: Sequence[Sequence[Action]], tied: Tied = UNTIED
) -> dict[str, Program]:
    """Return programs for all nodes that keep the compute order of every lane."""
    orders = communicate(by_stage(lanes))
    orders = reduce(orders, reduce_groups(plan, tied))
    return merge(free(finish(orders)), plan, lanes)


def timed_orders(plan: Plan, tied: Tied = UNTIED) -> dict[StageKey, list[Action]]:
    """Return each stage's actions that take time or wait, in order: the programs of
    `lower` without transfers and FREEs, which simulate the same.

    The plan must have no programs, and its stages must not share devices.
    """
    return timed_lanes(plan, lane_orders(plan), tied)


def timed_lanes(
    plan: Plan, lanes: Sequence[Sequence[Action]], tied: Tied = UNTIED
) -> dict[StageKey, list[Action]]:
    """Return the same for given compute orders of the stages, which share no devices
    and do not wait for each other in a ring."""
    orders = {lane[0].key: lane for lane in lanes}
    return finish(reduce(orders, reduce_groups(plan, tied)))


def lower_evaluation(plan: Plan) -> dict[str, Program]:
    """Return the forward-only program of every node."""
    return merge(free(communicate(evaluation_actions(plan))), plan)


def communicate(orders: Orders) -> dict[StageKey, list[Action]]:
    """Add a SEND right after each producer and a RECV right before each first use.

    So received buffers are held as briefly as possible, and blocking RECVs cannot
    deadlock.
    """
    return {key: _with_transfers(key, order, orders) for key, order in orders.items()}


def _with_transfers(
    key: StageKey, order: Sequence[Action], orders: Orders
) -> list[Action]:
    flow, (r, s) = _flow(orders, key), key
    sources: dict[Buffer, int] = {"x": s - 1, "dy": s + 1}
    targets: dict[Buffer, int] = {"y": s + 1, "dx": s - 1}
    received: set[tuple[Buffer, int | None]] = set()
    out: list[Action] = []
    for action in order:
        read, written = flow[action.op, None]
        m = action.microbatch
        for buffer in read:
            if (r, sources.get(buffer)) in orders and (buffer, m) not in received:
                received.add((buffer, m))
                out.append(Action(Op.RECV, *key, m, buffer, sources[buffer]))
        out.append(action)
        for buffer in written:
            if buffer in targets:
                out.append(Action(Op.SEND, *key, m, buffer, targets[buffer]))
    return out


def reduce(
    orders: Orders, groups: Mapping[Group, tuple[StageKey, ...]]
) -> dict[StageKey, list[Action]]:
    """Add each stage's REDUCEs after its last action, in the order of the groups.

    The last action is always a backward or its SEND, so the gradients are complete.
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


def _freed(order: Sequence[Action], flow: Dataflow) -> list[Action]:
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
