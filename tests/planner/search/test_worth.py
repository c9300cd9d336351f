# SPDX-License-Identifier: Apache-2.0
"""What parts of a cluster are worth, against all simulated plans."""

from dataclasses import replace

import pytest

from hetjax.cluster.cluster import Cluster, Link, Node, part_of
from hetjax.models.named import TypedName, load_named
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Search
from hetjax.planner.search.worth import Instead, worth_of_parts
from hetjax.schedule.predicted import Predicted
from tests.planner.whole_space import random_request
from tests.short_runs import draws
from tests.training.small import MODEL


def least_step_s(plans: list[Predicted], nodes: set[str]) -> float | None:
    """Return the least step of the plans on these nodes alone; None without any."""
    steps_s = [
        found.simulation.step_time_s
        for found in plans
        if {stage.node for _, _, stage in found.plan.stages()} <= nodes
    ]
    return min(steps_s, default=None)


def check(instead: Instead | None, least_s: float | None, ours_s: float) -> None:
    if instead is None or least_s is None:
        assert instead is None and least_s is None
        return
    assert instead.predicted.simulation.step_time_s == least_s
    assert instead.worse == pytest.approx(least_s / ours_s - 1)


@pytest.mark.parametrize("seed", draws(range(6), short=2))
def test_a_part_is_held_against_the_best_plan_without_it_and_alone(seed: int) -> None:
    request = random_request(seed)
    search = Search(request, [Objective()], local_work=1_000)
    search.propose()
    (found,) = search.found()
    plans, searched = list(search.incumbents.simulated()), search.first.searched
    told = {w.part: w for w in worth_of_parts(found, found.best.plan, plans, searched)}
    assert len(told) == (len(request.classes) if len(request.classes) > 1 else 0)
    whole = {node.name for node in request.cluster.nodes}
    ours_s = found.best.simulation.step_time_s
    for nodes in request.classes if told else ():
        names = {node.name for node in nodes.nodes}
        worth = told[nodes.name]
        assert worth.num_devices == nodes.num_devices
        used = {(s.node, d) for _, _, s in found.best.plan.stages() for d in s.devices}
        assert worth.num_used == sum(node in names for node, _ in used)
        check(worth.alone, least_step_s(plans, names), ours_s)
        check(worth.without, least_step_s(plans, whole - names), ours_s)


def test_zones_are_parts_and_only_searches_are_no_quick_looks() -> None:
    nodes = tuple(
        Node(name=f"n{n}", device=device, count=1, zone=zone)
        for n, (device, zone) in enumerate([("H20", "a"), ("L4", "a"), ("L4", "b")])
    )
    link = Link(between=("a", "b"), bandwidth_gbit_per_s=10.0)
    request = PlanRequest(
        model=MODEL,
        cluster=Cluster(name="zones", nodes=nodes, links=(link,)),
        seq_len=16,
        global_batch=8,
        microbatch_sizes=(1,),
    )
    search = Search(request, [Objective()], local_work=0)
    search.propose()
    (found,), plans = search.found(), list(search.incumbents.simulated())
    east = frozenset({"n0", "n1"})
    told = {w.part: w for w in worth_of_parts(found, found.best.plan, plans, {east})}
    assert set(told) == {"H20", "L4 (n1)", "L4", "zone a", "L4 (n2), zone b"}
    both = told["zone a"].alone, told["L4 (n2), zone b"].without
    assert both[0] == both[1] and both[0] is not None and both[0].is_searched
    glanced = worth_of_parts(found, found.best.plan, plans, ())
    quick = {w.part: w for w in glanced}["zone a"].alone
    assert quick is not None and not quick.is_searched


def test_a_part_that_is_not_searched_is_shown_nearly_as_fast_as_it_is_alone() -> None:
    # two of three nodes, far slower than the third: their templates are not solved
    kinds = {"a": "A100-SXM4-40GB", "b": "V100-SXM2-32GB", "c": "V100-SXM2-32GB"}
    nodes = [Node(name=n, device=device, count=2) for n, device in kinds.items()]
    request = PlanRequest(
        model=load_named(TypedName("llama-1b")),
        cluster=Cluster(name="three", nodes=tuple(nodes)),
        seq_len=1024,
        global_batch=16,
        microbatch_sizes=(1, 2),
        remats=("none", "full"),
    )
    steps_s = []
    for cluster in (request.cluster, part_of(request.cluster, {"b", "c"})):
        search = Search(replace(request, cluster=cluster), [Objective()])
        search.propose()
        steps_s.append(least_step_s([*search.incumbents.simulated()], {"b", "c"}))
    within_s, alone_s = steps_s
    assert within_s is not None and alone_s is not None
    assert within_s <= 1.05 * alone_s
