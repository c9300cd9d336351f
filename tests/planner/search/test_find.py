# SPDX-License-Identifier: Apache-2.0
"""The whole search against every plan of small requests; placing, moves, objectives."""

import math
from dataclasses import replace

import pytest

from hetjax.errors import NoFeasiblePlan
from hetjax.models.model import tensor_sizes
from hetjax.planner.bound import column_generation
from hetjax.planner.model import request as request_module
from hetjax.planner.model.deadline import TimeUp
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.objectives import Objective
from hetjax.planner.search import find
from hetjax.planner.search.find import Search, find_plan, usual_search_s
from hetjax.planner.search.incumbents import Incumbent
from hetjax.plans.validation import validate_plan
from hetjax.schedule.bound import LowerBound
from tests.planner.whole_space import (
    fastest_s,
    random_request,
    small_model,
    two_kinds,
)
from tests.short_runs import draws


@pytest.mark.parametrize("seed", draws([0, 5, 6, 9, 11, 16, 23, 44], short=3))
def test_no_plan_is_below_the_bound_nor_the_found_one_outside_its_gap(
    seed: int,
) -> None:
    request = random_request(seed)
    optimum_s = fastest_s(request)
    found = find_plan(request, local_work=5_000)
    assert found.lower_bound_s is not None and found.gap is not None
    assert found.lower_bound_s <= optimum_s * (1 + 1e-9)
    assert found.whole_bound.step_s is not None and found.whole_gap is not None
    assert found.whole_bound.step_s <= optimum_s * (1 + 1e-9)
    whole_s, step_s = (
        each.simulation.step_time_s for each in (found.best_h1f1b, found.best)
    )
    assert step_s <= whole_s and optimum_s <= whole_s * (1 + 1e-9)
    assert whole_s <= optimum_s * (1 + found.whole_gap) * (1 + 1e-9)
    assert step_s == pytest.approx(found.lower_bound_s * (1 + found.gap))


def test_the_same_holds_where_every_node_computes_in_a_precision_of_its_own() -> None:
    drawn, precisions = random_request(0), ("bfloat16", "float32", "float16")
    nodes = tuple(
        replace(node, precision=precisions[n])
        for n, node in enumerate(drawn.cluster.nodes)
    )
    assert len(nodes) > 1
    cluster = replace(drawn.cluster, nodes=nodes)
    request = replace(drawn, cluster=cluster, dtype=None)
    optimum_s, found = fastest_s(request), find_plan(request, local_work=5_000)
    assert found.lower_bound_s is not None and found.gap is not None
    assert found.lower_bound_s <= optimum_s * (1 + 1e-9)
    assert optimum_s <= found.best_h1f1b.simulation.step_time_s * (1 + 1e-9)
    for _, _, stage in found.best.plan.stages():
        assert stage.precision == cluster.node(stage.node).precision


@pytest.mark.parametrize("seed", draws(range(60, 72), short=2))
def test_plans_that_are_found_are_valid_and_fit(seed: int) -> None:
    request = random_request(seed)
    try:
        found = find_plan(request, local_work=1_000)
    except NoFeasiblePlan:
        assert math.isinf(fastest_s(request))
        return
    plan, model = found.best.plan, request.model
    validate_plan(
        plan,
        request.cluster,
        len(model.layers),
        tensor_sizes(model),
        model.max_seq_len,
    )
    nodes = {node.name: node for node in request.cluster.nodes}
    for device, use in found.best.memory.items():
        memory_gib = nodes[device.partition("/")[0]].memory_gib
        assert memory_gib is not None and use.total_bytes <= memory_gib * 2**30


def test_cheap_tokens_come_from_cheap_devices_and_fast_steps_from_all() -> None:
    fast = find_plan(two_kinds(), local_work=2_500).best
    cheap = find_plan(two_kinds(), Objective(wish="cost"), local_work=2_500).best
    assert {stage.node for _, _, stage in cheap.plan.stages()} == {"slow"}
    assert "fast" in {stage.node for _, _, stage in fast.plan.stages()}
    assert fast.simulation.step_time_s < cheap.simulation.step_time_s
    assert fast.usd_per_million_tokens and cheap.usd_per_million_tokens
    assert cheap.usd_per_million_tokens < fast.usd_per_million_tokens


