# SPDX-License-Identifier: Apache-2.0
"""The decisions on lost workers and leaving nodes."""

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.training.recovery.membership import staying
from hetjax.training.recovery.recovered import (
    MOST_LOSSES,
    MOST_OF_A_NODE,
    Losses,
    judge_loss,
)

CLUSTER = Cluster(
    name="three",
    nodes=tuple(Node(name=name, device="H20", count=1) for name in "abc"),
)


def verdicts(nodes: str) -> list[str]:
    losses, found = Losses(), []
    for node in nodes:
        losses = losses.with_one_of(node)
        found.append(judge_loss(losses, node, recovers=True))
        if found[-1] == "leave the node":
            losses = losses.without(node)
    return found


def test_a_node_that_is_lost_again_and_again_has_to_leave():
    assert verdicts("aaa") == ["start again"] * (MOST_OF_A_NODE - 1) + [
        "leave the node"
    ]
    assert verdicts("abab") == ["start again"] * 4


def test_too_many_losses_in_all_end_the_run_unless_a_node_that_left_had_them():
    assert verdicts("ababcc") == ["start again"] * MOST_LOSSES + ["give up"]
    assert verdicts("aaabbcc")[-1] == "start again"


def test_without_recovery_the_first_loss_ends_the_run():
    assert judge_loss(Losses({"a": 1}), "a", recovers=False) == "give up"


@pytest.mark.parametrize(
    ("leaving", "names", "still"),
    [
        ("", "abc", ""),
        ("b", "ac", "b"),
        ("bx", "ac", "b"),
        ("x", "abc", ""),
        ("abc", "abc", "abc"),
    ],
)
def test_who_leaves_is_left_out_until_it_is_gone_but_not_all(
    leaving: str, names: str, still: str
):
    found, left = staying(CLUSTER, frozenset(leaving))
    assert "".join(node.name for node in found.nodes) == names
    assert left == frozenset(still)
