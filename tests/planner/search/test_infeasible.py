# SPDX-License-Identifier: Apache-2.0
"""What is told to change makes a plan, and less of it does not."""

import re
from dataclasses import replace
from functools import reduce

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.request import REMATS, Request
from hetjax.planner.search.find import find_plan
from tests.planner.whole_space import small_model

OPTIONS = {
    "--remat": ("remats", str),
    "--microbatch-sizes": ("microbatch_sizes", int),
    "--tensor": ("tensor_degrees", int),
}


def two_nodes(memory_gib: float, **changes: object) -> Request:
    """A model of two blocks for two nodes of two devices with so little memory."""
    fast = Node(
        name="fast",
        device="made-up-fast",
        count=2,
        peak_tflops=0.1,
        memory_gib=memory_gib,
        memory_gb_per_s=100.0,
        intra_node_gb_per_s=10.0,
        network_gbit_per_s=10.0,
    )
    slow = replace(fast, name="slow", device="made-up-slow", peak_tflops=0.03)
    request = Request(
        model=small_model(2),
        cluster=Cluster(name="two", nodes=(fast, slow)),
        seq_len=64,
        global_batch=8,
        dtype="float32",
        microbatch_sizes=(1, 2),
        tensor_degrees=(1,),
        remats=("none",),
    )
    return replace(request, **changes)


def has_plan(request: Request) -> bool:
    try:
        find_plan(request, polish_s=0.1)
    except NoFeasiblePlan:
        return False
    return True


def done(request: Request, told: str) -> Request:
    """Do one thing that is told to do."""
    more = re.fullmatch(
        r"add (\d+) more (\S+) nodes? of 2 devices to the cluster", told
    )
    if more:
        (node,) = (n for n in request.cluster.nodes if n.device == more[2])
        added = [replace(node, name=f"new-{n}") for n in range(int(more[1]))]
        nodes = (*request.cluster.nodes, *added)
        return replace(request, cluster=replace(request.cluster, nodes=nodes))
    typed = re.fullmatch(r"allow [a-z ]+: (--\S+) (.+)", told)
    assert typed, told
    field, kind = OPTIONS[typed[1]]
    return replace(request, **{field: tuple(map(kind, typed[2].split()))})


def told_for(request: Request) -> list[str]:
    with pytest.raises(NoFeasiblePlan) as caught:
        find_plan(request, polish_s=0.1)
    assert "memory binds" in caught.value.got
    return caught.value.fix.split("; ")


@pytest.mark.parametrize(
    ("memory_gib", "microbatch_sizes", "num_things"),
    [(0.0016, (1, 2), 1), (0.0012, (2,), 3)],
)
def test_freedoms_that_are_told_make_a_plan_and_one_less_does_not(
    memory_gib: float, microbatch_sizes: tuple[int, ...], num_things: int
) -> None:
    request = two_nodes(memory_gib, microbatch_sizes=microbatch_sizes)
    things = told_for(request)
    assert len(things) == num_things
    assert has_plan(reduce(done, things, request))
    for n in range(num_things):
        assert not has_plan(reduce(done, things[:n] + things[n + 1 :], request))


def test_nodes_that_are_told_make_a_plan_and_one_node_less_does_not() -> None:
    request = two_nodes(0.001, remats=REMATS, tensor_degrees=(1, 2))
    (told,) = told_for(request)
    assert told.startswith("add 2 more ")
    assert has_plan(done(request, told))
    assert not has_plan(done(request, told.replace("2", "1", 1)))


def test_where_only_all_together_helps_all_is_told() -> None:
    request = two_nodes(0.001, microbatch_sizes=(2,))
    things = told_for(request)
    assert [thing.split()[0] for thing in things] == ["allow", "allow", "allow", "add"]
    assert has_plan(reduce(done, things, request))
