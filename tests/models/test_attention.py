# SPDX-License-Identifier: Apache-2.0
"""Attention against a plain numpy loop over heads and positions.

Legend: B sequences, L positions, D residual width, N heads, K key/value heads, H head
size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.errors import BadInput
from hetjax.models.attention.attention import Attention, AttentionConfig
from hetjax.models.configs import NormConfig
from hetjax.models.model import ModuleSpec, Params, abstract_params, apply
from hetjax.models.positions import rotate

LLAMA = AttentionConfig(
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_size=6,
    norm=NormConfig(kind="rms", eps=1e-5),
    rope_theta=100.0,
)
GPT = AttentionConfig(
    hidden_size=24,
    num_heads=4,
    num_kv_heads=4,
    head_size=6,
    norm=NormConfig(kind="layer", eps=1e-5),
    biases="all",
)


def _spec(config: AttentionConfig) -> ModuleSpec:
    return ModuleSpec("block_000.attention", Attention, config)


def _random_params(spec: ModuleSpec, seed: int) -> Params:
    """Give every parameter, including norms and biases, values that matter."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=param.shape) * 0.5, jnp.float32)
        for name, param in abstract_params(spec).items()
    }


def _norm(config: AttentionConfig, p: dict[str, np.ndarray], x: np.ndarray):
    if config.norm.kind == "rms":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["norm.scale"]
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return y * p["norm.scale"] + p["norm.bias"]


def _turned(vector: np.ndarray, position: int, theta: float | None) -> np.ndarray:
    """Multiply pairs (i, i + H/2), as complex numbers, by exp(i p theta^(-2i/H))."""
    if theta is None:
        return vector
    half = len(vector) // 2
    pairs = vector[:half] + 1j * vector[half:]
    pairs = pairs * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag])


def _reference(config: AttentionConfig, p: dict[str, np.ndarray], x: np.ndarray):
    """Loop over positions and heads; query head n reads key/value head n // (N/K)."""
    group = config.num_heads // config.num_kv_heads
    biased = config.biases == "all"
    out = x.copy()
    for b, y in enumerate(_norm(config, p, x)):
        for n in range(config.num_heads):
            j = n // group
            q, k, v = y @ p["q"][:, n], y @ p["k"][:, j], y @ p["v"][:, j]
            if biased:
                q, k, v = q + p["q_bias"][n], k + p["k_bias"][j], v + p["v_bias"][j]
            q = np.stack([_turned(r, i, config.rope_theta) for i, r in enumerate(q)])
            k = np.stack([_turned(r, i, config.rope_theta) for i, r in enumerate(k)])
            for i in range(len(y)):
                score = np.exp(k[: i + 1] @ q[i] / np.sqrt(config.head_size))
                out[b, i] += (score / score.sum()) @ v[: i + 1] @ p["out"][n]
    return out + p["out_bias"] if biased else out


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_attention_agrees_with_a_loop_over_heads_and_positions(config):
    spec = _spec(config)
    params = _random_params(spec, 1)
    x_BLD = np.random.default_rng(2).normal(size=(2, 7, 24)).astype(np.float32)
    y_BLD, aux = jax.jit(apply, static_argnums=0)(spec, params, jnp.asarray(x_BLD))
    exact = {name: np.asarray(value, np.float64) for name, value in params.items()}
    expected = _reference(config, exact, x_BLD.astype(np.float64))
    np.testing.assert_allclose(y_BLD, expected, rtol=2e-5, atol=2e-5)
    assert aux == 0


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_no_position_sees_a_later_one(config):
    spec = _spec(config)
    params = _random_params(spec, 3)
    x_BLD = jax.random.normal(jax.random.key(0), (1, 6, 24))
    sums = jax.jit(jax.jacrev(lambda x: apply(spec, params, x)[0][0].sum(axis=-1)))
    size_LL = np.abs(np.asarray(sums(x_BLD))[:, 0]).sum(axis=-1)
    assert np.all((size_LL > 0) == np.tri(6, dtype=bool))


def test_rotation_keeps_lengths_and_scores_depend_on_distance_only():
    x_LH, y_LH = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    same = jnp.asarray(np.tile(np.stack([x_LH, y_LH])[None, None], (1, 9, 1, 1)))
    turned = np.asarray(rotate(same, theta=50.0))[0]
    np.testing.assert_allclose(
        np.linalg.norm(turned, axis=-1), np.linalg.norm(same[0], axis=-1), rtol=1e-5
    )
    scores = turned[:, 0] @ turned[:, 1].T
    for offset in range(-8, 9):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_group_are_refused_with_what_to_type():
    with pytest.raises(
        BadInput, match="num_kv_heads = 3 does not divide num_heads = 4"
    ):
        AttentionConfig(
            hidden_size=24, num_heads=4, num_kv_heads=3, head_size=6, norm=LLAMA.norm
        )
