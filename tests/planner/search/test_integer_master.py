# SPDX-License-Identifier: Apache-2.0
"""Whole copies of columns, and the cheapest plans, against all sets of copies."""

from collections.abc import Sequence
from functools import cache
from math import inf
from random import Random

import numpy as np

from hetjax.planner.model.problem import Floats
from hetjax.planner.model.templates import Column, column, stacked
from hetjax.planner.search.integer_master import (
    ColumnCount,
    fewest_columns,
    solve_integer_master,
)
from hetjax.planner.search.price_and_branch import cheapest
from tests.planner.brute import (
    Instance,
    Used,
    all_templates,
    best_step_s,
    random_instance,
    time_s,
    used_by,
    uses_that_do,
)

SEEDS = range(48)
SLACKS = (0.8, 1.0, 1.2, 2.0)  # step times as multiples of the least one
CLEAR = 1e-6  # relative: far above any rounding


@cache
def instance_of(seed: int) -> tuple[Instance, float]:
    instance = random_instance(seed)
    return instance, best_step_s(instance, "prefix", apart=True)


@cache
def columns_of(seed: int) -> tuple[Column, ...]:
    p = instance_of(seed)[0].problem
    return tuple(column(p, template, "prefix") for template in all_templates(p))


@cache
def uses_of(seed: int, step_s: float) -> set[Used]:
    return uses_that_do(instance_of(seed)[0], "prefix", step_s, apart=True)


def cases() -> list[tuple[int, float]]:
    """Return seeds and step times; some step times suffice for the batch."""
    return [
        (seed, optimum_s * slack * (1 + CLEAR))
        for seed in SEEDS
        for slack in SLACKS
        if (optimum_s := instance_of(seed)[1]) < inf
    ]


def random_duals_R(seed: int, draw: str = "price") -> Floats:
    r = Random(f"{draw} {seed}")
    return np.array([r.uniform(0.2, 3.0) for _ in instance_of(seed)[0].problem.room_R])


def used_by_all(instance: Instance, copies: Sequence[ColumnCount]) -> Floats:
    p = instance.problem
    return sum(
        (
            c.num_copies
            * np.array(used_by(p, tuple(s.option for s in c.template.stages)))
            for c in copies
        ),
        start=np.zeros(len(p.classes)),
    )


def check_copies(
    instance: Instance, copies: Sequence[ColumnCount], step_s: float
) -> None:
    """Check that the copies do the batch, on existing devices, in that time."""
    p = instance.problem
    assert all(c.num_copies > 0 and c.num_microbatches > 0 for c in copies)
    assert p.global_batch == sum(
        c.num_copies * c.num_microbatches * c.template.microbatch_size for c in copies
    )
    assert (used_by_all(instance, copies) <= p.devices_C).all()
    for c in copies:
        took_s = time_s(instance, c.template, c.num_microbatches, "prefix")
        assert took_s <= step_s * (1 + 1e-9)


def test_whole_copies_are_found_exactly_where_there_are_some() -> None:
    found = []
    for seed, step_s in cases():
        instance, _ = instance_of(seed)
        copies = solve_integer_master(
            instance.problem, stacked(columns_of(seed)), step_s, random_duals_R(seed)
        )
        assert bool(copies) == bool(uses_of(seed, step_s)), (seed, step_s)
        if copies:
            check_copies(instance, copies, step_s)
        found.append(bool(copies))
    assert 100 <= sum(found) <= len(found) - 25


def test_whole_copies_of_least_cost_cost_the_least() -> None:
    for seed, step_s in cases():
        instance, _ = instance_of(seed)
        cost_R = random_duals_R(seed, "cost")
        copies = solve_integer_master(
            instance.problem,
            stacked(columns_of(seed)),
            step_s,
            random_duals_R(seed),
            cost_R,
        )
        uses = uses_of(seed, step_s)
        assert bool(copies) == bool(uses), (seed, step_s)
        if copies:
            check_copies(instance, copies, step_s)
            least = min(float(cost_R @ used) for used in uses)
            cost = float(cost_R @ used_by_all(instance, copies))
            assert least * (1 - 1e-9) <= cost <= least * 1.005 + 1e-9, (seed, step_s)


def does_alone(instance: Instance, c: Column, step_s: float) -> bool:
    """Return whether copies of this template alone do the batch in the step time."""
    p, size = instance.problem, c.template.microbatch_size
    num, rest = divmod(p.global_batch, size)
    used = np.array(used_by(p, tuple(s.option for s in c.template.stages)))
    most_copies = int((p.devices_C[used > 0] // used[used > 0]).min())
    most = max(
        (
            m
            for m in range(1, num + 1)
            if time_s(instance, c.template, m, "prefix") <= step_s
        ),
        default=0,
    )
    return not rest and most_copies * most >= num


def test_one_template_is_taken_where_one_is_enough() -> None:
    num_found = num_alone = 0
    for seed, step_s in cases():
        instance, _ = instance_of(seed)
        copies = fewest_columns(
            instance.problem, stacked(columns_of(seed)), step_s, random_duals_R(seed)
        )
        if not copies:
            continue
        check_copies(instance, copies, step_s)
        num_found += 1
        if any(does_alone(instance, c, step_s) for c in columns_of(seed)):
            num_alone += 1
            assert len({c.template for c in copies}) == 1, (seed, step_s)
    assert num_found >= 80 and num_alone >= 60


def test_the_cheapest_plan_is_in_time_and_seldom_dearer_than_need_be() -> None:
    num_possible = num_found = num_cheapest = 0
    for seed in SEEDS:
        instance = instance_of(seed)[0]
        optimum_s = best_step_s(instance, "prefix")
        if optimum_s == inf:
            continue
        p, step_s = instance.problem, optimum_s * (1.05, 1.5, 3.0)[seed % 3]
        usd_C = random_duals_R(seed, "cost")
        uses = uses_that_do(instance, "prefix", step_s)
        least = min(float(usd_C @ used) for used in uses)
        layout = cheapest(p, "prefix", step_s, usd_C)
        num_possible += 1
        if layout is None:
            continue
        check_copies(instance, layout.copies, step_s)
        assert layout.step_s <= step_s * (1 + 1e-9)
        assert layout.bound_s <= optimum_s * (1 + 1e-9)
        cost = float(usd_C @ used_by_all(instance, layout.copies))
        assert cost >= least * (1 - 1e-9)
        num_found += 1
        num_cheapest += cost <= least * 1.005
    assert num_possible >= 30
    assert num_found >= 0.95 * num_possible
    assert num_cheapest >= 0.95 * num_found
