# SPDX-License-Identifier: Apache-2.0
"""The planner's plans for random small clusters run unchanged."""

import jax
import numpy as np
import pytest

from hetjax.cluster.cluster import Cluster
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.plans.plan import Plan
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.planner.whole_space import random_request
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    oracle_gradients,
    oracle_params,
    random_batch,
)
from tests.short_runs import draws

pytestmark = pytest.mark.usefixtures("quick_compiling")


@pytest.mark.parametrize("seed", draws([5, 6, 9, 17], short=2))
def test_two_steps_of_a_plan_that_was_found_equal_those_of_one_jit(seed: int) -> None:
    request = random_request(seed)
    plan = found_plan(request)
    runtime = StageRuntime(
        plan, request.model, devices_of(request.cluster), keep_gradients()
    )
    drawn = oracle_params(request.model, seed)
    params = {path: np.asarray(value) for path, value in drawn.items()}
    runtime.restore(
        lambda entry: params.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    for step in range(2):
        batch = random_batch(plan, request.model.vocab_size, seed + step)
        loss, expected = oracle_gradients(request.model, params, batch)
        assert runtime.step(step, batch).loss() == pytest.approx(loss, rel=1e-5)
        assert_gradients_equal(kept_gradients(runtime), expected)


def found_plan(request: PlanRequest) -> Plan:
    try:
        return find_plan(request, local_work=2_500).best.plan
    except NoFeasiblePlan as error:
        raise AssertionError("a seed without a plan tests nothing") from error


def devices_of(cluster: Cluster) -> dict[str, list[jax.Device]]:
    """Return separate devices for every node."""
    left = iter(jax.devices())
    return {
        node.name: [next(left) for _ in range(node.count)] for node in cluster.nodes
    }
