# SPDX-License-Identifier: Apache-2.0
"""Which nodes a run has, and which it asks for, as machines go and come."""

from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.training.recovery.membership import Membership

CLUSTER = Cluster(
    name="three", nodes=tuple(Node(name=name, device="L4", count=1) for name in "abc")
)


class Machines:
    """What a launcher knows of machines: the names of those that are there."""

    def __init__(self) -> None:
        self.there = {"a", "b", "c"}

    def present(self, cluster: Cluster, again: bool) -> Cluster | None:
        return part_of(cluster, self.there) if self.there else None


def names(nodes: tuple[Node, ...]) -> str:
    return "".join(node.name for node in nodes)


def test_nodes_that_are_gone_are_missing_until_they_are_back_even_if_all_are():
    machines = Machines()
    membership = Membership(CLUSTER, None, machines.present)
    for there, used, missing in (
        ("abc", "abc", ""),
        ("b", "b", "ac"),
        ("", "abc", "abc"),  # the run waits for any of them
        ("c", "c", "ab"),
    ):
        machines.there = {*there}
        assert names(membership.missing()) == missing  # before the run looks itself
        assert names(membership.now().nodes) == used
        assert names(membership.missing()) == missing


def test_the_last_node_that_stays_does_not_leave():
    machines = Machines()
    membership = Membership(CLUSTER, None, machines.present)
    machines.there = {"a", "b"}
    membership.now()
    assert membership.leave("a")
    assert names(membership.now().nodes) == "b"
    assert names(membership.missing()) == "c"  # a machine that leaves is still there
    assert not membership.leave("b")
    machines.there = {"b"}
    assert names(membership.now().nodes) == "b"
    machines.there = {"a", "b"}
    assert names(membership.now().nodes) == "ab"  # it was gone, and is another machine
