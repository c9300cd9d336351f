# SPDX-License-Identifier: Apache-2.0
"""Plain pipelines against all pipelines of equal stages, and the search that starts
from them against full enumeration."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest

from hetjax.planner.bound.column_generation import lower_bound
from hetjax.planner.bound.plain_columns import plain_start
from hetjax.planner.bound.restricted_master import reaches
from hetjax.planner.model.templates import ROUNDING, stacked
from hetjax.planner.search.price_and_branch import candidates
from tests.planner.brute import Instance, best_step_s, random_instance, unlike_speeds

_BISECTED = 1.003  # tolerance of the slowest stage


def stage_s(instance: Instance, size: int, option: int, lo: int, hi: int) -> float:
    terms, b = instance.terms, instance.problem.microbatch_sizes.index(size)
    own_s = 0.0 if terms.stage_s_BO is None else terms.stage_s_BO[b, option]
    return own_s + sum(terms.busy_s_BOK[b, option, k] for k in terms.kinds[lo:hi])


def least_slowest_s(instance: Instance, size: int, option: int, depth: int) -> float:
    """Return the least time of the slowest stage over all cuts that fit."""
    p, b = instance.problem, instance.problem.microbatch_sizes.index(size)
    least_s = inf
    for cuts in combinations(range(1, p.num_layers), depth - 1):
        ranges = list(pairwise((0, *cuts, p.num_layers)))
        held = [p.most_in_flight_BOU[b, option, p.range_IJ[each]] for each in ranges]
        if all(most >= depth - s for s, most in enumerate(held)):
            each_s = [stage_s(instance, size, option, *each) for each in ranges]
            least_s = min(least_s, max(each_s))
    return least_s


def test_no_cut_of_equal_stages_has_a_faster_slowest_stage() -> None:
    num_columns = 0
    for seed in range(60):
        instance = random_instance(seed)
        start = plain_start(instance.problem, "prefix")
        if start is None:
            continue
        columns, step_s = start
        assert reaches(instance.problem, stacked(columns), step_s)
        for column in columns:
            (option,) = {stage.option for stage in column.template.stages}
            size, stages = column.template.microbatch_size, column.template.stages
            slowest_s = max(stage_s(instance, size, option, *s.layers) for s in stages)
            least_s = least_slowest_s(instance, size, option, len(stages))
            assert slowest_s <= least_s * _BISECTED, (seed, column.template)
            num_columns += 1
    assert num_columns > 100


def test_bounds_and_plans_that_begin_with_plain_columns_are_as_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hetjax.planner.bound.column_generation.LARGE", 0)
    for seed in range(1, 9):
        instance = unlike_speeds(seed)
        p, optimum_s = instance.problem, best_step_s(instance, "prefix")
        assert lower_bound(p, "prefix").step_s <= optimum_s * (1 + ROUNDING)
        assert candidates(p, "prefix")[0].step_s <= optimum_s * 1.01


def test_nothing_begins_where_no_fraction_of_copies_does_the_batch() -> None:
    p = replace(random_instance(3).problem, one_replica=True)
    odd = replace(p, microbatch_sizes=p.microbatch_sizes[1:], global_batch=5)
    assert p.microbatch_sizes[1:] == (2,)
    assert plain_start(odd, "prefix") is None
