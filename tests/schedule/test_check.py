# SPDX-License-Identifier: Apache-2.0
"""The checker on random plans and random damage, against an independent oracle."""

from collections import Counter, defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.schedule.programs.action import Action, Op, parse_program
from hetjax.schedule.programs.check import check, check_evaluation
from hetjax.schedule.programs.lower import lower, lower_evaluation

FAST = settings(deadline=None, max_examples=150)


@st.composite
def replicas(draw, num_layers: int, first_device: int, own_nodes: bool) -> Replica:
    num_stages = draw(st.integers(1, min(4, num_layers)))
    inner = draw(
        st.lists(
            st.integers(1, num_layers - 1),
            min_size=num_stages - 1,
            max_size=num_stages - 1,
            unique=True,
        )
        if num_stages > 1
        else st.just([])
    )
    steps = [draw(st.integers(0, 3)) for _ in inner]
    launch_ahead = list(accumulate(steps, initial=1))[::-1]
    stages = tuple(
        Stage(
            node=f"n{first_device + s}" if own_nodes else draw(st.sampled_from("abc")),
            devices=(first_device + s,),
            layers=layers,
            launch_ahead=launch_ahead[s],
        )
        for s, layers in enumerate(pairwise([0, *sorted(inner), num_layers]))
    )
    return Replica(
        num_microbatches=draw(st.integers(1, 6)), microbatch_size=1, stages=stages
    )


@st.composite
def plans(draw, own_nodes: bool = False) -> Plan:
    num_layers = draw(st.integers(1, 6))
    of_plan = tuple(
        draw(replicas(num_layers, 4 * r, own_nodes))
        for r in range(draw(st.integers(1, 3)))
    )
    return Plan(
        model="m",
        seq_len=8,
        global_batch=sum(replica.num_microbatches for replica in of_plan),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        replicas=of_plan,
    )


def tied_ends(plan: Plan) -> dict:
    ends = {
        (r, s) for r, rep in enumerate(plan.replicas) for s in (0, len(rep.stages) - 1)
    }
    return {"embedding.table": tuple(sorted(ends))}


tied_or_not = st.sampled_from([tied_ends, lambda plan: {}])


@FAST
@given(plans(), tied_or_not)
def test_generated_programs_are_accepted(plan: Plan, tied) -> None:
    check(lower(plan, tied(plan)), plan, tied(plan))
    check_evaluation(lower_evaluation(plan), plan)


@FAST
@given(plans(own_nodes=True), tied_or_not)
def test_with_one_stage_per_node_no_send_needs_a_buffer_but_in_exchanges(
    plan: Plan, tied
) -> None:
    programs = lower(plan, tied(plan))
    check(programs, plan, tied(plan), rendezvous=True)


@FAST
@given(plans())
def test_as_many_forwards_are_in_flight_as_launch_ahead_allows(plan: Plan) -> None:
    most, now = Counter(), Counter()
    for program in lower(plan).values():
        for action in program:
            now[action.key] += {Op.F: 1, Op.B: -1}.get(action.op, 0)
            most[action.key] = max(most[action.key], now[action.key])
    for r, s, stage in plan.stages():
        count = plan.replicas[r].num_microbatches
        ahead = count if plan.schedule == "gpipe" else min(stage.launch_ahead, count)
        last = s == len(plan.replicas[r].stages) - 1
        assert most[r, s] == (0 if last else ahead)


def verb(action: Action) -> str:
    return str(action).split(".", 2)[2].rstrip("0123456789").partition("[")[0]


def without_peer(action: Action) -> str:
    return verb(replace(action, peer=None))


# Later action -> earlier actions of the same stage and microbatch that it depends on.
DEPENDS = {
    "F": {"RECV_F"},
    "FB": {"RECV_F"},
    "B": {"RECV_B", "F", "RECV_F"},
    "SEND_F": {"F"},
    "SEND_B": {"B", "FB"},
    "FREE_x": {"B", "FB", "F", "RECV_F"},
    "FREE_saved": {"F", "B"},
    "FREE_y": {"F", "SEND_F"},
    "FREE_dy": {"B", "RECV_B"},
    "FREE_dx": {"B", "FB", "SEND_B"},
    "NORM": {"REDUCE"},
    "UPDATE": {"NORM"},
}


