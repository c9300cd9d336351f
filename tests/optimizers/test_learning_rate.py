# SPDX-License-Identifier: Apache-2.0
"""The learning rate follows its formula."""

import math
from typing import Literal

import numpy as np
import pytest

from hetjax.optimizers.learning_rate import LearningRates
from hetjax.optimizers.settings import OptimizerConfig


def expected_rate(
    config: OptimizerConfig, step: int, num_steps: int, warmup: int
) -> float:
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    share = (step - warmup) / (num_steps - warmup)
    low = config.final_fraction
    if config.schedule == "cosine":
        return config.learning_rate * (
            low + (1 - low) * (1 + math.cos(math.pi * share)) / 2
        )
    if config.schedule == "linear":
        return config.learning_rate * (1 - (1 - low) * share)
    return config.learning_rate


@pytest.mark.parametrize("course", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(
    ("warmup_steps", "num_steps", "warmup"), [(0, 7, 0), (3, 9, 3), (100, 9, 4)]
)
def test_the_learning_rate_rises_over_the_warmup_and_then_takes_its_course(
    course: Literal["cosine", "linear", "constant"],
    warmup_steps: int,
    num_steps: int,
    warmup: int,
):
    config = OptimizerConfig(
        learning_rate=0.5,
        schedule=course,
        warmup_steps=warmup_steps,
        final_fraction=0.2,
    )
    expected = [expected_rate(config, k, num_steps, warmup) for k in range(num_steps)]
    rates = LearningRates(config, num_steps)
    made = [rates[k] for k in range(num_steps)]
    np.testing.assert_allclose(made, expected, rtol=1e-5)


def test_learning_rates_of_a_billion_steps_are_made_as_they_are_asked_for():
    config = OptimizerConfig(schedule="linear", warmup_steps=1000)
    num_steps = 10**9
    rates = LearningRates(config, num_steps, 10**8)
    steps = [10**8, 10**8 + 5000, 999, 1000, num_steps - 1]
    expected = [expected_rate(config, k, num_steps, 1000) for k in steps]
    np.testing.assert_allclose([rates[k] for k in steps], expected, rtol=1e-5)