def test_a_limit_of_dollars_holds_and_one_that_nothing_keeps_is_told() -> None:
    found = find_plan(two_kinds(), Objective(max_usd_per_hour=1.0), local_work=2_500)
    assert found.best.usd_per_hour is not None and found.best.usd_per_hour <= 1.0
    with pytest.raises(NoFeasiblePlan) as caught:
        find_plan(two_kinds(), Objective(max_usd_per_hour=0.01), local_work=2_500)
    assert "0.01 USD per hour" in caught.value.got


def test_devices_that_vanish_often_are_left_out_for_goodput() -> None:
    request = two_kinds()
    fast, slow = request.cluster.nodes
    shaky = replace(fast, preemptions_per_hour=60.0)
    cluster = replace(request.cluster, nodes=(shaky, slow))
    request = replace(request, cluster=cluster)
    objective = Objective(wish="goodput", recovery_s=300.0, checkpoint_every_s=600.0)
    found = find_plan(request, objective, local_work=2_500)
    # the fast node is up 1/11 of the time, and each loss stops the slow one for 300 s
    assert {stage.node for _, _, stage in found.best.plan.stages()} == {"slow"}


def test_what_does_not_fit_says_what_binds_and_what_would_help() -> None:
    request = two_kinds()
    nodes = tuple(replace(n, memory_gib=0.0008) for n in request.cluster.nodes)
    tight = replace(request, cluster=replace(request.cluster, nodes=nodes))
    with pytest.raises(NoFeasiblePlan) as caught:
        find_plan(tight)
    assert "memory is the limit" in caught.value.got
    assert caught.value.fix


def test_a_batch_that_no_microbatches_make_up_is_told() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        find_plan(two_kinds(global_batch=7, microbatch_sizes=(2,)))
    assert "do not add up" in caught.value.got
    assert "--microbatch-sizes 1,2" in caught.value.fix


def test_a_search_for_a_very_deep_model_says_so_and_ends():
    heard: list[str] = []
    request = two_kinds(1.0)
    assert usual_search_s(request, heard.append) == math.inf and not heard
    deep = replace(request, model=small_model(999))
    assert usual_search_s(deep, heard.append) == find._DEEP_SEARCH_S <= 60
    assert heard == ["1,001 layers: the search ends with its best plan after 30 s"]


def test_plans_for_a_very_deep_model_are_in_hand_before_anything_is_priced(
    monkeypatch: pytest.MonkeyPatch,
):
    """With 1,000 layers, pricing once takes a quarter of a minute."""
    search = Search(two_kinds(), [Objective()])
    in_hand: list[int] = []

    def price(*_: object, **__: object) -> None:
        in_hand.append(len(search.incumbents.best_h1f1b))
        raise TimeUp

    monkeypatch.setattr(request_module, "_DEEP", 1)
    monkeypatch.setattr(column_generation, "solve_pricing", price)
    search.propose()
    assert in_hand and all(in_hand)


def test_a_plan_to_move_to_has_the_bound_of_its_own_space_or_none() -> None:
    request, wished = two_kinds(), Objective()
    search = Search(request, [wished])
    search.propose()
    best = search.found_by(wished).best_h1f1b
    split = evaluate_plan(request, best.plan, "zero-bubble")
    search.bounds = {"whole": LowerBound(step_s=1e-9)}
    moved = search.found_by(wished, Incumbent(predicted=split, source="a test"))
    assert moved.space == "split"
    assert moved.lower_bound_s is moved.gap is moved.whole_gap is None
    search.bounds["split"] = LowerBound(step_s=split.simulation.step_time_s / 2)
    moved = search.found_by(wished, Incumbent(predicted=split, source="a test"))
    assert moved.gap == pytest.approx(1.0)
