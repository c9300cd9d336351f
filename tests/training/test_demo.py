# SPDX-License-Identifier: Apache-2.0
"""`plan tiny` and `simulate tiny` show a cluster in which every device kind pays off.

The oracle is the planner itself, with all choices, with and without each kind.
"""

import math
from dataclasses import replace

import pytest

from hetjax.cluster.catalogue import catalogue
from hetjax.cluster.cluster import DEVICE_FIGURES, part_of
from hetjax.cluster.cluster_files import load_cluster
from hetjax.models.presets import model_preset
from hetjax.optimizers.optimizer import optimizer
from hetjax.planner.model.evaluator import PlanEvaluator
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.plans.plan_files import read_plan
from hetjax.training.settings.presets import preset

TINY = preset("tiny")
CLUSTER = load_cluster("tiny")
KINDS = [node.device for node in CLUSTER.nodes]
REQUEST = PlanRequest(
    model=model_preset(TINY.config.model),
    cluster=CLUSTER,
    seq_len=TINY.config.seq_len,
    global_batch=TINY.config.global_batch,
    dtype=TINY.config.dtype,
    optimizer=optimizer(TINY.config.optimizer, TINY.config.steps).init,
)


def shipped_s() -> float:
    """Return the simulated step time of the plan that `tiny` trains with."""
    assert TINY.plan is not None
    judged = PlanEvaluator(REQUEST)(read_plan(TINY.plan))
    return math.inf if judged is None else judged.simulation.step_time_s


def best_s(*kinds: str) -> float:
    """Return the step time of the best plan on the nodes of these kinds."""
    names = [node.name for node in CLUSTER.nodes if node.device in kinds]
    request = replace(REQUEST, cluster=part_of(CLUSTER, names))
    return find_plan(request, local_work=0).best.simulation.step_time_s


def test_tiny_has_three_kinds_as_the_catalogue_describes_them():
    assert len(set(KINDS)) == len(KINDS) == 3 and set(KINDS) <= catalogue().keys()
    own = [getattr(n, figure) for n in CLUSTER.nodes for figure in DEVICE_FIGURES]
    assert not any(own) and not CLUSTER.links


@pytest.mark.nightly
def test_to_leave_any_kind_of_tiny_out_costs_at_least_5_percent():
    together_s = shipped_s()
    for kind in KINDS:
        without_s = best_s(*(other for other in KINDS if other != kind))
        assert without_s >= 1.05 * together_s, f"{kind} is hardly missed"


def test_all_of_tiny_is_at_least_1_2_times_as_fast_as_the_best_kind_alone():
    assert min(map(best_s, KINDS)) >= 1.2 * shipped_s()


@pytest.mark.nightly
def test_tiny_trains_with_what_the_planner_finds():
    narrow = replace(REQUEST, microbatch_sizes=(4, 8), tensor_degrees=(1,))
    # the shipped plan splits no backward pass: fewer programs to compile
    found = find_plan(narrow, local_work=0).best_h1f1b
    assert {stage.node for _, _, stage in found.plan.stages()} == {
        node.name for node in CLUSTER.nodes
    }
    # the shipped plan uses no remat, which hardly differs
    assert shipped_s() <= 1.03 * found.simulation.step_time_s
