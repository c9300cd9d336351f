# SPDX-License-Identifier: Apache-2.0
"""The baselines' plans are valid, in memory, and what their planners would choose."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.planner.baselines.by_name import BASELINES, compared
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.problem import Option
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import UnplacedReplica, place
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted
from tests.planner.baselines.baselines_oracle import check_valid, small_request, step_s

KINDS = st.tuples(
    st.integers(1, 2),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([50.0, 100.0, 300.0]),
    st.sampled_from([0.02, 0.05, 1.0]),
)


@settings(max_examples=5)
@given(st.lists(KINDS, min_size=1, max_size=3), st.sampled_from([3, 8, 12]))
def test_plans_are_valid_and_in_memory(
    kinds: list[tuple[int, int, float, float]], global_batch: int
) -> None:
    request = small_request(kinds, global_batch=global_batch)
    for name, found in compared(request).items():
        if isinstance(found, NoFeasiblePlan):
            assert name in found.got
            continue
        check_valid(request, found.plan)
        assert found.plan.global_batch == global_batch
        for device, use in found.memory.items():
            assert use.total_bytes <= found.capacity_bytes[device]


@settings(max_examples=6)
@given(st.lists(KINDS, min_size=1, max_size=2), st.sampled_from([6, 8]))
def test_all_plans_of_a_baseline_are_valid_and_differ(
    kinds: list[tuple[int, int, float, float]], global_batch: int
) -> None:
    request = small_request(kinds, global_batch=global_batch, data_degrees=(1, 2))
    for baseline in BASELINES.values():
        try:
            plans = baseline.plans(request)
        except NoFeasiblePlan:
            continue
        assert len(set(plans)) == len(plans)
        for plan in plans:
            check_valid(request, plan)


@pytest.mark.parametrize("name", ["megatron", "varuna", "uniform-search"])
def test_replicas_are_equal_with_even_blocks(name: str) -> None:
    request = small_request([(1, 4, 100.0, 1.0), (1, 2, 300.0, 1.0)])
    for plan in BASELINES[name].plans(request):
        shapes = {
            (
                replica.num_microbatches,
                replica.microbatch_size,
                tuple((s.layers, s.mesh) for s in replica.stages),
            )
            for replica in plan.replicas
        }
        assert len(shapes) == 1
        blocks = [
            min(s.layers[1], 5) - max(s.layers[0], 1) for s in plan.replicas[0].stages
        ]
        assert max(blocks) - min(blocks) <= 1


def test_megatron_takes_the_best_symmetric_plan_in_rank_order() -> None:
    request = small_request([(1, 4, 100.0, 0.04), (1, 4, 80.0, 0.05)], global_batch=8)
    best = min(step_s(request, plan) for plan in symmetric_plans(request))
    plan = BASELINES["megatron"].plans(request)[0]
    assert step_s(request, plan) == pytest.approx(best)
    order = [
        (stage.node, stage.devices[0])
        for s in range(len(plan.replicas[0].stages))
        for stage in [replica.stages[s] for replica in plan.replicas]
    ]
    assert order == sorted(order)


def symmetric_plans(request: PlanRequest) -> Iterator[Plan]:
    """Yield every symmetric plan on both nodes, or on the faster node alone."""
    whole = [(f"n{k}-0", k) for k in range(2)]
    for nodes, tensor in product((whole, whole[:1]), request.degrees):
        seats = [
            (node, tuple(range(first, first + tensor)))
            for node, _ in nodes
            for first in range(0, 4, tensor)
        ]
        for num_stages, size, remat in product(
            range(1, 5), request.microbatch_sizes, request.remats
        ):
            total = request.global_batch // size
            rooms = range(len(seats) // num_stages, 0, -1)
            num = next((d for d in rooms if total % d == 0), 0)
            if not num:
                continue
            cuts = {1: (0, 6), 2: (0, 3, 6), 3: (0, 2, 4, 6), 4: (0, 2, 3, 4, 6)}
            pipeline = UnplacedReplica(
                num_microbatches=total // num,
                microbatch_size=size,
                stages=tuple(
                    (
                        Option(device_class=0, tensor=tensor, remat=remat),
                        cuts[num_stages][s : s + 2],
                    )
                    for s in range(num_stages)
                ),
            )
            one = place(small_request([(8, 4, 1.0, 1.0)]), [pipeline] * num)
            assert one is not None
            yield replace(
                one,
                global_batch=request.global_batch,
                replicas=tuple(
                    replace(
                        replica,
                        stages=tuple(
                            replace(
                                stage,
                                node=seats[s * num + r][0],
                                devices=seats[s * num + r][1],
                            )
                            for s, stage in enumerate(replica.stages)
                        ),
                    )
                    for r, replica in enumerate(one.replicas)
                ),
            )


def test_whale_gives_microbatches_in_proportion_to_flops() -> None:
    request = small_request(
        [(1, 1, 100.0, 1.0), (1, 1, 300.0, 1.0)],
        tensor_degrees=(1,),
        microbatch_sizes=(1,),
    )
    of_one_stage = [
        plan.replicas
        for plan in BASELINES["whale"].plans(request)
        if [len(replica.stages) for replica in plan.replicas] == [1, 1]
    ]
    assert of_one_stage
    for slow, fast in of_one_stage:
        assert (slow.num_microbatches, fast.num_microbatches) == (4, 12)


def test_whale_moves_layers_on_where_a_device_is_full() -> None:
    """By FLOP/s the first stage would get most layers, but its memory holds few."""
    plans = {}
    for memory_gib in (1.0, 0.0134):
        request = small_request(
            [(1, 1, 900.0, memory_gib), (1, 1, 100.0, memory_gib)],
            tensor_degrees=(1,),
            microbatch_sizes=(1,),
            remats=("full",),
        )
        found = BASELINES["whale"].plans(request)
        plans[memory_gib] = {
            plan.replicas[0].stages[0].layers[1]
            for plan in found
            if len(plan.replicas[0].stages) == 2
        }
    assert max(plans[0.0134]) < max(plans[1.0])


def test_uniform_search_takes_the_best_of_its_space() -> None:
    request = small_request([(1, 4, 100.0, 0.05), (1, 2, 200.0, 1.0)], global_batch=8)
    best = min(step_s(request, plan) for plan in uniform_plans(request))
    plan = BASELINES["uniform-search"].plans(request)[0]
    assert step_s(request, plan) == pytest.approx(best, rel=0.01)


def uniform_plans(request: PlanRequest) -> Iterator[Plan]:
    """Yield every plan whose stages use class 0 before class 1, or class 1 first."""
    cuts = {1: (0, 6), 2: (0, 3, 6), 3: (0, 2, 4, 6), 4: (0, 2, 3, 4, 6)}
    for num_stages, size, num in product(cuts, request.microbatch_sizes, range(1, 7)):
        microbatches, left = divmod(request.global_batch // size, num)
        if left or num_stages * num > 6:
            continue
        for first, tensors in product((0, 1), product(request.degrees, repeat=2)):
            for turn, remats in product(
                range(num_stages + 1), product(request.remats, repeat=num_stages)
            ):
                classes = [first if s < turn else 1 - first for s in range(num_stages)]
                pipeline = UnplacedReplica(
                    num_microbatches=microbatches,
                    microbatch_size=size,
                    stages=tuple(
                        (
                            Option(device_class=c, tensor=tensors[c], remat=remat),
                            cuts[num_stages][s : s + 2],
                        )
                        for s, (c, remat) in enumerate(
                            zip(classes, remats, strict=True)
                        )
                    ),
                )
                plan = place(request, [pipeline] * num)
                if plan is not None:
                    yield plan


def test_hapt_uses_every_device_of_one_pipeline() -> None:
    request = small_request([(1, 2, 100.0, 1.0), (1, 3, 300.0, 1.0)])
    for plan in BASELINES["hapt"].plans(request):
        (replica,) = plan.replicas
        assert sum(len(stage.devices) for stage in replica.stages) == 5
        kinds = [stage.node[1] for stage in replica.stages]
        assert kinds == sorted(kinds)


def test_hapt_leaves_devices_idle_only_where_layers_are_too_few() -> None:
    request = small_request([(9, 1, 100.0, 1.0)], tensor_degrees=(1,))
    (replica,) = BASELINES["hapt"].plans(request)[0].replicas
    assert len(replica.stages) == 6  # of 9 devices: one per layer


def test_autohet_groups_are_balanced_on_unlike_devices() -> None:
    """Two slow devices equal a fast one: groups of equal power pair the slow ones."""
    request = small_request(
        [(1, 4, 100.0, 1.0), (1, 2, 200.0, 1.0)],
        global_batch=64,
        tensor_degrees=(1,),
        microbatch_sizes=(1,),
        remats=("none",),
    )
    halves = [
        plan for plan in BASELINES["autohet"].plans(request) if len(plan.replicas) == 2
    ]
    assert halves
    kinds = [sorted(s.node for s in replica.stages) for replica in halves[0].replicas]
    assert kinds == [["n0-0", "n0-0", "n1-0"]] * 2


def test_the_comparison_tells_the_judges_word() -> None:
    request = small_request([(1, 2, 100.0, 1.0)], microbatch_sizes=(1,))
    found = compared(request, ["varuna", "hapt"])
    assert list(found) == ["varuna", "hapt"]
    for name, predicted in found.items():
        assert isinstance(predicted, Predicted)
        times = [
            evaluate_plan(
                request, plan, BASELINES[name].schedule
            ).simulation.step_time_s
            for plan in BASELINES[name].plans(request)[:6]
        ]
        assert predicted.simulation.step_time_s == min(times)


def test_a_device_too_small_is_told() -> None:
    request = small_request([(1, 2, 100.0, 0.001)])
    for name, found in compared(request).items():
        assert isinstance(found, NoFeasiblePlan)
        assert name in found.got and "memory" in found.got


def test_a_batch_that_no_size_divides_is_told() -> None:
    request = small_request([(1, 1, 100.0, 1.0)], global_batch=3, microbatch_sizes=(2,))
    for found in compared(request).values():
        assert isinstance(found, NoFeasiblePlan)
        assert "divides global_batch = 3" in found.got


def test_an_unknown_baseline_is_told() -> None:
    request = small_request([(1, 1, 100.0, 1.0)])
    with pytest.raises(BadInput, match="megatron"):
        compared(request, ["megatorn"])
