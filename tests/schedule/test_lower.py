# SPDX-License-Identifier: Apache-2.0
"""Lowered programs, against hand-written golden text."""

from collections import Counter
from pathlib import Path

import pytest

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.schedule.programs.action import Action, Op, format_program, parse_program
from hetjax.schedule.programs.check import check
from hetjax.schedule.programs.lower import communicate, lower, lower_evaluation, reduce

GOLDEN = Path(__file__).parent / "golden"


def replica(
    cuts: list[int], nodes: str, microbatches: int, launch_ahead: list[int], first=0
) -> Replica:
    stages = tuple(
        Stage(node=node, devices=(first + s,), layers=(lo, hi), launch_ahead=ahead)
        for s, (lo, hi, node, ahead) in enumerate(
            zip(cuts[:-1], cuts[1:], nodes, launch_ahead, strict=True)
        )
    )
    return Replica(num_microbatches=microbatches, microbatch_size=1, stages=stages)


def plan_of(*replicas: Replica, schedule: str = "1f1b", programs=None) -> Plan:
    return Plan(
        model="m",
        seq_len=8,
        global_batch=sum(replica.num_microbatches for replica in replicas),
        schedule=schedule,
        replicas=replicas,
        programs=programs or {},
    )


THREE_BY_FOUR = replica([0, 1, 2, 3], "abc", 4, [3, 2, 1])
TIED = {"embedding.table": ((0, 0), (0, 2), (1, 0), (1, 1))}
CASES = {
    "1f1b_3x4": (plan_of(THREE_BY_FOUR), {}),
    "gpipe_3x4": (plan_of(THREE_BY_FOUR, schedule="gpipe"), {}),
    "asymmetric_replicas": (
        plan_of(
            replica([0, 2, 4, 6], "abc", 3, [3, 2, 1]),
            replica([0, 3, 6], "ab", 2, [2, 1], first=3),
        ),
        TIED,
    ),
}


def golden(name: str) -> dict[str, list[str]]:
    """Return the lines of each node, which a comment `# node <name>` opens."""
    programs: dict[str, list[str]] = {}
    for line in (GOLDEN / f"{name}.txt").read_text().splitlines():
        if line.startswith("# node "):
            programs[line.removeprefix("# node ")] = []
        elif not line.startswith("#"):
            list(programs.values())[-1].append(line.partition("#")[0].strip())
    return programs


def lines(programs) -> dict[str, list[str]]:
    return {node: format_program(p).splitlines() for node, p in programs.items()}


@pytest.mark.parametrize("name", CASES)
def test_lowered_programs_are_the_golden_ones(name: str) -> None:
    plan, tied = CASES[name]
    assert lines(lower(plan, tied)) == golden(name)


@pytest.mark.parametrize("name", CASES)
def test_the_checker_accepts_the_golden_programs(name: str) -> None:
    plan, tied = CASES[name]
    text = {node: "\n".join(program) for node, program in golden(name).items()}
    programs = {node: parse_program(program) for node, program in text.items()}
    check(programs, plan, tied, rendezvous=len(plan.replicas) == 1)


def test_an_evaluation_is_forward_only_and_holds_one_activation() -> None:
    programs = lower_evaluation(plan_of(replica([0, 1, 2], "ab", 2, [1, 1])))
    assert lines(programs) == {
        "a": [
            "r0.s0.E0",
            "r0.s0.SEND_F0>s1",
            "r0.s0.FREE_y0",
            "r0.s0.E1",
            "r0.s0.SEND_F1>s1",
            "r0.s0.FREE_y1",
        ],
        "b": [
            "r0.s1.RECV_F0<s0",
            "r0.s1.E0",
            "r0.s1.FREE_x0",
            "r0.s1.RECV_F1<s0",
            "r0.s1.E1",
            "r0.s1.FREE_x1",
        ],
    }


