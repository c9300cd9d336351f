# SPDX-License-Identifier: Apache-2.0
"""Both ends of a model against numpy: look-up, cross-entropy, padding, derivative."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.errors import BadInput
from hetjax.models.configs import NormConfig
from hetjax.models.head import Head, HeadConfig, padded
from hetjax.models.layers import Embedding, EmbeddingConfig
from hetjax.models.model import ModuleSpec, apply, bind, init_params

CONFIG = HeadConfig(
    vocab_size=11,
    padded_vocab_size=16,
    hidden_size=6,
    norm=NormConfig(kind="rms", eps=1e-5),
)
SPEC = ModuleSpec("head", Head, CONFIG)


def _case(seed=0):
    rng = np.random.default_rng(seed)
    p = {"norm.scale": rng.normal(size=6), "table": rng.normal(size=(16, 6)) * 2}
    x, targets = rng.normal(size=(2, 5, 6)), rng.integers(0, 11, size=(2, 5))
    return p, x, targets


def _reference(p, x, targets):
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["norm.scale"]
    loss = 0.0
    for token, target in zip(y.reshape(-1, 6), targets.reshape(-1), strict=True):
        logits = p["table"][:11] @ token  # padded rows do not count
        loss += np.log(np.exp(logits).sum()) - logits[target]
    return loss


def _on_device(p, dtype=jnp.float32):
    return {name: jnp.asarray(value, dtype) for name, value in p.items()}


def test_cross_entropy_is_the_sum_over_tokens_without_the_padding():
    p, x, targets = _case()
    loss, _ = apply(
        SPEC, _on_device(p), jnp.asarray(x, jnp.float32), jnp.asarray(targets)
    )
    assert loss.shape == () and loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, _reference(p, x, targets), rtol=1e-5)


def test_divided_logits_have_the_loss_of_a_table_divided():
    p, x, targets = _case(2)
    spec = ModuleSpec("head", Head, replace(CONFIG, logit_divisor=6.0))
    given = jnp.asarray(x, jnp.float32), jnp.asarray(targets)
    loss, _ = apply(spec, _on_device(p), *given)
    divided = p | {"table": p["table"] / 6}
    np.testing.assert_allclose(loss, _reference(divided, x, targets), rtol=1e-5)


def test_cross_entropy_derivative_agrees_with_differences_of_numpy():
    p, x, targets = _case(1)
    grads, dx = jax.grad(
        lambda p, x: apply(SPEC, p, x, jnp.asarray(targets))[0], argnums=(0, 1)
    )(_on_device(p), jnp.asarray(x, jnp.float32))
    assert np.all(np.asarray(grads["table"])[11:] == 0.0)

    def slope(array, at):
        ends = []
        for step in (1e-6, -1e-6):
            array[at] += step
            ends.append(_reference(p, x, targets))
            array[at] -= step
        return (ends[0] - ends[1]) / 2e-6

    for at in ((0, 0), (5, 3), (10, 5), (12, 1)):
        np.testing.assert_allclose(
            grads["table"][at], slope(p["table"], at), rtol=1e-3, atol=1e-4
        )
    for at in ((0, 0, 0), (1, 4, 5)):
        np.testing.assert_allclose(dx[at], slope(x, at), rtol=1e-3, atol=1e-4)


def test_logits_of_the_padding_are_minus_infinity():
    p, x, _ = _case()
    head = bind(SPEC, _on_device(p, jnp.bfloat16))
    assert isinstance(head, Head)
    logits_BLV = head.logits(jnp.asarray(x, jnp.bfloat16))
    assert logits_BLV.dtype == jnp.float32 and logits_BLV.shape == (2, 5, 16)
    assert np.all(np.isneginf(logits_BLV[..., 11:]))
    assert np.all(np.isfinite(logits_BLV[..., :11]))


def test_bf16_loss_is_close_to_numpy_and_keeps_one_copy_of_the_logits():
    p, x, targets = _case()
    low, x_BLD = _on_device(p, jnp.bfloat16), jnp.asarray(x, jnp.bfloat16)
    loss, vjp = jax.vjp(
        lambda p, x: apply(SPEC, p, x, jnp.asarray(targets))[0], low, x_BLD
    )
    np.testing.assert_allclose(loss, _reference(p, x, targets), rtol=2e-2)
    saved = [leaf for leaf in jax.tree.leaves(vjp) if leaf.shape == (2, 5, 16)]
    assert [leaf.dtype for leaf in saved] == [jnp.bfloat16]
    grads, dx = vjp(jnp.float32(1))
    assert grads["table"].dtype == dx.dtype == jnp.bfloat16


def test_embedding_adds_the_row_of_the_token_and_of_the_position():
    config = EmbeddingConfig(padded_vocab_size=16, hidden_size=6, num_positions=8)
    spec = ModuleSpec("embedding", Embedding, config)
    params = init_params(spec, jax.random.key(0))
    tokens = np.array([[3, 1, 15], [0, 0, 2]], np.int32)
    x_BLD, _ = apply(spec, params, jnp.asarray(tokens))
    table, positions = np.asarray(params["table"]), np.asarray(params["positions"])
    np.testing.assert_array_equal(x_BLD, table[tokens] + positions[:3])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_embeddings_gradient_is_summed_in_fp32_whatever_it_is_given_in(dtype):
    """One token occurs 4,200 times: a sum in bf16 would stop at 256 of them."""
    config = EmbeddingConfig(padded_vocab_size=32, hidden_size=4)
    spec = ModuleSpec("embedding", Embedding, config)
    params = _on_device(init_params(spec, jax.random.key(0)), dtype)
    rng = np.random.default_rng(0)
    tokens_BL = np.where(rng.random((2, 3000)) < 0.7, 7, rng.integers(0, 31, (2, 3000)))
    d_BLD = jnp.asarray(rng.normal(0.02, 0.01, (2, 3000, 4)), dtype)

    def given(params):
        return jnp.sum(apply(spec, params, jnp.asarray(tokens_BL))[0] * d_BLD)

    found = jax.jit(jax.grad(given))(params)["table"]
    expected = np.zeros((32, 4))
    np.add.at(expected, tokens_BL, np.asarray(d_BLD, np.float64))
    assert found.dtype == dtype
    within = max(float(jnp.finfo(dtype).eps), 1e-5)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=within)


@pytest.mark.parametrize(
    ("size", "multiple", "expected"),
    [(50257, 128, 50304), (128, 128, 128), (1, 64, 64)],
)
def test_vocabulary_is_padded_up_to_the_multiple(size, multiple, expected):
    assert padded(size, multiple) == expected


def test_padding_below_the_vocabulary_is_refused():
    with pytest.raises(BadInput, match="padded_vocab_size = 16 below vocab_size = 17"):
        HeadConfig(vocab_size=17, padded_vocab_size=16, hidden_size=6, norm=CONFIG.norm)
