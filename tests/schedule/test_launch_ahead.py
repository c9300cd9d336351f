# SPDX-License-Identifier: Apache-2.0
"""Launch-aheads: published examples, and comparisons between the rules."""

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.costs.costs import Costs, Route, StageMemory, StageTimes
from hetjax.plans.plan import Plan
from hetjax.plans.schedules import SCHEDULES
from hetjax.schedule.bound import prefix_bound_s
from hetjax.schedule.launch_ahead import (
    RULES,
    exact_delta,
    fitted,
    from_deltas,
    harp_delta,
    hop_s,
    launch_limits,
    with_launch_ahead,
    with_rule,
)
from hetjax.schedule.programs.action import Op, StageKey
from hetjax.schedule.programs.check import check
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.search import (
    NAMES,
    fastest_forms,
    may_split,
    searched,
    with_schedule,
)
from hetjax.schedule.simulated import simulated
from hetjax.schedule.simulation.memory import capacity_bytes, memory_uses
from hetjax.schedule.simulation.simulator import simulate
from tests.schedule.pipelines import pipeline_costs, pipeline_plan
from tests.short_runs import draws


def test_harps_published_example():
    # 0.76B over two emulated V100 and one A100: 48 MiB over 5 Gbit/s (0.625 GiB/s in
    # the paper) and 1 ms, 64 microbatches; printed: 0.0760 s and K = [3, 1].
    edge = (0, 0), (0, 1)
    costs = Costs(
        times={},
        trunks={"east>west": 0.625 * 2**30},
        routes={edge: Route(trunks=("east>west",), latency_s=0.001)},
        message_bytes={edge: 16 * 1024 * 1536 * 2},
    )
    transfer_s = hop_s(costs, *edge)
    assert transfer_s == pytest.approx(0.0760, abs=5e-5)
    assert from_deltas([harp_delta(transfer_s, 0.2202, True)]) == (3, 1)


def test_launch_counts_of_nine_stages_with_two_crossings():
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
        half_saved_bytes=20,
        input_bytes=1,
        output_bytes=2,
        workspace_bytes=5,
    )
    costs = Costs(
        times={}, memory={(0, 0): memory}, memory_bytes={(0, 0): 100.0, (0, 1): 1.0}
    )
    # 100 - 50 - 5 - 2 x (2 + 1) = 39. Each microbatch in flight keeps 10, and 2 to
    # send; with halves 20, and 2.
    assert launch_limits(plan, costs) == {(0, 0): 3, (0, 1): 8}
    assert launch_limits(plan, costs, split=True) == {(0, 0): 1, (0, 1): 8}
    # on shared devices 100 - 2 x 50 - ... is below 0, so the limit is the minimum of 1
    shared = pipeline_plan([2, 1], 8, "interleaved", num_lanes=1)
    both = replace(costs, memory=dict.fromkeys([(0, 0), (0, 1)], memory))
    assert launch_limits(shared, both) == {(0, 0): 1, (0, 1): 1}
    roomy = replace(both, memory_bytes={(0, 0): 195.0, (0, 1): 195.0})
    # 195 - 100 - 5 - 2 x 6 = 78, and a microbatch keeps 12 in each stage
    assert launch_limits(shared, roomy) == {(0, 0): 3, (0, 1): 3}
    assert launch_limits(shared, replace(both, memory_bytes={})) == {
        (0, 0): 8,
        (0, 1): 8,
    }


def random_instance(seed: int) -> tuple[Plan, Costs]:
    """Return one or two pipelines of unlike stages with slow hops and little memory.

    Two pipelines share the trunk of each hop. Devices have memory for a few
    microbatches.
    """
    rng = random.Random(seed)
    num_stages, count = rng.randint(2, 5), rng.choice([4, 8, 12])
    plan = pipeline_plan([num_stages - s for s in range(num_stages)], count)
    if seed % 3 == 0:
        plan = with_twin(plan)
    keys = [(r, s) for r, s, _ in plan.stages()]
    forward_s = {key: rng.uniform(0.1, 1) for key in keys}
    times = {key: seconds(f, f * rng.uniform(1, 2.5)) for key, f in forward_s.items()}
    slowest_s = max(t.fused_s for t in times.values())
    hops = [slowest_s * rng.choice([0, 0.05, 0.3, 0.6, 1]) for _ in range(num_stages)]
    edges = {
        (a, b) for a in keys for b in keys if a[0] == b[0] if abs(a[1] - b[1]) == 1
    }
    return plan, Costs(
        times=times,
        trunks={f"{a[1]}>{b[1]}": 1.0 for a, b in edges},
        routes={(a, b): Route(trunks=(f"{a[1]}>{b[1]}",)) for a, b in edges},
        message_bytes={(a, b): hops[min(a[1], b[1])] for a, b in edges},
        memory={
            key: StageMemory(saved_bytes=10, half_saved_bytes=rng.choice([5, 20]))
            for key in keys
        },
        memory_bytes={key: 10.0 * rng.randint(2, count) for key in keys},
    )


