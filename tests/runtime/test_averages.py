# SPDX-License-Identifier: Apache-2.0
"""The average of the weights equals the closed form over all past weights.

It holds on uneven plans, and a resumed run continues the average bit for bit.
"""

from typing import Any

import jax
import numpy as np
import pytest

from hetjax.models.model import Model
from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.plan import Plan
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.training.settings.config import OptimizerConfig
from tests.runtime.fine_tuned import BASE, adapted, parts, uneven_plan
from tests.runtime.oracle import random_batch
from tests.runtime.test_loss_terms import PLANS
from tests.short_runs import draws

pytestmark = pytest.mark.usefixtures("quick_compiling")

DECAY, STEPS = 0.8, 4
RULE = optimizer(
    OptimizerConfig(learning_rate=3e-2, warmup_steps=0, ema=DECAY, clip_norm=1.0), 9
)


def runtime_of(plan: Plan, model: Model, own: dict[str, Any]) -> StageRuntime:
    nodes = ("a", "even", "odd")
    devices: dict[str, list[jax.Device]] = dict.fromkeys(nodes, jax.devices())
    weights = (lambda path, shape: own[path]) if own else None
    return StageRuntime(plan, model, devices, RULE, weights=weights)


def state_of(runtime: StageRuntime) -> dict[str, np.ndarray]:
    return {entry.name: np.array(value) for entry, value in runtime.entries()}


def starting(state: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}


@pytest.mark.parametrize("is_adapted", draws([True, False], short=1))
def test_the_average_is_the_closed_form_over_all_weights_there_were(is_adapted: bool):
    model = adapted() if is_adapted else BASE
    plan, own = uneven_plan(model), parts(adapted(), 0)[0] if is_adapted else {}
    runtime = runtime_of(plan, model, own)
    runtime.initialise(0)
    were = [starting(state_of(runtime), "params.")]
    for step in range(STEPS):
        runtime.step(step, random_batch(plan, model.vocab_size, step))
        were.append(starting(state_of(runtime), "params."))
    found = starting(state_of(runtime), "opt.ema.")
    assert found.keys() == were[0].keys()
    for path, average in found.items():
        values = [np.float64(weights[path]) for weights in were]
        expected = DECAY**STEPS * values[0] + (1 - DECAY) * sum(
            DECAY ** (STEPS - k) * values[k] for k in range(1, STEPS + 1)
        )
        assert average.dtype == np.float32
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7)
        far = np.linalg.norm(expected - values[-1])
        assert far > 1e-3 * np.linalg.norm(values[-1]), path


def test_on_another_plan_the_average_goes_on_from_the_very_bits():
    first, second = PLANS["two replicas"], PLANS["three stages"]
    begun = runtime_of(first, BASE, {})
    begun.initialise(0)
    for step in range(2):
        begun.step(step, random_batch(first, BASE.vocab_size, step))
    saved = state_of(begun)
    resumed = runtime_of(second, BASE, {})
    resumed.restore(lambda entry: saved[entry.name])
    taken = state_of(resumed)
    assert taken.keys() == saved.keys()
    for name, value in saved.items():
        np.testing.assert_array_equal(taken[name], value, err_msg=name)
    resumed.step(2, random_batch(second, BASE.vocab_size, 2))
    after = state_of(resumed)
    for path, average in starting(after, "opt.ema.").items():
        before, now = saved[f"opt.ema.{path}"], after[f"params.{path}"]
        expected = np.float64(before) * DECAY + np.float64(now) * (1 - DECAY)
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7)
