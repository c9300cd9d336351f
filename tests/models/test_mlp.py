# SPDX-License-Identifier: Apache-2.0
"""Both MLPs and both norms against numpy in double precision."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.models.layers import GatedMlp, GeluMlp, MlpConfig, NormConfig, scaled
from hetjax.models.model import ModuleSpec, abstract_params, apply

RMS = NormConfig(kind="rms", eps=1e-6)
LAYER = NormConfig(kind="layer", eps=1e-5)


def _case(cls, norm, **own):
    config = MlpConfig(hidden_size=12, inner_size=20, norm=norm, **own)
    spec = ModuleSpec("block_000.mlp", cls, config)
    rng = np.random.default_rng(0)
    exact = {
        name: rng.normal(size=param.shape)
        for name, param in abstract_params(spec).items()
    }
    params = {name: jnp.asarray(v, jnp.float32) for name, v in exact.items()}
    return spec, params, exact, rng.normal(size=(3, 5, 12)) * 3 + 1


def test_swiglu_with_rms_norm_agrees_with_numpy():
    spec, params, p, x = _case(GatedMlp, RMS)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["norm.scale"]
    gate = y @ p["gate"]
    expected = x + (gate / (1 + np.exp(-gate)) * (y @ p["up"])) @ p["down"]
    got, _ = jax.jit(apply, static_argnums=0)(spec, params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_swiglu_with_biases_adds_as_much_as_it_is_scaled_to():
    spec, params, p, x = _case(GatedMlp, RMS, biases=True, residual_scale=0.22)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["norm.scale"]
    gate, up = y @ p["gate"] + p["gate_bias"], y @ p["up"] + p["up_bias"]
    added = (gate / (1 + np.exp(-gate)) * up) @ p["down"] + p["down_bias"]
    got, _ = jax.jit(apply, static_argnums=0)(spec, params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, x + 0.22 * added, rtol=1e-4, atol=1e-4)


def test_in_bf16_a_factor_is_not_rounded_to_bf16():
    x = np.random.default_rng(0).normal(size=4096)
    low = jnp.asarray(x, jnp.bfloat16)
    ratio = scaled(low, 0.22).astype(jnp.float32) / low.astype(jnp.float32)
    assert abs(float(ratio.mean()) - 0.22) < 5e-5  # in bf16 it is 0.2197


def test_gelu_with_layer_norm_and_biases_agrees_with_numpy():
    spec, params, p, x = _case(GeluMlp, LAYER)
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    y = (y * p["norm.scale"] + p["norm.bias"]) @ p["up"] + p["up_bias"]
    y = y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    expected = x + y @ p["down"] + p["down_bias"]
    got, _ = jax.jit(apply, static_argnums=0)(spec, params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cls", [GatedMlp, GeluMlp])
def test_bf16_parameters_give_a_bf16_stream_with_norms_in_fp32(cls):
    spec, params, _, x = _case(cls, LAYER)
    low = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    x_BLD = jnp.asarray(x, jnp.bfloat16)
    y_BLD, _ = apply(spec, low, x_BLD)
    assert y_BLD.dtype == jnp.bfloat16
    rows = str(jax.make_jaxpr(lambda p, x: apply(spec, p, x)[0])(low, x_BLD))
    assert "f32[3,5,1] = rsqrt" in rows