def with_twin(plan: Plan) -> Plan:
    """Return the plan with a second, equal replica on its own nodes."""
    (one,) = plan.replicas
    stages = tuple(replace(s, node=f"twin-{s.node}") for s in one.stages)
    twin = replace(one, stages=stages)
    return replace(plan, replicas=(one, twin), global_batch=2 * plan.global_batch)


def seconds(forward_s: float, backward_s: float) -> StageTimes:
    return StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        fused_s=forward_s + backward_s,
        input_gradient_s=0.6 * backward_s,
        weight_gradient_s=0.4 * backward_s,
    )


def step_s(plan: Plan, costs: Costs) -> float:
    """Return the simulated step time, infinite if the plan needs too much memory."""
    programs = lower(plan)
    check(programs, plan)
    there = capacity_bytes(plan, costs)
    for device, use in memory_uses(programs, plan, costs).items():
        if use.total_bytes > there[device]:
            return math.inf
    return simulate(programs, plan, costs).step_time_s


@pytest.mark.parametrize("seed", draws(range(24), short=4))
def test_no_named_schedule_is_faster_than_the_chosen_and_the_searched(seed: int):
    plan, costs = random_instance(seed)
    limits = launch_limits(plan, costs)
    chosen_s = step_s(fitted(plan, costs, limits), costs)
    rules_s = [step_s(with_rule(plan, costs, r, limits), costs) for r in RULES.values()]
    assert chosen_s <= min(rules_s) + 1e-9
    fused = [name for name in NAMES if not may_split(name)]
    named_s = {n: step_s(with_schedule(plan, n, costs, {}), costs) for n in NAMES}
    best = searched(plan, costs, limits)
    assert step_s(best, costs) <= min(named_s[name] for name in fused) + 1e-9
    assert named_s["searched"] <= min(named_s.values()) + 1e-9
    assert named_s["searched"] <= step_s(best, costs) + 1e-9
    assert prefix_bound_s(plan, costs) <= step_s(best, costs) + 1e-9


@pytest.mark.parametrize("seed", draws(range(12), short=3))
def test_the_fastest_forms_are_those_that_alone_give_the_fastest_schedules(seed: int):
    plan, costs = random_instance(seed)
    found = partial(with_schedule, plan, "searched", costs, {}, climbs=False)
    first, *others = fastest_forms(plan, costs, {}, 1_000)
    alone_s = [step_s(found(forms=[form]), costs) for form in (first, *others)]
    assert alone_s == pytest.approx(sorted(alone_s))
    assert alone_s[0] == pytest.approx(step_s(found(), costs))
    assert fastest_forms(plan, costs, {}, 2) == (first, others[0])
    some_s = step_s(found(forms=(others[-1], others[0])), costs)
    assert some_s == pytest.approx(alone_s[1])


@pytest.mark.parametrize("count", [4, 8, 24])
def test_halves_that_cost_more_are_made_where_they_fill_the_end_and_nowhere_else(
    count: int,
):
    # F = 1, B = 3, I = W = 1.6. While the last stage computes two or three W, the first
    # stage still has one whole backward to do. Besides its own work, the last stage
    # only waits for one F.
    plan = pipeline_plan([2, 1], count)
    whole = pipeline_costs([1.0] * 2, [3.0] * 2, [0.0] * 2)
    halves = dict(input_gradient_s=1.6, weight_gradient_s=1.6)
    costs = replace(
        whole, times={key: replace(t, **halves) for key, t in whole.times.items()}
    )
    best = with_schedule(plan, "searched", costs, {})
    programs = lower(best)
    num_cut = Counter(
        action.stage
        for program in programs.values()
        for action in program
        if action.op is Op.W
    )
    assert num_cut[0] == 0 and 2 <= num_cut[1] <= 3
    found_s = 1 + 4 * count + 0.2 * num_cut[1]
    assert simulate(programs, best, costs).step_time_s == pytest.approx(found_s)


@pytest.mark.parametrize("seed", range(6))
def test_stages_on_shared_devices_are_searched_among_schedules_that_share(seed: int):
    plan, costs = random_instance(3 * seed + 1)
    (replica,) = plan.replicas
    num_lanes = 1 + len(replica.stages) // 3
    stages = [
        replace(x, node=f"n{s % num_lanes}") for s, x in enumerate(replica.stages)
    ]
    replica = replace(replica, stages=tuple(stages))
    plan = replace(plan, schedule="interleaved", replicas=(replica,))
    costs = replace(costs, memory_bytes=dict.fromkeys(costs.memory, 10.0 * (seed + 4)))
    best = with_schedule(plan, "searched", costs, {})
    named = [name for name, schedule in SCHEDULES.items() if schedule.shares]
    assert best.schedule in named
    named_s = [step_s(with_schedule(plan, name, costs, {}), costs) for name in named]
    assert step_s(best, costs) <= min(named_s) + 1e-9


