# SPDX-License-Identifier: Apache-2.0
"""Small requests for the baselines, and the closed form of a plan, added up by hand.

Owns what the baselines' tests share. Does not own any search.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from hetjax.cluster.cluster import Cluster, Node
from hetjax.models.model import tensor_sizes
from hetjax.models.presets import model_preset
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.terms import search_problem
from hetjax.plans.plan import Plan, Remat
from hetjax.plans.validation import validate_plan

Kind = tuple[int, int, float, float]  # nodes, devices of each, TFLOP/s, GiB


def small_request(
    kinds: Sequence[Kind],
    *,
    global_batch: int = 16,
    microbatch_sizes: tuple[int, ...] = (1, 2),
    tensor_degrees: tuple[int, ...] = (1, 2),
    data_degrees: tuple[int, ...] = (1,),
    remats: tuple[Remat, ...] = ("none", "full"),
) -> PlanRequest:
    """Return a request for the tiny model (4 blocks) on made-up devices."""
    nodes = [
        Node(
            name=f"n{k}-{n}",
            device=f"kind{k}",
            count=count,
            peak_tflops=tflops,
            memory_gib=memory_gib,
            memory_gb_per_s=1000.0,
            intra_node_gb_per_s=100.0,
            network_gbit_per_s=100.0,
        )
        for k, (num, count, tflops, memory_gib) in enumerate(kinds)
        for n in range(num)
    ]
    return PlanRequest(
        model=model_preset("tiny"),
        cluster=Cluster(name="small", nodes=tuple(nodes)),
        seq_len=128,
        global_batch=global_batch,
        microbatch_sizes=microbatch_sizes,
        tensor_degrees=tensor_degrees,
        data_degrees=data_degrees,
        remats=remats,
    )


def check_valid(request: PlanRequest, plan: Plan) -> None:
    """Check a plan against the rules for all plans."""
    model = request.model
    validate_plan(
        plan,
        request.cluster,
        len(model.layers),
        tensor_sizes(model),
        model.max_seq_len,
    )


def step_s(request: PlanRequest, plan: Plan) -> float:
    """Return the closed form of the slowest replica; infinity if it is over memory."""
    p = _costs(request)
    class_of = {
        node.name: c for c, nodes in enumerate(request.classes) for node in nodes.nodes
    }
    return max(_replica_s(p, plan, r, class_of) for r in range(len(plan.replicas)))


@lru_cache(maxsize=1)
def _costs(request: PlanRequest) -> Problem:
    return search_problem(request, request.degrees)


def _replica_s(p: Problem, plan: Plan, r: int, class_of: Mapping[str, int]) -> float:
    replica = plan.replicas[r]
    b = p.microbatch_sizes.index(replica.microbatch_size)
    options = [
        next(
            o
            for o, option in enumerate(p.options)
            if (option.device_class, option.tensor, option.data, option.remat)
            == (class_of[s.node], s.mesh.tensor, s.mesh.data, s.remat)
        )
        for s in replica.stages
    ]
    rows = [p.range_IJ[s.layers] for s in replica.stages]
    for s, (o, row) in enumerate(zip(options, rows, strict=True)):
        in_flight = min(len(rows) - s, replica.num_microbatches)
        if p.most_in_flight_BOU[b, o, row] < in_flight:
            return float("inf")
    busy = [p.busy_s_BOU[b, o, row] for o, row in zip(options, rows, strict=True)]
    ends = [p.kind_J[s.layers[1]] for s in replica.stages[:-1]]
    ways = list(zip(ends, pairwise(options), strict=True))
    hops = [p.hop_s_BKOO[b, kind, a, z] for kind, (a, z) in ways]
    links = [p.link_s_BKOO[b, kind, a, z] for kind, (a, z) in ways]
    share = 1 - 1 / len(plan.replicas)
    sums, updates = (
        [p.after_s_ABOU[a, b, o, row] for o, row in zip(options, rows, strict=True)]
        for a in (0, 1)
    )
    sync_s = sums[0] if p.exposed[0] == "first" else max(sums)
    slowest_s = max([*busy, *links])
    after_s = share * sync_s + max(updates)
    fill_s = sum(busy) + 2 * sum(hops)
    return float(fill_s + (replica.num_microbatches - 1) * slowest_s + after_s)
