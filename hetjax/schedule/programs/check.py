# SPDX-License-Identifier: Apache-2.0
"""Checks that programs are a correct and safe execution of a plan.

Owns the rules for each stage and each edge: every action occurs exactly once, on the
node of the plan; every buffer exists when it is read and is freed in the end; forwards
in flight stay within the limit; REDUCE comes before NORM before UPDATE; every SEND has
its RECV. Programs may be written by hand, so a broken rule raises BadInput, which names
the node, the action and the rule. Does not own rules that involve all workers at once
(`deadlock.py`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, reduce_groups
from hetjax.schedule.programs.action import (
    COMPUTE,
    NO_ACCESS,
    UNTIED,
    Action,
    Buffer,
    Group,
    Op,
    Programs,
    StageKey,
    Tied,
    dataflow,
)
from hetjax.schedule.programs.deadlock import check_deadlock, check_total_order
from hetjax.schedule.programs.generate import in_flight_limit

_TRAINING = frozenset(Op) - {Op.E}
_EVALUATION = frozenset({Op.E, Op.SEND, Op.RECV, Op.FREE})


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageFacts:
    """The plan's facts about one stage; `groups` are those that it must reduce."""

    key: StageKey
    node: str
    last: bool
    num_microbatches: int
    limit: int
    groups: frozenset[Group]
    ops: frozenset[Op]


_Lines = list[tuple[int, Action]]  # (line of the node's program, action), from line 1


def check(
    programs: Programs, plan: Plan, tied: Tied = UNTIED, *, rendezvous: bool = False
) -> None:
    """Raise BadInput unless the programs are a correct training step of the plan.

    With `rendezvous`, they must also run without buffered SENDs (`deadlock.py`).
    """
    groups = reduce_groups(plan, tied)
    limits = {(r, s): in_flight_limit(plan, r, s) for r, s, _ in plan.stages()}
    facts = _stage_facts(plan, groups, limits, _TRAINING)
    stages = _by_stage(programs, facts)
    for key, lines in stages.items():
        for rule in (_once, _all_trained, _buffers, _in_flight, _commit):
            _apply(rule, facts[key], lines)
    _check_edges(stages, facts)
    check_total_order(programs)
    check_deadlock(programs, plan, groups, limits, rendezvous=rendezvous)


def check_evaluation(programs: Programs, plan: Plan) -> None:
    """Raise BadInput unless the programs are a correct evaluation of the plan."""
    # Nothing is kept for a backward, so two messages per edge suffice for overlap.
    limits = {(r, s): 2 for r, s, _ in plan.stages()}
    facts = _stage_facts(plan, {}, limits, _EVALUATION)
    stages = _by_stage(programs, facts)
    for key, lines in stages.items():
        for rule in (_once, _all_evaluated, _buffers):
            _apply(rule, facts[key], lines)
    _check_edges(stages, facts)
    check_deadlock(programs, plan, {}, limits)


def _stage_facts(
    plan: Plan,
    groups: dict[Group, tuple[StageKey, ...]],
    limits: dict[StageKey, int],
    ops: frozenset[Op],
) -> dict[StageKey, _StageFacts]:
    return {
        (r, s): _StageFacts(
            key=(r, s),
            node=stage.node,
            last=s == len(plan.replicas[r].stages) - 1,
            num_microbatches=plan.replicas[r].num_microbatches,
            limit=limits[r, s],
            groups=frozenset(g for g, holders in groups.items() if (r, s) in holders),
            ops=ops,
        )
        for r, s, stage in plan.stages()
    }


# A rule yields problems: (line, action, problem, what is allowed). Line 0 means that
# the action is missing.
_Problem = tuple[int, Action, str, str]
_Rule = Callable[[_StageFacts, _Lines], Iterator[_Problem]]


def _apply(rule: _Rule, facts: _StageFacts, lines: _Lines) -> None:
    for line, action, problem, allowed in rule(facts, lines):
        raise _refusal(facts.node, line, action, problem, allowed)


