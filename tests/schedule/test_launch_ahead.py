# SPDX-License-Identifier: Apache-2.0
"""Launch-aheads against the published examples, and the rules against each other."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.costs.costs import Costs, StageMemory
from hetjax.plans.plan import Plan
from hetjax.schedule.bound import prefix_bound_s
from hetjax.schedule.check import check
from hetjax.schedule.launch_ahead import (
    RULES,
    exact_delta,
    fitted,
    from_deltas,
    harp_delta,
    hop_s,
    launch_limits,
    with_rule,
)
from hetjax.schedule.lower import lower
from hetjax.schedule.search import searched
from hetjax.schedule.simulator import simulate
from tests.schedule.pipelines import pipeline_costs, pipeline_plan


def test_harps_published_launch_counts():
    # run 1: 0.76B over two emulated V100 and one A100, 48 MiB over 5 Gbit/s + 1 ms
    size_bytes = 16 * 1024 * 1536 * 2
    transfer_s = size_bytes / 2**30 / 0.625 + 0.001
    assert transfer_s == pytest.approx(0.0760, abs=5e-5)
    assert from_deltas([harp_delta(transfer_s, 0.2202, True)]) == (3, 1)
    cost_s = 0.2143 + 0.2202 + transfer_s + 63 * 0.2202
    assert cost_s == pytest.approx(14.3811, abs=0.0025)
    assert f"{cost_s:.2f}" == "14.38"
    # nine stages over three clusters, two crossings
    assert from_deltas([1, 1, 1, 1, 1, 1, 2, 2]) == (11, 10, 9, 8, 7, 6, 5, 3, 1)


def test_harps_thresholds_and_the_exact_rule():
    rows = [(0.0, 1, 1), (0.09, 1, 2), (0.1, 2, 2), (0.5, 3, 2), (0.51, 3, 3)]
    for hop, harp, exact in [*rows, (1.0, 3, 3), (1.2, 3, 4)]:
        assert harp_delta(hop, 1.0, True) == harp
        assert harp_delta(hop, 1.0, False) == 1
        assert exact_delta(hop, 1.0, False) == exact


def test_hops_are_transfer_plus_latency():
    costs = pipeline_costs([1.0] * 2, [1.0] * 2, [0.25])
    assert hop_s(costs, (0, 0), (0, 1)) == 0.25
    assert hop_s(costs, (0, 1), (0, 0)) == 0.25
    assert hop_s(Costs(times={}), (0, 0), (0, 1)) == 0.0


def test_memory_limits_the_forwards_in_flight():
    plan = pipeline_plan([2, 1], 8)
    memory = StageMemory(
        static_bytes=50,
        saved_bytes=10,
        input_bytes=1,
        output_bytes=2,
        workspace_bytes=5,
    )
    costs = Costs(
        times={}, memory={(0, 0): memory}, memory_bytes={(0, 0): 100.0, (0, 1): 1.0}
    )
    # 100 - 50 - 5 - (2 + 2 + 1) = 40, each microbatch in flight keeps 10
    assert launch_limits(plan, costs) == {(0, 0): 4, (0, 1): 8}


def random_instance(seed: int) -> tuple[Plan, Costs, dict[tuple[int, int], int]]:
    rng = random.Random(seed)
    num_stages, count = rng.randint(2, 6), rng.choice([4, 8, 16])
    forward_s = [rng.uniform(0.1, 1) for _ in range(num_stages)]
    backward_s = [f * rng.uniform(1, 2.5) for f in forward_s]
    slowest_s = max(f + b for f, b in zip(forward_s, backward_s, strict=True))
    hops = [slowest_s * rng.choice([0, 0.05, 0.3, 0.6, 1]) for _ in range(num_stages)]
    limits = {(0, s): rng.randint(1, count) for s in range(num_stages)}
    plan = pipeline_plan([num_stages - s for s in range(num_stages)], count)
    return plan, pipeline_costs(forward_s, backward_s, hops), limits


@pytest.mark.parametrize("seed", range(30))
def test_no_named_schedule_is_faster_than_the_chosen_and_the_searched(seed: int):
    plan, costs, limits = random_instance(seed)

    def step_s(plan: Plan) -> float:
        programs = lower(plan)
        check(programs, plan)
        return simulate(programs, plan, costs).step_time_s

    named_s = {
        name: step_s(with_rule(plan, costs, rule, limits))
        for name, rule in RULES.items()
    }
    chosen = fitted(plan, costs, limits)
    best = searched(plan, costs, limits, split=False)
    with_halves = searched(plan, costs, limits, split=True)
    assert step_s(chosen) <= min(named_s.values()) + 1e-9
    assert step_s(best) <= step_s(chosen) + 1e-9
    assert step_s(with_halves) <= step_s(best) + 1e-9
    assert prefix_bound_s(plan, costs) <= step_s(best) + 1e-9
    for found in (chosen, best):
        for r, s, stage in found.stages():
            assert stage.launch_ahead <= limits[r, s]


@given(st.integers(2, 8), st.floats(0.0, 1.0))
def test_the_exact_rule_hides_one_slow_link_between_equal_stages(stages, hop):
    hops = [0.0] * stages
    hops[stages // 2 - 1] = hop
    costs = pipeline_costs([0.25] * stages, [0.75] * stages, hops)
    plan = pipeline_plan([1] * stages, 24)
    limits = {(0, s): 24 for s in range(stages)}
    exact = with_rule(plan, costs, exact_delta, limits)
    step_s = simulate(lower(exact), exact, costs).step_time_s
    # K = delta + ... may exceed the microbatches only in the fill
    assert step_s == pytest.approx(stages + 2 * hop + 23, abs=1e-6)
    assert step_s == pytest.approx(prefix_bound_s(exact, costs), abs=1e-6)
