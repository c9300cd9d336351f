# SPDX-License-Identifier: Apache-2.0
"""The verdict on a reason to roll back that has occurred before."""

import pytest

from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.runtime.execution.checking.checks import Disagreement
from hetjax.training.recovery.rollback import (
    PastRollback,
    RollbackVerdict,
    disagreed,
    judge_rollback,
)


@pytest.mark.parametrize(
    ("why", "nodes", "expected"),
    [
        ("disagreed", ("a",), ["go back", "leave the nodes"]),
        ("disagreed", (), ["go back", "go back", "give up"]),
        ("spiked", (), ["go back", "go back", "give up"]),
    ],
)
def test_the_same_again_and_again_from_one_checkpoint_is_no_chance(
    why: str, nodes: tuple[str, ...], expected: list[RollbackVerdict]
):
    before, found = list[PastRollback](), list[RollbackVerdict]()
    for _ in expected:
        now = PastRollback(why, nodes, 4)
        found.append(judge_rollback(before, now))
        before.append(now)
    assert found == expected
    # the count restarts for another checkpoint or another node
    assert judge_rollback(before, PastRollback(why, nodes, 8)) == "go back"
    assert judge_rollback(before, PastRollback("disagreed", ("b",), 4)) == "go back"


def test_a_disagreement_is_told_in_the_words_of_the_plan():
    replicas = tuple(
        Replica(
            num_microbatches=1,
            microbatch_size=1,
            stages=(Stage(node=node, devices=(0,), layers=(0, 4), launch_ahead=1),),
        )
        for node in "abc"
    )
    plan = Plan(model="m", seq_len=1, global_batch=3, replicas=replicas)
    holders = ((0, 0), (1, 0), (2, 0))
    found = [
        Disagreement(group=(0, 4), holders=holders, odd=((1, 0),)),
        Disagreement(group="embed.table", holders=holders[:2], odd=()),
    ]
    bad = disagreed(7, found, plan)
    assert bad.step == 7 and bad.nodes == ("b",)
    layers = "layers 0 to 3, embed.table"
    words = f"different bits of {layers} after step 7 on b (held by a, b, c)"
    assert bad.got == words
    unnamed = disagreed(7, found[1:], plan)
    assert unnamed.nodes == () and "a and b (unknown which)" in unnamed.got