def _refusal(
    node: str, line: int, action: Action, problem: str, allowed: str
) -> BadInput:
    where = f"action {line}" if line else "action"
    return BadInput(
        got=f"program of node {node!r}, {where} {action}: {problem}",
        allowed=allowed,
        fix=f"correct {action} in the program of {node!r}, or leave programs[{node!r}] "
        "out of the plan to have it generated",
    )


def _by_stage(
    programs: Programs, facts: dict[StageKey, _StageFacts]
) -> dict[StageKey, _Lines]:
    """Return the lines of each stage; raise BadInput for actions that do not fit it."""
    nodes = {fact.node for fact in facts.values()}
    if programs.keys() != nodes:
        raise BadInput(
            got=f"programs for the nodes {', '.join(sorted(programs))}",
            allowed=f"one program for each of {', '.join(sorted(nodes))}",
            fix="give programs for exactly the nodes of the plan's stages",
        )
    stages: dict[StageKey, _Lines] = {key: [] for key in facts}
    for node, program in programs.items():
        for line, action in enumerate(program, start=1):
            fact = facts.get(action.key)
            problem = (
                "the plan has no such stage"
                if fact is None
                else f"the stage is on node {fact.node!r}"
                if fact.node != node
                else _malformed(action, fact)
            )
            if problem:
                allowed = (
                    "actions of the node's own stages, microbatches and neighbours"
                )
                raise _refusal(node, line, action, problem, allowed)
            stages[action.key].append((line, action))
    return stages


def _malformed(action: Action, fact: _StageFacts) -> str | None:
    """Return the problem with an action's operands, or None."""
    op, m = action.op, action.microbatch
    if op not in fact.ops:
        return f"{op} does not belong here"
    if op is Op.REDUCE:
        known = action.group in fact.groups
        return None if known else "the stage shares no such group with another stage"
    if op in (Op.NORM, Op.UPDATE):
        return None
    if m is None or not 0 <= m < fact.num_microbatches:
        return f"the replica has microbatches 0 to {fact.num_microbatches - 1}"
    if op in (Op.SEND, Op.RECV):
        downstream = action.buffer == ("y" if op is Op.SEND else "dy")
        peer = fact.key[1] + (1 if downstream else -1)
        if peer < 0 or (downstream and fact.last):
            return "the pipeline ends at this stage"
        if action.peer != peer:
            return f"the other stage must be s{peer}"
    return None


def _once(facts: _StageFacts, lines: _Lines) -> Iterator[_Problem]:
    seen: set[tuple[Op, int | None, Buffer | None, Group | None]] = set()
    for line, action in lines:
        what = action.op, action.microbatch, action.buffer, action.group
        if what in seen:
            yield line, action, "appears twice", "every action once per step"
        seen.add(what)


def _all_trained(facts: _StageFacts, lines: _Lines) -> Iterator[_Problem]:
    """Yield what differs from F, I and W, or FB (last stage) or F and B (others)."""
    done = _compute_ops(lines)
    allowed = "per microbatch: F, I and W; or FB on the last stage, F and B on others"
    for m in range(facts.num_microbatches):
        needed = {Op.FB} if facts.last else {Op.F, Op.B}
        if {Op.I, Op.W} & done[m].keys():
            needed = {Op.F, Op.I, Op.W}
        for op in sorted(needed | done[m].keys()):
            problem = "is missing" if op in needed else "is not needed"
            if op not in needed or op not in done[m]:
                yield done[m].get(op, 0), Action(op, *facts.key, m), problem, allowed


def _all_evaluated(facts: _StageFacts, lines: _Lines) -> Iterator[_Problem]:
    done = _compute_ops(lines)
    for m in range(facts.num_microbatches):
        if Op.E not in done[m]:
            yield 0, Action(Op.E, *facts.key, m), "is missing", "one E per microbatch"


def _compute_ops(lines: _Lines) -> dict[int | None, dict[Op, int]]:
    """Return the line of each compute op, by microbatch."""
    done: dict[int | None, dict[Op, int]] = defaultdict(dict)
    for line, action in lines:
        if action.op in COMPUTE:
            done[action.microbatch][action.op] = line
    return done