def pick(draw, programs) -> tuple[str, int]:
    node = draw(st.sampled_from(sorted(programs)))
    return node, draw(st.integers(0, len(programs[node]) - 1))


def drop(draw, programs, plan) -> None:
    node, index = pick(draw, programs)
    del programs[node][index]


def duplicate(draw, programs, plan) -> None:
    node, index = pick(draw, programs)
    other = draw(st.integers(0, len(programs[node])))
    programs[node].insert(other, programs[node][index])


def change_microbatch(draw, programs, plan) -> None:
    node, index = pick(draw, programs)
    action = programs[node][index]
    if action.microbatch is None:
        return drop(draw, programs, plan)
    moved = action.microbatch + draw(st.sampled_from([-1, 1]))
    programs[node][index] = replace(action, microbatch=moved)


def move_to_another_stage(draw, programs, plan) -> None:
    node, index = pick(draw, programs)
    action = programs[node][index]
    programs[node][index] = replace(action, stage=action.stage + 1)


def wrong_peer(draw, programs, plan) -> None:
    spots = [
        (node, index)
        for node, program in programs.items()
        for index, action in enumerate(program)
        if action.peer is not None
    ]
    if not spots:
        return drop(draw, programs, plan)
    node, index = draw(st.sampled_from(spots))
    action = programs[node][index]
    peers = set(range(-1, 5)) - {action.peer}
    peer = draw(st.sampled_from(sorted(peers)))
    programs[node][index] = replace(action, peer=peer)


def dependent_pairs(programs) -> list[tuple[str, int, int]]:
    return [
        (node, i, j)
        for node, program in programs.items()
        for j, later in enumerate(program)
        for i, early in enumerate(program[:j])
        if (early.key, early.microbatch) == (later.key, later.microbatch)
        and without_peer(early) in DEPENDS.get(without_peer(later), ())
    ]


def swap_dependent(draw, programs, plan) -> None:
    node, i, j = draw(st.sampled_from(dependent_pairs(programs)))
    program = programs[node]
    program[i], program[j] = program[j], program[i]


def free_too_early(draw, programs, plan) -> None:
    pairs = [
        (node, i, j)
        for node, i, j in dependent_pairs(programs)
        if programs[node][j].op is Op.FREE
    ]
    if not pairs:
        return drop(draw, programs, plan)
    node, i, j = draw(st.sampled_from(pairs))
    programs[node].insert(draw(st.integers(0, i)), programs[node].pop(j))


DAMAGES = [
    drop,
    duplicate,
    change_microbatch,
    move_to_another_stage,
    wrong_peer,
    swap_dependent,
    free_too_early,
]


@pytest.mark.parametrize("damage", DAMAGES)
@settings(deadline=None, max_examples=60)
@given(data=st.data(), plan=plans(), tied=tied_or_not)
def test_a_damaged_program_is_refused(damage, data, plan: Plan, tied) -> None:
    programs = {node: list(p) for node, p in lower(plan, tied(plan)).items()}
    damage(data.draw, programs, plan)
    with pytest.raises(BadInput):
        check({node: tuple(p) for node, p in programs.items()}, plan, tied(plan))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), plan=plans())
def test_a_damaged_evaluation_is_refused(data, plan: Plan) -> None:
    programs = {node: list(p) for node, p in lower_evaluation(plan).items()}
    data.draw(st.sampled_from([drop, duplicate, wrong_peer]))(data.draw, programs, plan)
    with pytest.raises(BadInput):
        check_evaluation({node: tuple(p) for node, p in programs.items()}, plan)


