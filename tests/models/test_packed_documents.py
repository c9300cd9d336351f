# SPDX-License-Identifier: Apache-2.0
"""Documents that share a sequence have the same losses as each alone."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.models.attention.attention import AttentionForm, in_form
from hetjax.models.configs import GPTConfig, LlamaConfig, RopeScaling, Routing
from hetjax.models.decoders import gpt_model, llama_model
from hetjax.models.model import Model, apply, can_pack
from hetjax.models.positions import positions_within
from tests.runtime.random_weights import random_params
from tests.short_runs import draws

L = 24
DOCUMENTS = [7, 12]  # lengths; then padding
SHARED: dict[str, Any] = dict(
    name="m",
    vocab_size=100,
    hidden_size=16,
    num_blocks=2,
    num_heads=4,
    max_seq_len=L,
)
LLAMA = LlamaConfig(**SHARED, inner_size=32, num_kv_heads=2)
STRETCHED = RopeScaling(kind="llama3", factor=8.0, original_positions=8)
DROPLESS = Routing(num_experts=4, top_k=2, capacity_factor=None)
MODELS = {
    "learned positions": gpt_model(GPTConfig(**SHARED)),
    "window": llama_model(replace(LLAMA, window=3, windowed=(True, False))),
    "unturned": llama_model(replace(LLAMA, rope_blocks=(False, True), biases="all")),
    "scaled": llama_model(replace(LLAMA, rope_scaling=STRETCHED)),
    "experts": llama_model(replace(LLAMA, routing=DROPLESS)),
}


def summed_loss(
    model: Model,
    form: AttentionForm,
    params: dict[str, Any],
    tokens: np.ndarray,
    targets: np.ndarray,
    documents: np.ndarray | None,
) -> jax.Array:
    x: Any = jnp.asarray(tokens)
    for spec in model.modules:
        own = {
            path.removeprefix(spec.path + "."): value
            for path, value in params.items()
            if path.startswith(spec.path + ".")
        }
        own |= {name: params[owner] for name, owner in spec.tied}
        given = (x, targets) if spec is model.modules[-1] else (x,)
        told = None if documents is None else jnp.asarray(documents)
        x, _ = apply(
            in_form(spec, form), own, *map(jnp.asarray, given), documents_BL=told
        )
    return x


@pytest.mark.parametrize("form", draws(["chunked", "xla"], short=1))
@pytest.mark.parametrize("name", MODELS)
def test_two_documents_have_the_losses_and_gradients_of_each_alone(
    name: str, form: AttentionForm
):
    model, rng = MODELS[name], np.random.default_rng(1)
    params: Any = random_params(model, 1)
    rows = [rng.integers(0, 100, (2, n)).astype(np.int32) for n in DOCUMENTS]
    packed = np.zeros((3, 1, L), np.int32)
    packed[1] = -1
    at = 0
    for number, (tokens, targets) in enumerate(rows, 1):
        packed[:, 0, at : at + len(tokens)] = tokens, targets, [number] * len(tokens)
        at += len(tokens)

    def together(params: Any) -> jax.Array:
        return summed_loss(model, form, params, packed[0], packed[1], packed[2])

    def alone(params: Any) -> jax.Array:
        sums = [
            summed_loss(model, "xla", params, row[:1], row[1:], None) for row in rows
        ]
        return sum(sums, start=jnp.zeros(()))

    (loss, gradient), (expected, expected_gradient) = (
        jax.jit(jax.value_and_grad(of))(params) for of in (together, alone)
    )
    count = sum(DOCUMENTS)
    assert abs(loss - expected) / count <= 1e-6 * expected / count
    for path, value in expected_gradient.items():
        # softmax ignores a shift of all scores: a key bias's gradient is rounding
        scale = np.linalg.norm(expected_gradient[path.replace("k_bias", "q_bias")])
        assert np.linalg.norm(gradient[path] - value) <= 1e-5 * scale, path
    assert can_pack(model)


def test_positions_begin_again_with_each_document():
    documents = jnp.asarray([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
    expected = [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert positions_within(documents).tolist() == expected


def test_float16_at_once_parts_documents_as_fp32_does():
    model, rng = MODELS["scaled"], np.random.default_rng(2)
    spec = next(s for s in model.modules if s.name == "attention")
    params: Any = {
        name.removeprefix(spec.path + "."): value
        for name, value in random_params(model, 2).items()
        if name.startswith(spec.path + ".")
    }
    documents = jnp.asarray([[1] * 7 + [2] * 12 + [0] * 5])
    x_BLD = rng.normal(size=(1, L, 16))
    found = {
        dtype: jax.jit(apply, static_argnums=0)(
            in_form(spec, "xla"),
            {name: jnp.asarray(value, dtype) for name, value in params.items()},
            jnp.asarray(x_BLD, dtype),
            documents_BL=documents,
        )[0]
        for dtype in ("float16", "float32")
    }
    np.testing.assert_allclose(
        found["float16"].astype(jnp.float32), found["float32"], atol=0.05
    )