def test_a_model_in_one_stage_neither_sends_nor_reduces() -> None:
    programs = lower(
        plan_of(replica([0, 3], "a", 2, [1])), {"embedding.table": ((0, 0),)}
    )
    assert lines(programs)["a"] == [
        "r0.s0.FB0",
        "r0.s0.FB1",
        "r0.s0.NORM",
        "r0.s0.UPDATE",
    ]


def compute_and_receives(programs) -> dict[str, str]:
    """Return the programs without SEND, FREE and all after the last backward."""
    shown = {Op.F, Op.B, Op.FB, Op.RECV}
    return {
        node: " ".join(str(a).split(".")[2] for a in program if a.op in shown)
        for node, program in programs.items()
    }


def test_a_receive_stands_right_before_its_first_use() -> None:
    plan = plan_of(replica([0, 1, 2], "ab", 3, [2, 1]))
    assert compute_and_receives(lower(plan)) == {
        "a": "F0 F1 RECV_B0<s1 B0 F2 RECV_B1<s1 B1 RECV_B2<s1 B2",
        "b": "RECV_F0<s0 FB0 RECV_F1<s0 FB1 RECV_F2<s0 FB2",
    }
    check(lower(plan), plan, rendezvous=True)


def test_split_backwards_are_lowered_with_one_receive_and_late_frees() -> None:
    order = [Action(op, 0, 0, 0) for op in (Op.F, Op.I, Op.W)]
    lowered = communicate({(0, 0): order, (0, 1): [Action(Op.FB, 0, 1, 0)]})
    assert [str(action)[6:] for action in lowered[0, 0]] == [
        "F0",
        "SEND_F0>s1",
        "RECV_B0<s1",
        "I0",
        "W0",
    ]


def test_reduce_adds_groups_in_order_at_the_end_of_their_holders() -> None:
    orders = {(0, 0): [Action(Op.FB, 0, 0, 0)], (1, 0): [Action(Op.FB, 1, 0, 0)]}
    both = ((0, 0), (1, 0))
    reduced = reduce(orders, {(2, 4): both, (0, 2): both, "embedding.table": both})
    assert [str(action)[6:] for action in reduced[1, 0]] == [
        "FB0",
        "REDUCE[2:4]",
        "REDUCE[0:2]",
        "REDUCE[embedding.table]",
    ]


def test_a_schedule_holds_so_many_actions_of_each_kind() -> None:
    # 2 stages x 4 microbatches of F and B, one of FB; 2 edges x 4 x 2 directions.
    programs = lower(CASES["1f1b_3x4"][0])
    assert Counter(action.op for p in programs.values() for action in p) == {
        Op.F: 8,
        Op.B: 8,
        Op.FB: 4,
        Op.SEND: 16,
        Op.RECV: 16,
        Op.NORM: 3,
        Op.UPDATE: 3,
        Op.FREE: 4 * (3 + 5 + 2),
    }


def test_a_program_of_the_plan_replaces_the_generated_one() -> None:
    stages = replica([0, 1, 2], "ab", 2, [2, 1])
    generated = lower(plan_of(stages, schedule="gpipe"))
    text = "# by hand\n" + format_program(generated["a"])
    # 1F1B with launch-ahead 2 orders two microbatches as GPipe does.
    assert lower(plan_of(stages, programs={"a": text})) == generated


def test_a_program_of_the_plan_is_checked() -> None:
    stages = replica([0, 1, 2], "ab", 2, [2, 1])
    text = format_program(lower(plan_of(stages))["a"]).replace("r0.s0.F1\n", "")
    with pytest.raises(BadInput, match="node 'a'.*r0.s0.F1.*missing"):
        lower(plan_of(stages, programs={"a": text}))
    with pytest.raises(BadInput, match="program of node 'b', line 1: 'r0.s1'"):
        lower(plan_of(stages, programs={"b": "r0.s1"}))


def test_launch_ahead_that_rises_is_refused_not_hung() -> None:
    with pytest.raises(BadInput, match=r"r0\.s0\.RECV_B0<s1.*r0\.s1\.RECV_F1<s0"):
        lower(plan_of(replica([0, 1, 2, 3], "abc", 2, [1, 2, 1])))