def runs_to_the_end(programs, groups_of) -> bool:
    """Oracle: no cycle among `(node, index)` (the action is done) and complete groups.

    It uses the rules in words: program order, SEND before RECV, a group complete once
    all holders have reached it, NORM after its stage's groups, UPDATE after NORM.
    """
    before = defaultdict(set)
    sent = {
        (a.replica, a.stage, a.peer, a.microbatch): (node, index)
        for node, program in programs.items()
        for index, a in enumerate(program)
        if a.op is Op.SEND
    }
    for node, program in programs.items():
        last = {
            a.group: i for i, a in enumerate(program) if verb(a) in ("REDUCE", "NORM")
        }
        for index, a in enumerate(program):
            done = (node, index)
            before[done].add((node, index - 1))
            if a.op is Op.RECV:
                before[done].add(sent[a.replica, a.peer, a.stage, a.microbatch])
            if a.op is Op.UPDATE:
                before[done].add(("complete", None))
            if a.op in (Op.REDUCE, Op.NORM):
                before["complete", a.group].add((node, index - 1))
                if last[a.group] == index:
                    before[done].add(("complete", a.group))
            if a.op is Op.NORM:
                needs = {("complete", group) for group in groups_of[a.key]}
                before["complete", None] |= needs
                before[done] |= needs
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


def shuffled(draw, program) -> tuple[Action, ...]:
    """Return another interleaving of the same stages, with each stage's order kept."""
    stages = defaultdict(list)
    for action in program:
        stages[action.key].append(action)
    turns = draw(st.permutations([action.key for action in program]))
    return tuple(stages[key].pop(0) for key in turns)


@settings(deadline=None, max_examples=250)
@given(data=st.data(), plan=plans(), tied=tied_or_not)
def test_any_interleaving_is_refused_exactly_when_it_deadlocks(
    data, plan: Plan, tied
) -> None:
    programs = lower(plan, tied(plan))
    if data.draw(st.booleans()):
        programs = {node: shuffled(data.draw, p) for node, p in programs.items()}
    else:  # a few late swaps give programs near the border between valid and deadlocked
        programs = {node: list(p) for node, p in programs.items()}
        for _ in range(data.draw(st.integers(1, 6))):
            node, index = pick(data.draw, programs)
            one, other = programs[node][index - 1], programs[node][index]
            if index and one.key != other.key:
                programs[node][index - 1 : index + 1] = [other, one]
        programs = {node: tuple(p) for node, p in programs.items()}
    groups_of = defaultdict(set)
    for program in programs.values():
        for action in program:
            if action.op is Op.REDUCE:
                groups_of[action.key].add(action.group)
    try:
        check(programs, plan, tied(plan))
        accepted = True
    except BadInput:
        accepted = False
    assert accepted == runs_to_the_end(programs, groups_of)


def by_hand(nodes: list[list[str]], num_microbatches=1, launch_ahead=1) -> Plan:
    """Return a plan of one-layer stages, with one replica per list of node names."""
    of_plan = tuple(
        Replica(
            num_microbatches=num_microbatches,
            microbatch_size=1,
            stages=tuple(
                Stage(
                    node=node,
                    devices=(4 * r + s,),
                    layers=(s, s + 1),
                    launch_ahead=launch_ahead if s < len(names) - 1 else 1,
                )
                for s, node in enumerate(names)
            ),
        )
        for r, names in enumerate(nodes)
    )
    return Plan(model="m", seq_len=8, global_batch=1, replicas=of_plan)


def programs_of(**text: str):
    """Parse programs from words like `r0.s0: F0 SEND_F0>s1`; a colon sets the stage."""
    programs = {}
    for node, words in text.items():
        stage, actions = "", []
        for word in words.split():
            if word.endswith(":"):
                stage = word[:-1]
            else:
                actions.append(f"{stage}.{word}")
        programs[node] = parse_program("\n".join(actions))
    return programs


FIRST = "F0 SEND_F0>s1 FREE_y0 RECV_B0<s1 B0 FREE_saved0 FREE_dy0"
LAST = "RECV_F0<s0 FB0 FREE_x0 SEND_B0>s0 FREE_dx0"


def test_crossed_reduce_orders_of_two_workers_are_refused_with_the_cycle() -> None:
    plan = by_hand([["a", "a"], ["b", "b"]])

    def program(r: int, *reduces: str) -> str:
        s0, s1 = f"r{r}.s0:", f"r{r}.s1:"
        both = f"{s0} F0 SEND_F0>s1 FREE_y0 {s1} {LAST} {s0} RECV_B0<s1 B0"
        both += " FREE_saved0 FREE_dy0"
        return f"{both} {' '.join(reduces)} {s0} NORM {s1} NORM UPDATE {s0} UPDATE"

    high, low = "r{}.s1: REDUCE[1:2]", "r{}.s0: REDUCE[0:1]"
    a = program(0, high.format(0), low.format(0))
    check(programs_of(a=a, b=program(1, high.format(1), low.format(1))), plan)
    with pytest.raises(BadInput) as error:
        check(programs_of(a=a, b=program(1, low.format(1), high.format(1))), plan)
    ordered = "node 'a' has r0.s1.REDUCE[1:2] before r0.s0.REDUCE[0:1]"
    crossed = "node 'b' has r1.s0.REDUCE[0:1] before r1.s1.REDUCE[1:2]"
    assert ordered in error.value.got and crossed in error.value.got


