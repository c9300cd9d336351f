# SPDX-License-Identifier: Apache-2.0
"""No even split over one class of nodes is faster than what the search proposes."""

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise, product
from math import inf

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.models.presets import model_preset
from hetjax.planner.model.cuts import even_cuts
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.problem import Option
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import ORDERS, UnplacedReplica, place
from hetjax.planner.search.find import Search
from hetjax.planner.search.first.equal_pipelines import equal_pipelines
from hetjax.plans.plan import Plan
from tests.short_runs import draws

KINDS = ("H100-SXM5-80GB", "A100-SXM4-80GB", "RTX-3090", "T4", "L4")


def request_for(
    nodes: list[tuple[str, int]], *, seq_len: int, global_batch: int
) -> PlanRequest:
    return PlanRequest(
        model=model_preset("gpt2-124m"),
        cluster=Cluster(
            name="c",
            nodes=tuple(
                Node(name=f"n{at}", device=device, count=count)
                for at, (device, count) in enumerate(nodes)
            ),
        ),
        seq_len=seq_len,
        global_batch=global_batch,
        microbatch_sizes=(2, 4),
        tensor_degrees=(1,),
        data_degrees=(1,),
    )


def even_splits(request: PlanRequest) -> Iterator[Plan]:
    """Yield every number of equal pipelines of every depth, with equal microbatches."""
    num_layers = len(request.model.layers)
    for c, nodes in enumerate(request.classes):
        for num, depth, size, remat in product(
            range(1, nodes.num_devices + 1),
            range(1, nodes.num_devices + 1),
            request.microbatch_sizes,
            request.remats,
        ):
            each, rest = divmod(request.global_batch, size * num)
            if rest or num * depth > nodes.num_devices or depth > num_layers - 2:
                continue
            cuts = even_cuts(num_layers, depth)
            option = Option(device_class=c, remat=remat)
            pipeline = UnplacedReplica(
                num_microbatches=each,
                microbatch_size=size,
                stages=tuple((option, layers) for layers in pairwise(cuts)),
            )
            for order in ORDERS:
                plan = place(request, [pipeline] * num, order)
                if plan is not None:
                    yield plan


def fastest_even_split_s(request: PlanRequest) -> float:
    found: list[float] = []
    for plan in even_splits(request):
        with suppress(NoFeasiblePlan):
            found.append(evaluate_plan(request, plan).simulation.step_time_s)
    return min(found)


def proposed_s(request: PlanRequest) -> float:
    search = Search(request, [Objective()])
    search.propose()
    return search.found()[0].best_h1f1b.simulation.step_time_s


def test_sums_that_take_much_of_a_step_hide_no_even_split():
    """The plan from templates alone is 3.2 % slower than an even split."""
    nodes = [("L4", 2), ("L4", 4), ("L4", 4)]
    request = request_for(nodes, seq_len=1024, global_batch=32)
    assert proposed_s(request) <= fastest_even_split_s(request)


def test_pipelines_are_tried_that_only_other_schedules_make_fast():
    request = request_for([("L4", 4)], seq_len=256, global_batch=16)
    plans = equal_pipelines(request, lambda: inf)
    deep = [plan for plan in plans if [len(r.stages) for r in plan.replicas] == [4]]
    assert deep
    for plan in deep:
        step = evaluate_plan(request, plan).simulation
        best_s = (step.step_time_s + step.busiest_s) / 2
        assert plan in equal_pipelines(request, lambda best_s=best_s: best_s)


@pytest.mark.parametrize("seed", draws(range(20), short=0))
def test_no_even_split_is_faster(seed: int):
    rng = random.Random(f"even splits {seed}")
    kinds = rng.sample(KINDS, rng.randint(1, 2))
    nodes = [(rng.choice(kinds), rng.choice([2, 4])) for _ in range(rng.randint(2, 4))]
    seq_len, global_batch = rng.choice([256, 1024]), rng.choice([16, 32])
    request = request_for(nodes, seq_len=seq_len, global_batch=global_batch)
    assert proposed_s(request) <= fastest_even_split_s(request)