@given(st.integers(2, 8), st.floats(0.0, 1.0))
def test_the_exact_rule_hides_one_slow_link_between_equal_stages(stages, hop):
    hops = [0.0] * stages
    hops[stages // 2 - 1] = hop
    costs = pipeline_costs([0.25] * stages, [0.75] * stages, hops)
    plan = pipeline_plan([1] * stages, 24)
    limits = {(0, s): 24 for s in range(stages)}
    exact = with_rule(plan, costs, exact_delta, limits)
    step_s = simulate(lower(exact), exact, costs).step_time_s
    # K = delta + ... may exceed the microbatches only during the fill
    assert step_s == pytest.approx(stages + 2 * hop + 23, abs=1e-6)
    assert step_s == pytest.approx(prefix_bound_s(exact, costs), abs=1e-6)


def test_stages_that_memory_caps_alike_do_not_all_take_turns():
    """Eight equal stages may each have 5 forwards in flight.

    With 5, 5, 5, 5, 4, 3, 2, 1, four stages take turns, so that a cycle takes as long
    as four stages. If the launch-aheads are spread, only two stages take turns
    anywhere.
    """
    count = 40
    costs = pipeline_costs([0.25] * 8, [0.75] * 8, [0.0] * 8)
    plan = pipeline_plan([1] * 8, count)
    limits = {(0, s): 5 for s in range(8)}
    capped = with_rule(plan, costs, exact_delta, limits)
    capped_s = simulate(lower(capped), capped, costs).step_time_s
    assert capped_s > 3.9 * (count - 5)
    best = fitted(plan, costs, limits)
    assert simulate(lower(best), best, costs).step_time_s < 2.1 * count + 8
    large = fitted(pipeline_plan([1] * 8, 1_000), costs, limits)  # is not simulated
    assert large.replicas[0].stages[0].launch_ahead == 5
    aheads = [stage.launch_ahead for stage in large.replicas[0].stages]
    assert max(Counter(aheads).values()) == 2


def capped_instance(seed: int) -> tuple[Plan, Costs, Mapping[StageKey, int]]:
    """Return one pipeline of unlike stages, and caps for their forwards in flight."""
    assert seed % 3, "others have two pipelines"
    plan, costs = random_instance(seed)
    rng = random.Random(seed // 3)
    cap = rng.randint(1, 5)
    limits = {
        (0, s): cap if rng.random() < 0.6 else rng.randint(1, 6)
        for s in range(len(plan.replicas[0].stages))
    }
    return plan, costs, limits


@pytest.mark.parametrize("seed", draws(range(1, 120, 3), short=12))
def test_under_caps_no_launch_aheads_are_much_faster_than_the_fitted(seed: int):
    plan, costs, limits = capped_instance(seed)
    keys = [*limits]
    best_s = math.inf
    for aheads in product(*(range(1, limits[key] + 1) for key in keys)):
        if all(a >= b for a, b in pairwise(aheads)):
            chosen = dict(zip(keys, aheads, strict=True))
            other = with_launch_ahead(plan, chosen, limits)
            best_s = min(best_s, simulated(other, costs).step_time_s)
    found = fitted(plan, costs, limits)
    assert simulated(found, costs).step_time_s <= 1.2 * best_s


def with_memory_for(costs: Costs, limits: Mapping[StageKey, int]) -> Costs:
    """Return costs of devices that can keep so many forwards, and nothing else."""
    memory = dict.fromkeys(limits, StageMemory(saved_bytes=10))
    there = {key: 10.0 * most for key, most in limits.items()}
    return replace(costs, memory=memory, memory_bytes=there)


# 1018, 1252: without lists for the launch-aheads of `spread`, steps are slower
@pytest.mark.parametrize("seed", draws([1018, 1252, *range(1, 180, 3)], short=6))
def test_no_cap_that_is_raised_makes_the_searched_slower(seed: int):
    plan, costs, limits = capped_instance(seed)

    def searched_s(limits: Mapping[StageKey, int]) -> float:
        capped = with_memory_for(costs, limits)
        return step_s(searched(plan, capped, limits), capped)

    before_s = searched_s(limits)
    fitted_s = step_s(fitted(plan, costs, limits), with_memory_for(costs, limits))
    assert before_s <= fitted_s + 1e-9
    for key, most in limits.items():
        assert searched_s({**limits, key: most + 1}) <= 1.005 * before_s