def test_workers_that_wait_for_each_others_activations_are_refused() -> None:
    plan = by_hand([["a", "b"], ["b", "a"]])
    end = "REDUCE[0:1] NORM"
    good = {
        "a": f"r0.s0: F0 SEND_F0>s1 FREE_y0 r1.s1: {LAST} r0.s0: RECV_B0<s1 B0 "
        "FREE_saved0 FREE_dy0 r1.s1: REDUCE[1:2] r0.s0: REDUCE[0:1] NORM r1.s1: NORM "
        "UPDATE r0.s0: UPDATE",
        "b": f"r1.s0: F0 SEND_F0>s1 FREE_y0 r0.s1: {LAST} r1.s0: RECV_B0<s1 B0 "
        "FREE_saved0 FREE_dy0 r0.s1: REDUCE[1:2] r1.s0: REDUCE[0:1] NORM r0.s1: NORM "
        "UPDATE r1.s0: UPDATE",
    }
    check(programs_of(**good), plan)
    bad = {
        "a": f"r1.s1: {LAST} REDUCE[1:2] r0.s0: {FIRST} {end} r1.s1: NORM UPDATE "
        "r0.s0: UPDATE",
        "b": f"r0.s1: {LAST} REDUCE[1:2] r1.s0: {FIRST} {end} r0.s1: NORM UPDATE "
        "r1.s0: UPDATE",
    }
    with pytest.raises(BadInput) as error:
        check(programs_of(**bad), plan)
    assert error.value.got == (
        "deadlock: node 'a' at action 1 r1.s1.RECV_F0<s0, "
        "node 'b' at action 1 r0.s1.RECV_F0<s0"
    )


def test_a_receive_before_the_send_of_the_same_worker_is_refused() -> None:
    plan = by_hand([["a", "a"]])
    bad = f"r0.s1: {LAST} r0.s0: {FIRST} NORM r0.s1: NORM UPDATE r0.s0: UPDATE"
    with pytest.raises(BadInput, match=r"deadlock: .*action 1 r0\.s1\.RECV_F0<s0"):
        check(programs_of(a=bad), plan)


def test_update_before_the_norm_of_the_workers_other_stage_is_refused() -> None:
    plan = by_hand([["a", "a"]])
    start = f"r0.s0: F0 SEND_F0>s1 FREE_y0 r0.s1: {LAST} r0.s0: RECV_B0<s1 B0"
    bad = f"{start} FREE_saved0 FREE_dy0 NORM UPDATE r0.s1: NORM UPDATE"
    with pytest.raises(BadInput, match=r"deadlock: .*r0\.s0\.UPDATE"):
        check(programs_of(a=bad), plan)


def test_a_ring_of_sends_needs_buffers_and_is_refused_under_rendezvous() -> None:
    ring = [["a", "b"], ["b", "c"], ["c", "a"]]
    plan = by_hand(ring)
    programs = lower(plan)
    check(programs, plan)
    with pytest.raises(
        BadInput, match="deadlock: .*SEND_F0>s1.*SEND_F0>s1.*SEND_F0>s1"
    ):
        check(programs, plan, rendezvous=True)


def test_opposite_sends_of_two_workers_are_exchanged_under_rendezvous() -> None:
    plan = by_hand([["a", "b"]], num_microbatches=2, launch_ahead=2)
    s0 = "r0.s0: F0 SEND_F0>s1 FREE_y0 F1 SEND_F1>s1 FREE_y1 " + " ".join(
        f"RECV_B{m}<s1 B{m} FREE_saved{m} FREE_dy{m}" for m in (0, 1)
    )
    s1 = "r0.s1: " + " ".join(
        f"RECV_F{m}<s0 FB{m} FREE_x{m} SEND_B{m}>s0 FREE_dx{m}" for m in (0, 1)
    )
    # Stage 0 waits at SEND_F1 while stage 1 waits at SEND_B0.
    programs = programs_of(a=f"{s0} NORM UPDATE", b=f"{s1} NORM UPDATE")
    check(programs, plan, rendezvous=True)


