# SPDX-License-Identifier: Apache-2.0
"""Survivors take over all samples, as evenly as brute force could; nothing else
changes."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.plans.plan import Plan, Replica, Stage, first_sample, segments
from hetjax.plans.rerouting import balanced, rerouted, with_microbatches
from tests.plans.strategies import valid_cases

PLANS = valid_cases().map(lambda case: case.plan)
LOST = st.sets(st.sampled_from(["n0", "n1", "n2"]), max_size=2)


def replica_of(node: str, num: int, size: int, num_stages: int = 1) -> Replica:
    cuts = range(num_stages + 1)
    stages = [
        Stage(node=node, devices=(s,), layers=(s, s + 1), launch_ahead=num_stages - s)
        for s in cuts[:-1]
    ]
    return Replica(num_microbatches=num, microbatch_size=size, stages=tuple(stages))


def plan_of(*replicas: Replica) -> Plan:
    samples = sum(r.num_microbatches * r.microbatch_size for r in replicas)
    return Plan(model="tiny", seq_len=8, global_batch=samples, replicas=replicas)


def worst(replicas: Sequence[Replica], counts: Sequence[int]) -> Fraction:
    """Return the largest slowdown: M + S - 1 slots per replica, after over before."""
    return max(
        Fraction(n + len(r.stages) - 1, r.num_microbatches + len(r.stages) - 1)
        for r, n in zip(replicas, counts, strict=True)
    )


def brute_force(replicas: Sequence[Replica], num_samples: int) -> Fraction | None:
    """Return the least worst slowdown over all shares of the samples; None if none."""
    ranges = [range(1, num_samples // r.microbatch_size + 1) for r in replicas]
    sizes = [r.microbatch_size for r in replicas]
    shares = [
        counts
        for counts in product(*ranges)
        if sum(n * b for n, b in zip(counts, sizes, strict=True)) == num_samples
    ]
    return min((worst(replicas, counts) for counts in shares), default=None)


SURVIVORS = st.lists(
    st.builds(
        replica_of,
        st.just("a"),
        st.integers(1, 6),
        st.integers(1, 6),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=3,
)


@given(SURVIVORS, st.integers(1, 40))
def test_no_other_shares_slow_down_the_slowest_replica_less(
    replicas: list[Replica], num_samples: int
):
    counts = balanced(replicas, num_samples)
    best = brute_force(replicas, num_samples)
    if counts is None:
        assert best is None
        return
    assert sum(
        n * r.microbatch_size for n, r in zip(counts, replicas, strict=True)
    ) == (num_samples)
    assert min(counts) >= 1
    assert worst(replicas, counts) == best


@given(PLANS, LOST)
def test_whole_replicas_go_on_as_they_are_with_all_samples(plan: Plan, lost: set[str]):
    left = [
        r
        for r, replica in enumerate(plan.replicas)
        if lost.isdisjoint(stage.node for stage in replica.stages)
    ]
    found = rerouted(plan, lost)
    sizes = [plan.replicas[r].microbatch_size for r in left]
    if found is None:  # all microbatch sizes of these plans are even, as is the batch
        assert not left or sum(sizes) > plan.global_batch or set(sizes) == {4}
        return
    assert sorted({r for r, _, _ in found.stages()}) == left
    samples = [r.num_microbatches * r.microbatch_size for r in found.replicas]
    assert sum(samples) == found.global_batch == plan.global_batch
    assert segments(found) == segments(plan)
    assert first_sample(found, len(found.replicas)) == plan.global_batch
    for before, after in zip(plan.replicas, found.replicas, strict=True):
        assert after.microbatch_size == before.microbatch_size
        for was, now in zip(before.stages, after.stages, strict=True):
            assert replace(now, launch_ahead=was.launch_ahead) == was


def test_shares_follow_those_that_the_plan_gave_to_fast_and_slow():
    plan = plan_of(
        replica_of("fast", 6, 2), replica_of("slow", 2, 2), replica_of("gone", 4, 1)
    )
    found = rerouted(plan, {"gone"})
    assert found is not None  # 20 samples; 8 and 2: at most 4 / 3, 7 and 3: 3 / 2
    assert [r.num_microbatches for r in found.replicas] == [8, 2, 0]


def test_a_deep_pipeline_takes_more_as_it_is_full_anyway():
    plan = plan_of(
        replica_of("flat", 4, 1), replica_of("deep", 4, 1, 5), replica_of("gone", 4, 1)
    )
    found = rerouted(plan, {"gone"})
    assert found is not None  # 5 / 4 and 11 / 8
    assert [r.num_microbatches for r in found.replicas] == [5, 7, 0]


@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        (plan_of(replica_of("a", 3, 1)), {"a"}),
        (plan_of(replica_of("a", 3, 2), replica_of("b", 3, 1)), {"b"}),  # 9 by 2
        (
            plan_of(
                replica_of("a", 1, 2), replica_of("b", 1, 3), replica_of("c", 1, 1)
            ),
            {"c"},
        ),
    ],
    ids=["nobody is left", "odd by even", "6 of 2 and 3, one each"],
)
def test_where_no_whole_replica_can_take_over_there_is_no_plan(
    plan: Plan, lost: set[str]
):
    assert rerouted(plan, lost) is None


def test_a_plan_that_lost_nothing_is_itself():
    plan = plan_of(replica_of("a", 3, 1), replica_of("b", 1, 3))
    assert rerouted(plan, {"elsewhere"}) is plan
    assert with_microbatches(plan, [3, 1]) is plan


def test_under_gpipe_no_more_forwards_are_in_flight_than_before():
    plan = plan_of(replica_of("a", 3, 1, 2), replica_of("b", 2, 1, 2))
    found = rerouted(replace(plan, schedule="gpipe"), {"b"})
    assert found is not None and found.schedule == "1f1b"
    assert [s.launch_ahead for s in found.replicas[0].stages] == [3, 3]
    found = rerouted(plan, {"b"})
    assert found is not None
    assert found.replicas[0].stages == plan.replicas[0].stages


def test_programs_for_other_numbers_are_not_kept():
    plan = plan_of(replica_of("a", 3, 1), replica_of("b", 2, 1))
    found = rerouted(replace(plan, programs={"a": "written by hand"}), {"b"})
    assert found is not None and not found.programs


def test_a_large_batch_is_shared_out_exactly():
    replicas = [
        replica_of("a", 200, 7, 3),
        replica_of("b", 311, 5),
        replica_of("c", 90, 11),
    ]
    plan = plan_of(*replicas, replica_of("gone", 997, 3))
    found = rerouted(plan, {"gone"})
    assert found is not None
    counts = [r.num_microbatches for r in found.replicas[:3]]
    samples = [n * r.microbatch_size for n, r in zip(counts, replicas, strict=True)]
    assert sum(samples) == plan.global_batch
    even = Fraction(plan.global_batch, plan.global_batch - 997 * 3)
    assert worst(replicas, counts) < even * Fraction(102, 100)
