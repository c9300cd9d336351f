# SPDX-License-Identifier: Apache-2.0
"""Plans of tied embeddings across a slow link, against manual plans there and back."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.models.presets import model_preset
from hetjax.planner.bound.column_generation import heuristic_bound
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.terms import search_problem
from hetjax.planner.search.find import find_plan
from hetjax.planner.search.first.tied_ends import tied_ends, with_ends_on
from hetjax.plans.plan import StageMesh
from tests.planner.wide_space import Seat, plan_of, replica_of


@pytest.fixture(scope="module")
def request_() -> PlanRequest:
    """Return a desk and a server with 10 Gbit/s between them, and a small GPT-2."""
    desk = Node(name="desk", device="GeForce-RTX-4090", count=2)
    server = Node(name="server", device="GeForce-RTX-3090", count=4)
    link = Link(between=("desk", "server"), bandwidth_gbit_per_s=10.0, latency_ms=0.1)
    return PlanRequest(
        model=model_preset("gpt2-124m"),
        cluster=Cluster(name="mine", nodes=(desk, server), links=(link,)),
        seq_len=1024,
        global_batch=64,
        microbatch_sizes=(4,),
        tensor_degrees=(1,),
        remats=("selective",),
    )


def there_and_back_s(request: PlanRequest) -> Iterator[float]:
    """Yield step times of all cuts of one pipeline from desk to server and back."""
    num_layers = len(request.model.layers)
    seats = [
        Seat(node=node, devices=devices, mesh=StageMesh(data=data), remat="selective")
        for node, devices, data in (
            ("desk", (0,), 1),
            ("server", (0, 1, 2, 3), 4),
            ("desk", (1,), 1),
        )
    ]
    for first in range(1, num_layers - 1):
        for last in range(first + 1, num_layers):
            cuts = [(0, first), (first, last), (last, num_layers)]
            plan = plan_of(request, [replica_of(16, 4, seats, cuts)])
            try:
                yield evaluate_plan(request, plan).simulation.step_time_s
            except NoFeasiblePlan:
                continue


def test_a_plan_that_comes_back_is_found(request_: PlanRequest) -> None:
    by_hand_s, found = min(there_and_back_s(request_)), find_plan(request_)
    assert found.best_h1f1b.simulation.step_time_s <= by_hand_s * 1.005
    without = replace(request_, model=model_preset("llama-1b"))
    assert not list(tied_ends(without, lambda: np.inf))


@pytest.mark.parametrize("device_class", [0, 1])
def test_pipelines_begin_and_end_where_they_are_told_to(
    request_: PlanRequest, device_class: int
) -> None:
    p = search_problem(request_, (1,), num_replicas=1)
    seen = heuristic_bound(with_ends_on(p, device_class), "closed")
    assert seen is not None and seen.columns
    for c in seen.columns:
        for stage in (c.template.stages[0], c.template.stages[-1]):
            assert p.options[stage.option].device_class == device_class
    classes = {
        p.options[s.option].device_class
        for c in seen.columns
        for s in c.template.stages
    }
    assert classes == {0, 1}