def test_forwards_above_launch_ahead_are_refused() -> None:
    plan = by_hand([["a", "b"]], num_microbatches=2, launch_ahead=2)
    tight = by_hand([["a", "b"]], num_microbatches=2, launch_ahead=1)
    with pytest.raises(BadInput) as error:
        check(lower(plan), tight)
    assert "r0.s0.F1: puts 2 forwards in flight" in error.value.got
    assert "at most 1" in error.value.allowed


def test_messages_in_another_order_than_received_are_refused() -> None:
    plan = by_hand([["a", "b"]], num_microbatches=2, launch_ahead=2)
    programs = lower(plan)
    swapped = tuple(
        replace(action, microbatch=1 - action.microbatch)
        if action.microbatch is not None
        else action
        for action in programs["b"]
    )
    with pytest.raises(BadInput, match="same order at both ends"):
        check({**programs, "b": swapped}, plan)


def test_split_backwards_are_accepted_and_w_must_follow_i() -> None:
    plan = by_hand([["a", "b"]])
    s1 = f"r0.s1: {LAST} NORM UPDATE"
    head, tail = "r0.s0: F0 SEND_F0>s1 FREE_y0 RECV_B0<s1", "FREE_half0 NORM UPDATE"
    whole = "I0 FREE_saved0 FREE_dy0 W0"
    check(programs_of(a=f"{head} {whole} {tail}", b=s1), plan)
    with pytest.raises(BadInput, match="W0: reads half0, which does not exist"):
        early = "W0 I0 FREE_saved0 FREE_dy0"
        check(programs_of(a=f"{head} {early} {tail}", b=s1), plan)
    with pytest.raises(BadInput, match="B0: is not needed"):
        both = "I0 B0 FREE_saved0 FREE_dy0 W0"
        check(programs_of(a=f"{head} {both} {tail}", b=s1), plan)
    with pytest.raises(BadInput, match="FREE_half0: half0 of action 5 is never freed"):
        check(programs_of(a=f"{head} {whole} NORM UPDATE", b=s1), plan)


def test_the_last_stage_may_split_its_backward_but_not_do_f_and_b() -> None:
    plan = by_hand([["a", "b"]])
    s0 = "r0.s0: F0 SEND_F0>s1 FREE_y0 RECV_B0<s1 B0 FREE_saved0 FREE_dy0 NORM UPDATE"
    head, tail = "r0.s1: RECV_F0<s0 F0", "SEND_B0>s0 FREE_dx0"
    split = f"I0 FREE_x0 FREE_saved0 {tail} W0 FREE_half0"
    check(programs_of(a=s0, b=f"{head} {split} NORM UPDATE"), plan)
    whole = f"B0 FREE_x0 FREE_saved0 {tail}"
    with pytest.raises(BadInput, match="B0: is not needed"):
        check(programs_of(a=s0, b=f"{head} {whole} NORM UPDATE"), plan)
    with pytest.raises(BadInput, match="W0: is missing"):
        half = split.replace("W0 ", "")
        check(programs_of(a=s0, b=f"{head} {half} NORM UPDATE"), plan)


def test_evaluation_and_training_actions_do_not_mix() -> None:
    plan = by_hand([["a", "b"]])
    with pytest.raises(BadInput, match="E does not belong here"):
        check(lower_evaluation(plan), plan)
    with pytest.raises(BadInput, match="F does not belong here"):
        check_evaluation(lower(plan), plan)


def test_a_program_for_an_unknown_or_missing_node_is_refused() -> None:
    plan = by_hand([["a", "b"]])
    programs = lower(plan)
    with pytest.raises(BadInput, match="nodes a, b, c"):
        check({**programs, "c": ()}, plan)
    with pytest.raises(BadInput, match="one program for each of a, b"):
        check({"a": programs["a"]}, plan)
