# SPDX-License-Identifier: Apache-2.0
"""Plans and bounds against full enumeration of small problems."""

from math import inf

import numpy as np
import pytest

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.column_generation import heuristic_bound
from hetjax.planner.model.problem import (
    DeviceClass,
    LayerCosts,
    Option,
    Problem,
    problem,
)
from hetjax.planner.model.templates import Form
from hetjax.planner.search.price_and_branch import (
    UnplacedPlan,
    candidates,
    kind_of,
)
from tests.planner.brute import (
    Instance,
    best_step_s,
    parts_s,
    random_instance,
    unlike_speeds,
    used_by,
)
from tests.short_runs import draws


def check_layout(instance: Instance, layout: UnplacedPlan, form: Form) -> None:
    """Check that the plan does the batch, on existing devices, in its stated time."""
    p = instance.problem
    assert p.global_batch == sum(
        c.num_copies * c.num_microbatches * c.template.microbatch_size
        for c in layout.copies
    )
    used = sum(
        c.num_copies * np.array(used_by(p, tuple(s.option for s in c.template.stages)))
        for c in layout.copies
    )
    assert (used <= p.devices_C).all()
    parts = [
        parts_s(instance, c.template, c.num_microbatches, form) for c in layout.copies
    ]
    step_s = max(done_s + after_s for done_s, after_s in parts)
    if instance.terms.sync_exposed == "drained":
        step_s = max(done for done, _ in parts) + max(after for _, after in parts)
    assert layout.step_s == pytest.approx(step_s)


def planned(p: Problem, form: Form) -> UnplacedPlan | None:
    try:
        return candidates(p, form)[0]
    except NoFeasiblePlan:
        return None


@pytest.mark.parametrize("seeds", draws([range(20), range(20, 60)], short=1))
def test_bound_is_never_above_the_optimum_and_the_plan_close_to_it(
    seeds: range,
) -> None:
    num_plans = num_optimal = 0
    for seed in seeds:
        instance = random_instance(seed)
        optimum_s = best_step_s(instance, "prefix")
        layout = planned(instance.problem, "prefix")
        assert (layout is None) == (optimum_s == inf)
        if layout is None:
            continue
        check_layout(instance, layout, "prefix")
        assert layout.bound_s <= optimum_s * (1 + 1e-9)
        assert layout.step_s >= optimum_s * (1 - 1e-9)
        num_plans += 1
        num_optimal += layout.step_s <= optimum_s * 1.005
    assert num_plans >= 2 / 3 * len(seeds) and num_optimal >= 0.95 * num_plans


def test_closed_form_bounds_hold_for_pipelines_that_ignore_slow_hops_too() -> None:
    for seed in range(100, 120):
        instance = random_instance(seed)
        layout = planned(instance.problem, "closed")
        if layout is None:
            continue
        check_layout(instance, layout, "closed")
        optimum_s = best_step_s(instance, "closed")
        assert layout.bound_s <= optimum_s * (1 + 1e-9)
        assert layout.step_s >= optimum_s * (1 - 1e-9)


def two_speeds(*, memory_bytes: float, global_batch: int) -> Problem:
    """Return four equal layers that take 1 s on a fast and 2 s on a slow device."""
    options = [Option(device_class=0), Option(device_class=1)]
    one_OK = np.ones((2, 1))
    return problem(
        LayerCosts(
            kinds=(0, 0, 0, 0),
            busy_s_BOK=np.array([[[1.0], [2.0]]]),
            update_s_BOK=np.zeros((1, 2, 1)),
            static_bytes_BOK=np.full((1, 2, 1), 10.0),
            saved_bytes_BOK=np.ones((1, 2, 1)),
            memory_bytes_BO=np.full((1, 2), memory_bytes),
            sync_bytes_OK=one_OK,
            sync_s=lambda o, size_bytes: 0 * size_bytes,
        ),
        classes=[
            DeviceClass(name="fast", num_devices=4),
            DeviceClass(name="slow", num_devices=4),
        ],
        options=options,
        microbatch_sizes=(1,),
        global_batch=global_batch,
    )


def test_replicas_get_microbatches_in_proportion_to_their_speed() -> None:
    layout = candidates(two_speeds(memory_bytes=100.0, global_batch=12), "prefix")[0]
    assert layout.step_s == pytest.approx(8.0)
    shares = {
        (c.template.stages[0].option, c.num_microbatches): c.num_copies
        for c in layout.copies
    }
    assert shares == {(0, 2): 4, (1, 1): 4}


def test_devices_that_do_not_help_stay_idle() -> None:
    # with one layer on a slow device a microbatch takes 5 s instead of 4 s
    layout = candidates(two_speeds(memory_bytes=100.0, global_batch=4), "prefix")[0]
    assert {s.option for c in layout.copies for s in c.template.stages} == {0}
    assert layout.step_s == pytest.approx(4.0)


def test_what_no_memory_holds_is_no_plan() -> None:
    with pytest.raises(NoFeasiblePlan, match="no pipeline that fits into memory"):
        candidates(two_speeds(memory_bytes=10.0, global_batch=4), "prefix")[0]


def test_three_unlike_classes_have_a_bound_and_plans_of_unlike_kinds() -> None:
    num_others = 0
    for seed in range(1, 11):
        instance = unlike_speeds(seed)
        p, optimum_s = instance.problem, best_step_s(instance, "prefix")
        layouts = candidates(p, "prefix", 3)
        best, kinds = layouts[0], set()
        assert best.bound_s <= optimum_s * (1 + 1e-9)
        assert optimum_s * (1 - 1e-9) <= best.step_s <= optimum_s * 1.01
        times = [layout.step_s for layout in layouts]
        assert times == sorted(times)
        for layout in layouts:
            check_layout(instance, layout, "prefix")
            own = {kind_of(p, template) for template in layout.templates}
            assert not own & kinds
            kinds |= own
        num_others += len(layouts) - 1
    assert num_others >= 3


def test_a_first_look_promises_nothing_below_the_bound_and_shortens_no_plan() -> None:
    for seed in range(1, 7):
        instance = unlike_speeds(seed)
        p, optimum_s = instance.problem, best_step_s(instance, "prefix")
        best = candidates(p, "prefix")[0]
        assert heuristic_bound(p, "prefix", best.bound_s * 0.9) is None
        seen = heuristic_bound(p, "prefix", optimum_s * 1.02)
        assert seen is not None
        assert best.bound_s * (1 - 1e-9) <= seen.relaxed_s <= optimum_s * 1.02
        found = candidates(p, "prefix", 1, seen=seen)
        check_layout(instance, found[0], "prefix")
        assert found[0].step_s == pytest.approx(best.step_s, rel=0.005)