def _buffers(facts: _StageFacts, lines: _Lines) -> Iterator[_Problem]:
    """Yield reads of missing buffers, overwritten buffers, and missing FREEs."""
    flow = dataflow(first=facts.key[1] == 0, last=facts.last)
    allowed = "buffers that are read after they are made and before they are freed"
    live: dict[tuple[Buffer | None, int | None], int] = {}
    for line, action in lines:
        m = action.microbatch
        if action.op is Op.FREE:
            if live.pop((action.buffer, m), 0) == 0:
                yield line, action, f"{action.buffer}{m} does not exist", allowed
            continue
        read, written = flow.get((action.op, action.buffer), NO_ACCESS)
        for buffer in read:
            if (buffer, m) not in live:
                yield line, action, f"reads {buffer}{m}, which does not exist", allowed
        for buffer in written:
            if (buffer, m) in live:
                yield line, action, f"overwrites {buffer}{m}", allowed
            live[buffer, m] = line
    for (buffer, m), line in live.items():
        missing = Action(Op.FREE, *facts.key, m, buffer)
        yield 0, missing, f"{buffer}{m} of action {line} is never freed", allowed


def _in_flight(facts: _StageFacts, lines: _Lines) -> Iterator[_Problem]:
    in_flight = 0
    for line, action in lines:
        if action.op is Op.F:
            in_flight += 1
        elif action.op in (Op.B, Op.W):
            in_flight -= 1
        if in_flight > facts.limit:
            problem = f"puts {in_flight} forwards in flight"
            allowed = f"at most {facts.limit} (launch_ahead; all under gpipe)"
            yield line, action, problem, allowed


def _commit(facts: _StageFacts, lines: _Lines) -> Iterator[_Problem]:
    """Yield breaches of the order: last backward, REDUCEs, NORM, UPDATE."""
    allowed = "the last B, FB or W, then the REDUCEs, then NORM, then UPDATE"
    backwards, reduced, norm, update = facts.num_microbatches, set(), False, False
    for line, action in lines:
        op = action.op
        if op in (Op.B, Op.FB, Op.W):
            backwards -= 1
        elif op in (Op.REDUCE, Op.NORM) and backwards:
            yield line, action, f"{backwards} backwards are still to come", allowed
        elif op is Op.REDUCE:
            reduced.add(action.group)
        elif op is Op.NORM:
            norm = True
            for group in facts.groups - reduced:
                late = Action(Op.REDUCE, *facts.key, group=group)
                yield line, action, f"{late} does not come before it", allowed
        elif op is Op.UPDATE:
            update = True
            if not norm:
                yield line, action, "NORM does not come before it", allowed
    for there, op in ((norm, Op.NORM), (update, Op.UPDATE)):
        if not there:
            yield 0, Action(op, *facts.key), "is missing", allowed


def _check_edges(
    stages: dict[StageKey, _Lines], facts: dict[StageKey, _StageFacts]
) -> None:
    """Raise BadInput unless both ends of each edge have the same messages in order."""
    sends: dict[tuple[int, int, int], _Lines] = defaultdict(list)
    receives: dict[tuple[int, int, int], _Lines] = defaultdict(list)
    for lines in stages.values():
        for line, action in lines:
            if action.op is Op.SEND:
                sends[action.message[:3]].append((line, action))
            elif action.op is Op.RECV:
                receives[action.message[:3]].append((line, action))
    for edge in sorted(sends.keys() | receives.keys()):
        _check_edge(sends[edge], receives[edge], facts)


def _check_edge(
    sends: _Lines, receives: _Lines, facts: dict[StageKey, _StageFacts]
) -> None:
    sent = {action.message for _, action in sends}
    received = {action.message for _, action in receives}
    pairs = zip(sends, receives, strict=False)
    odd = (
        [(*pair, "has no RECV") for pair in sends if pair[1].message not in received]
        + [(*pair, "has no SEND") for pair in receives if pair[1].message not in sent]
        + [
            (*one, f"is out of order: the other end has {other[1]} there")
            for one, other in pairs
            if one[1].message != other[1].message
        ]
    )
    for line, action, problem in odd:
        allowed = "one RECV per SEND, in the same order at both ends of an edge"
        raise _refusal(facts[action.key].node, line, action, problem, allowed)
