# SPDX-License-Identifier: Apache-2.0
"""The changes that a message advises make a plan feasible; smaller changes do not."""

import re
from dataclasses import replace
from functools import reduce

import pytest

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.deadline import deadline
from hetjax.planner.model.request import OFFLOADS, REMATS, PlanRequest
from hetjax.planner.search.find import find_plan
from tests.planner.whole_space import small_model, two_kinds
from tests.short_runs import rows_drawn

OPTIONS = {
    "--remat": ("remats", str),
    "--microbatch-sizes": ("microbatch_sizes", int),
    "--tensor": ("tensor_degrees", int),
}


def has_plan(request: PlanRequest) -> bool:
    try:
        find_plan(request, local_work=500)
    except NoFeasiblePlan:
        return False
    return True


def done(request: PlanRequest, told: str) -> PlanRequest:
    """Apply one change that a message advises."""
    more = re.fullmatch(
        r"add (\d+) more (\S+) nodes? of 2 devices to the cluster", told
    )
    if more:
        (node,) = (n for n in request.cluster.nodes if n.device == more[2])
        added = [replace(node, name=f"new-{n}") for n in range(int(more[1]))]
        nodes = (*request.cluster.nodes, *added)
        return replace(request, cluster=replace(request.cluster, nodes=nodes))
    if told == "allow optimizer state on the hosts: --offload auto":
        return replace(request, offloads=OFFLOADS["auto"])
    typed = re.fullmatch(r"allow [a-z ]+: (--\S+) (.+)", told)
    assert typed, told
    field, kind = OPTIONS[typed[1]]
    return replace(request, **{field: tuple(map(kind, typed[2].split(",")))})


def told_for(request: PlanRequest) -> list[str]:
    with pytest.raises(NoFeasiblePlan) as caught:
        find_plan(request, local_work=500)
    assert "memory is the limit" in caught.value.got
    return caught.value.fix.split(" and ")


@pytest.mark.parametrize(
    ("blocks", "memory_gib", "microbatch_sizes", "num_things"),
    rows_drawn([(2, 0.00165, (1, 2), 1), (8, 0.0031, (2,), 3)], short=1),
)
def test_freedoms_that_are_told_make_a_plan_and_one_less_does_not(
    blocks: int, memory_gib: float, microbatch_sizes: tuple[int, ...], num_things: int
) -> None:
    model = small_model(blocks)
    request = two_kinds(memory_gib, model=model, microbatch_sizes=microbatch_sizes)
    things = told_for(request)
    assert len(things) == num_things
    assert has_plan(reduce(done, things, request))
    for n in range(num_things):
        assert not has_plan(reduce(done, things[:n] + things[n + 1 :], request))


def test_nodes_that_are_told_make_a_plan_and_one_node_less_does_not() -> None:
    request = two_kinds(
        0.00075, remats=REMATS, tensor_degrees=(1, 2), offloads=OFFLOADS["auto"]
    )
    (told,) = told_for(request)
    assert told.startswith("add 2 more ")
    assert has_plan(done(request, told))
    assert not has_plan(done(request, told.replace("2", "1", 1)))


def test_where_only_all_together_helps_all_is_told() -> None:
    request = two_kinds(0.00075, microbatch_sizes=(2,))
    things = told_for(request)
    assert [thing.split()[0] for thing in things] == [*["allow"] * 4, "add"]
    assert has_plan(reduce(done, things, request))


def test_a_model_that_is_too_large_is_refused_without_a_search() -> None:
    tiny = two_kinds(0.0001)
    with deadline(0.0), pytest.raises(NoFeasiblePlan, match="memory is the limit"):
        find_plan(tiny, local_work=0)
