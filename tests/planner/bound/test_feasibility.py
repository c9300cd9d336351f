# SPDX-License-Identifier: Apache-2.0
"""What fits into memory, against every pipeline and every set of copies."""

from dataclasses import replace
from math import inf
from random import Random

import pytest

from hetjax.planner.bound import feasibility
from hetjax.planner.bound.feasibility import fits, one_fits_all
from hetjax.planner.model.problem import DeviceClass, problem
from tests.planner.brute import (
    Instance,
    all_templates,
    best_step_s,
    random_instance,
    time_s,
)

SEEDS = range(200)


def tight_instance(seed: int) -> Instance:
    """Return a problem of few sequences in which one stage nearly fills a device.

    So the number of microbatches in flight matters.
    """
    drawn = random_instance(seed)
    p, terms = drawn.problem, drawn.terms
    r = Random(seed)
    terms = replace(terms, memory_bytes_BO=terms.memory_bytes_BO * r.uniform(0.3, 1.0))
    whole = problem(
        terms,
        classes=[replace(c, num_devices=r.randint(2, 6)) for c in p.classes],
        options=p.options,
        microbatch_sizes=p.microbatch_sizes,
        global_batch=r.randint(2, 6),
    )
    return Instance(terms=terms, problem=whole)


def some_template_does_all(instance: Instance) -> bool:
    """Return whether one pipeline fits into memory and does the global batch."""
    batch = instance.problem.global_batch
    return any(
        batch % template.microbatch_size == 0
        and time_s(instance, template, batch // template.microbatch_size, "prefix")
        < inf
        for template in all_templates(instance.problem)
    )


def test_one_pipeline_fits_exactly_if_some_template_does_the_batch_in_memory() -> None:
    answers = []
    for seed in SEEDS:
        instance = tight_instance(seed)
        p, expected = instance.problem, some_template_does_all(instance)
        assert one_fits_all(p) == expected, seed
        assert one_fits_all(replace(p, one_replica=True)) == expected
        assert fits(replace(p, one_replica=True)) == expected
        answers.append(expected)
    assert 100 <= sum(answers) <= len(answers) - 20


def test_nothing_is_said_not_to_fit_that_some_plan_does() -> None:
    num_plans = num_refused = 0
    for seed in SEEDS:
        instance = tight_instance(seed)
        if best_step_s(instance, "prefix") < inf:
            assert fits(instance.problem), seed
            num_plans += 1
        else:
            num_refused += not fits(instance.problem)
    assert num_plans >= 150 and num_refused >= 10


def test_where_devices_are_not_counted_nothing_that_fits_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feasibility, "_MOST_STATES", 1)
    for seed in SEEDS:
        instance = tight_instance(seed)
        assert not one_fits_all(instance.problem)
        if some_template_does_all(instance):
            assert fits(instance.problem), seed


def test_stages_that_nodes_have_no_room_for_do_not_count() -> None:
    """Of 3 devices in nodes of 2, only one stage of 2 devices is possible."""
    for seed in SEEDS:
        instance = tight_instance(seed)
        p = instance.problem
        nodes = [replace(c, num_devices=3, devices_per_node=2) for c in p.classes]
        whole = [DeviceClass(name=c.name, num_devices=3) for c in p.classes]
        assert one_fits_all(replace(p, classes=tuple(nodes))) == any(
            time_s(instance, t, p.global_batch // t.microbatch_size, "prefix") < inf
            for t in all_templates(replace(p, classes=tuple(whole)))
            if p.global_batch % t.microbatch_size == 0
            and all(
                sum(p.options[s.option] == o for s in t.stages) <= 1
                for o in p.options
                if o.tensor == 2
            )
        )
