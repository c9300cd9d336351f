# SPDX-License-Identifier: Apache-2.0
"""Pricing finds a template that is worth its price exactly if there is one."""

from math import inf
from random import Random

import numpy as np
import pytest

from hetjax.planner.bound.pricing import price
from hetjax.planner.model.templates import Form, column
from tests.planner.brute import (
    MICROBATCH_SIZES,
    Instance,
    all_templates,
    random_instance,
    time_s,
    used_by,
)


@pytest.mark.parametrize("form", ["prefix", "closed"])
def test_columns_take_as_long_as_the_terms_say(form: Form) -> None:
    for seed in range(12):
        instance = random_instance(seed)
        for template in all_templates(instance.problem):
            c = column(instance.problem, template, form)
            for m in (1, 2, 5):
                expected_s = time_s(instance, template, m, form)
                if m > c.memory_microbatches:
                    assert expected_s == inf
                else:
                    assert c.time_s(m) == pytest.approx(expected_s)


def most_worth(
    instance: Instance, form: Form, step_s: float, price_C: np.ndarray
) -> float:
    p, most = instance.problem, 0.0
    for template in all_templates(p):
        used = used_by(p, tuple(s.option for s in template.stages))
        for m in range(1, p.global_batch // template.microbatch_size + 1):
            if time_s(instance, template, m, form) <= step_s:
                worth = m * template.microbatch_size / float(np.dot(used, price_C))
                most = max(most, worth)
    return most


@pytest.mark.parametrize("form", ["prefix", "closed"])
def test_pricing_finds_the_best_worth_and_nothing_above_it(form: Form) -> None:
    num_found = 0
    for seed in range(200):
        instance, r = random_instance(seed), Random(seed)
        p = instance.problem
        step_s = r.uniform(2.0, 15.0)
        price_C = np.array([r.uniform(0.2, 2.0) for _ in p.classes])
        most = most_worth(instance, form, step_s, price_C)
        if most == 0.0:
            found = price(p, form, step_s, price_C, 1e-3)
            assert not found.columns and found.is_all
            continue
        num_found += 1
        found = price(p, form, step_s, price_C, most * 1.0001)
        assert not found.columns and found.is_all
        best = price(p, form, step_s, price_C, most * 0.9999).columns[0]
        size = best.template.microbatch_size
        m = max(
            m
            for m in range(1, p.global_batch // size + 1)
            if time_s(instance, best.template, m, form) <= step_s * (1 + 1e-9)
        )
        assert m * size / float(np.dot(best.taken, price_C)) == pytest.approx(most)
        assert size in MICROBATCH_SIZES
    assert num_found > 100
