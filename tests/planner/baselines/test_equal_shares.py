# SPDX-License-Identifier: Apache-2.0
"""Equal pipelines over equal shares: how nodes with several hosts are shared, and that
every device kind that may span hosts can be planned for."""

from collections import Counter
from dataclasses import replace
from itertools import permutations, product

import pytest

from hetjax.cluster.catalogue import catalogue
from hetjax.cluster.cluster import Cluster, Node
from hetjax.models.model import tensor_sizes
from hetjax.planner.baselines.equal_shares import equal_share_plans
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.plans.plan import Plan
from hetjax.plans.validation import validate_plan
from tests.planner.whole_space import small_model, two_kinds

KINDS = [name for name, spec in catalogue().items() if spec.links_span_hosts]
SHAPES = [
    (count, hosts)
    for count, hosts in product((1, 2, 4, 6, 8, 12, 16), (1, 2, 3, 4, 8))
    if count % hosts == 0
]


def one_kind(device: str, count: int, hosts: int, num_nodes: int = 1) -> PlanRequest:
    nodes = tuple(
        Node(name=f"n{n}", device=device, count=count, hosts=hosts)
        for n in range(num_nodes)
    )
    return PlanRequest(
        model=small_model(1),
        cluster=Cluster(name="alike", nodes=nodes),
        seq_len=32,
        global_batch=8,
        microbatch_sizes=(1,),
        tensor_degrees=(1, 2),
        remats=("none",),
    )


def check(request: PlanRequest, plan: Plan) -> None:
    model = request.model
    sizes = tensor_sizes(model)
    validate_plan(plan, request.cluster, len(model.layers), sizes, model.max_seq_len)


@pytest.mark.parametrize("device", ["V100-SXM2-32GB", *KINDS])
def test_every_kind_is_planned_for_on_several_hosts(device: str) -> None:
    request = one_kind(device, 8, 2)
    found = find_plan(request, local_work=0)
    check(request, found.best.plan)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_shares_are_alike_on_nodes_of_any_number_of_hosts(
    shape: tuple[int, int], num_nodes: int
) -> None:
    request = one_kind("V100-SXM2-32GB", *shape, num_nodes)
    (node, *_) = request.cluster.nodes
    for plan in equal_share_plans(request):
        check(request, plan)
        hosts = [hosts_of(plan, r, node) for r in range(len(plan.replicas))]
        assert hosts == hosts[:1] * len(hosts)


def hosts_of(plan: Plan, r: int, node: Node) -> list[int]:
    """Return the number of devices that a replica uses on each host, in order."""
    used = Counter(
        (stage.node, device // node.devices_per_host)
        for stage in plan.replicas[r].stages
        for device in stage.devices
    )
    return [used[host] for host in sorted(used)]


def test_pipelines_run_through_few_kinds_in_every_order() -> None:
    request = two_kinds(model=small_model(6))
    fast, slow = (replace(node, count=1) for node in request.cluster.nodes)
    nodes = (fast, slow, replace(slow, name="other", device="made-up-other"))
    cluster = replace(request.cluster, nodes=nodes)
    orders = {
        tuple(stage.node for stage in plan.replicas[0].stages)
        for plan in equal_share_plans(replace(request, cluster=cluster))
    }
    assert orders >= set(permutations(node.name for node in nodes))
