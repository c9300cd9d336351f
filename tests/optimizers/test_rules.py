# SPDX-License-Identifier: Apache-2.0
"""Rules equal their publications; only matrices decay."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.optimizers.decay import matrices
from hetjax.optimizers.optimizer import optimizer
from hetjax.optimizers.settings import OptimizerConfig
from hetjax.optimizers.table import RULES

NAMES = tuple(RULES)
PARAMS = {
    "attention.q": jnp.full((2, 3, 2), 2.0),
    "attention.q_bias": jnp.full((3, 2), 2.0),
    "norm.scale": jnp.full((2,), 2.0),
}


def test_only_matrices_decay():
    marked = {"attention.q": True, "attention.q_bias": False, "norm.scale": False}
    assert matrices(PARAMS) == marked


@pytest.mark.parametrize("name", NAMES)
def test_without_gradients_a_rule_only_decays_by_rate_times_decay(name):
    config = OptimizerConfig(
        name=name,
        learning_rate=0.5,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.1,
    )
    rule = optimizer(config, 10)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, _ = rule.update(zeros, rule.init(PARAMS), PARAMS)
        after: Any = optax.apply_updates(PARAMS, updates)
    np.testing.assert_allclose(after["attention.q"], 2.0 * (1 - 0.5 * 0.1), rtol=1e-6)
    np.testing.assert_array_equal(after["attention.q_bias"], PARAMS["attention.q_bias"])
    np.testing.assert_array_equal(after["norm.scale"], PARAMS["norm.scale"])


def adamw(gradients: list[float]) -> float:
    """Loshchilov and Hutter 2019, algorithm 2, from 0 and without decay."""
    m = v = weight = 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        weight -= 0.1 * (m / (1 - 0.8**t)) / math.sqrt(v / (1 - 0.9**t))
    return weight


def lion(gradients: list[float]) -> float:
    """Chen et al. 2023, algorithm 2, from 0 and without decay."""
    m = weight = 0.0
    for g in gradients:
        weight -= 0.1 * math.copysign(1, 0.8 * m + 0.2 * g)
        m = 0.9 * m + 0.1 * g
    return weight


def sgd(gradients: list[float]) -> float:
    velocity = weight = 0.0
    for g in gradients:
        velocity = 0.8 * velocity + g
        weight -= 0.1 * velocity
    return weight


def adafactor(gradients: list[float]) -> float:
    """Shazeer and Stern 2018, algorithm 4, for a vector of equal values."""
    v = weight = 0.0
    for t, g in enumerate(gradients, start=1):
        decay = 1 - t**-0.8
        v = decay * v + (1 - decay) * (g * g + 1e-30)
        step = g / math.sqrt(v)
        step /= max(1.0, abs(step))
        weight -= 0.1 * max(1e-3, abs(weight)) * step
    return weight


def nesterov_adam(gradients: list[float]) -> float:
    """Adam as in Muon, with a mean that looks one step ahead (Dozat 2016)."""
    m = v = weight = 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        ahead = 0.8 * m / (1 - 0.8 ** (t + 1)) + 0.2 * g / (1 - 0.8**t)
        weight -= 0.1 * ahead / math.sqrt(v / (1 - 0.9**t))
    return weight


def schedule_free(gradients: list[float]) -> float:
    """Defazio et al. 2024, algorithm 1, at a constant rate: the weights are y."""
    v = x = y = z = 0.0
    for t, g in enumerate(gradients, start=1):
        v = 0.9 * v + 0.1 * g * g
        z -= 0.1 * g / math.sqrt(v / (1 - 0.9**t))
        x += (z - x) / t
        y = 0.2 * z + 0.8 * x
    return y


PUBLISHED = {
    "adafactor": adafactor,
    "adamw": adamw,
    "lion": lion,
    "muon": nesterov_adam,
    "schedule-free": schedule_free,
    "sgd": sgd,
}


def test_muon_moves_a_matrix_along_its_gradients_singular_vectors():
    """Jordan et al. 2024: all singular values near 1, scaled to Adam's size; heads are
    columns of q and rows of out, and each expert is a separate matrix."""
    config = OptimizerConfig(
        name="muon",
        learning_rate=1.0,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        beta1=0.0,
    )
    shapes = {"q": (6, 2, 4), "out": (2, 4, 6), "gate": (3, 6, 8), "down": (8, 6)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    grads = {
        f"layer.{name}": jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    rule = optimizer(config, 10)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates: Any
        updates, _ = rule.update(grads, rule.init(grads), grads)
    for name, gradient in grads.items():
        shape = (-1, 8) if name.endswith("q") else (-1, gradient.shape[-1])
        ours, theirs = updates[name].reshape(shape), gradient.reshape(shape)
        if name.endswith("gate"):
            ours, theirs = updates[name], gradient
        left, _, right = np.linalg.svd(np.asarray(theirs), full_matrices=False)
        found = (
            np.swapaxes(left, -1, -2) @ np.asarray(ours) @ np.swapaxes(right, -1, -2)
        )
        values = -np.diagonal(found, axis1=-2, axis2=-1) / (0.2 * math.sqrt(8))
        assert np.all((values > 0.6) & (values < 1.3)), (name, values)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_published_rule(name: Any):
    config = OptimizerConfig(
        name=name,
        learning_rate=0.1,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        beta1=0.8,
        beta2=0.9,
    )
    gradients = [1.0, -0.5, 2.0, -3.0]
    rule, weights = optimizer(config, 10), {"w": jnp.zeros(2)}
    state: Any = rule.init(weights)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for g in gradients:
            updates, state = rule.update({"w": jnp.full(2, g)}, state, weights)
            weights: Any = optax.apply_updates(weights, updates)
    np.testing.assert_allclose(weights["w"], PUBLISHED[name](gradients), rtol=1e-4)


def test_sgd_takes_momentum_from_beta1():
    config = OptimizerConfig(
        name="sgd",
        learning_rate=0.1,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        beta1=0.5,
    )
    rule = optimizer(config, 10)
    weights: Any = {"w": jnp.zeros(2)}
    state = rule.init(weights)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            updates, state = rule.update({"w": jnp.ones(2)}, state, weights)
            weights = optax.apply_updates(weights, updates)
    velocities = [1.0, 1.5, 1.75]
    np.testing.assert_allclose(weights["w"], -0.1 * sum(velocities), rtol=1e-6)
