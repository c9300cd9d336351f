# SPDX-License-Identifier: Apache-2.0
"""A skipped step counts as a step of the run, but not as an update of the optimizer.

The oracle is Optax on one device without the skipped step. A formula gives its learning
rate from the number of each step.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from optax import contrib

from hetjax.errors import BadInput
from hetjax.optimizers.optimizer import optimizer
from hetjax.optimizers.table import RULES
from hetjax.runtime.execution.checking.checks import StepChecks
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.training.settings.config import OptimizerConfig
from tests.runtime.oracle import oracle_gradients, random_batch
from tests.runtime.test_eight_bits import ONE
from tests.runtime.test_update import MODEL, weights
from tests.short_runs import draws

EIGHT = ("adamw", "lion", "sgd")
NUM_STEPS, SKIPPED, PEAK = 6, 1, 1e-2
LEFT_OUT = StepChecks(most_loss=0.0, skips_spikes=True)


def rate(step: int) -> float:
    """Return the rate that falls linearly from the peak to zero, without a warm-up."""
    return PEAK * (1 - step / NUM_STEPS)


def config_of(name: Any, **options: Any) -> OptimizerConfig:
    return OptimizerConfig(
        name=name,
        learning_rate=PEAK,
        schedule="linear",
        final_fraction=0.0,
        warmup_steps=0,
        **options,
    )


def steps_left_out(config: OptimizerConfig, first: Any) -> Any:
    """Return the weights after Optax's updates of all steps except the skipped one."""
    params: Any = first
    state: Any = None
    for step in range(NUM_STEPS - 2):
        if step == SKIPPED:
            continue
        now = replace(config, schedule="constant", learning_rate=rate(step))
        rule = optimizer(replace(now, state_bits=32), NUM_STEPS)
        state = rule.init(params) if state is None else state
        _, grads = oracle_gradients(MODEL, params, random_batch(ONE, 128, step))
        updates, state = rule.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.usefixtures("quick_compiling")
@pytest.mark.parametrize(
    "config",
    draws(
        [config_of("adamw", ema=0.9)]
        + [config_of(name, state_bits=8) for name in EIGHT]
        + [config_of(name) for name in RULES],
        short=5,
    ),
    ids=lambda config: f"{config.name}-{config.state_bits}-{config.ema}",
)
def test_weights_are_those_of_optax_with_the_skipped_step_left_out(
    config: OptimizerConfig,
):
    nodes = {"a": jax.devices()[:1]}
    rule = optimizer(config, NUM_STEPS)
    runtime = StageRuntime(ONE, MODEL, nodes, rule, clip_norm=1e9)
    runtime.initialise(0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = steps_left_out(config, weights(runtime))
    for step in range(NUM_STEPS - 2):
        checks = LEFT_OUT if step == SKIPPED else StepChecks()
        batch = random_batch(ONE, MODEL.vocab_size, step)
        commit = runtime.step(step, batch, checks=checks)
        assert commit.is_skipped == (step == SKIPPED)
    for path, value in weights(runtime).items():
        np.testing.assert_allclose(value, expected[path], atol=2e-5, err_msg=path)


UNKNOWN = {
    "prodigy": (contrib.prodigy(1.0), "ProdigyState"),
    "ademamix": (contrib.ademamix(1e-3), "ScaleByAdemamixState"),
    "accumulated": (optax.MultiSteps(optax.sgd(1e-3), 2), "MultiStepsState"),
    "injected": (
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        "InjectStatefulHyperparamsState",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_rule_with_a_number_that_nobody_lists_is_refused(name: str):
    rule, state = UNKNOWN[name]
    nodes = {"a": jax.devices()[:1]}
    with pytest.raises(BadInput, match=rf"whose state has {state}\.\w+") as refused:
        StageRuntime(ONE, MODEL, nodes, rule, clip_norm=1.0).initialise(0)  # pyright: ignore[reportArgumentType]
    assert "numbers of a rule in hetjax/optimizers" in refused.value.fix
