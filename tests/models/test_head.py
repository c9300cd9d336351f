# SPDX-License-Identifier: Apache-2.0
"""Both ends of a model against numpy: look-up, cross-entropy, padding, derivative."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.errors import BadInput
from hetjax.models import cross_entropy
from hetjax.models.configs import NormConfig
from hetjax.models.head import Head, HeadConfig, padded
from hetjax.models.layers import Embedding, EmbeddingConfig
from hetjax.models.model import ModuleSpec, apply, bind, init_params
from hetjax.stage.backward_split import split_backward

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
        logits = p["table"][:11] @ token  # padded rows take no part
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
    """One token is there 4,200 times: a sum in bf16 would end at 256 of them."""
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


def _wide(num_tokens=21):
    config = HeadConfig(
        vocab_size=100, padded_vocab_size=128, hidden_size=16, norm=CONFIG.norm
    )
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "norm.scale": 1 + 0.1 * jax.random.normal(keys[0], (16,)),
        "table": jax.random.normal(keys[1], (128, 16)),
    }
    x_BLD = jax.random.normal(keys[2], (3, num_tokens // 3, 16))
    targets_BL = jax.random.randint(keys[0], (3, num_tokens // 3), 0, 100)
    return ModuleSpec("head", Head, config), params, x_BLD, targets_BL


@pytest.mark.parametrize(
    ("num_tokens", "tokens_per_block"),
    [(21, 1), (21, 4), (21, 20), (39, 10)],  # 39 in 4 blocks: the last is not full
)
def test_in_blocks_the_loss_and_all_gradients_are_those_of_plain_logits(
    monkeypatch, num_tokens, tokens_per_block
):
    spec, params, x_BLD, targets_BL = _wide(num_tokens)

    def plain(params, x_BLD):
        root_BL1 = jnp.sqrt(jnp.mean(x_BLD**2, axis=-1, keepdims=True) + 1e-5)
        y_BLD = x_BLD / root_BL1 * params["norm.scale"][None, None, :]
        log_p_BLV = jax.nn.log_softmax(y_BLD @ params["table"][:100].T)
        log_p_BL1 = jnp.take_along_axis(log_p_BLV, targets_BL[..., None], axis=-1)
        return -3 * jnp.sum(log_p_BL1)

    def in_blocks(params, x_BLD):
        return 3 * apply(spec, params, x_BLD, targets_BL)[0]  # as a scaled loss

    monkeypatch.setattr(cross_entropy, "WHOLE_BYTES", 0)
    monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", tokens_per_block * 128 * 4)
    assert "scan" in str(jax.make_jaxpr(in_blocks)(params, x_BLD))
    found, expected = (
        jax.jit(jax.value_and_grad(form, argnums=(0, 1)))(params, x_BLD)
        for form in (in_blocks, plain)
    )
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


def test_many_logits_are_neither_kept_nor_there_at_once_nor_cross_to_w(monkeypatch):
    """4,096 tokens of 32,000 words: all logits are 500 MiB in fp32."""
    monkeypatch.setattr(cross_entropy, "WHOLE_BYTES", 0)
    spec = ModuleSpec(
        "head",
        Head,
        HeadConfig(
            vocab_size=32_000,
            padded_vocab_size=32_000,
            hidden_size=16,
            norm=CONFIG.norm,
        ),
    )
    shapes = [((16,), "float32"), ((32_000, 16), "float32"), ((1, 4096, 16), "float32")]
    scale, table, x = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def gradients(scale, table, x, targets):
        def loss(scale, table, x):
            params = {"norm.scale": scale, "table": table}
            return apply(spec, params, x, targets)[0]

        return jax.grad(loss, argnums=(2, 0, 1))(scale, table, x)

    inputs = scale, table, x, tokens
    program = jax.jit(gradients).lower(*inputs).compile()
    memory: Any = program.memory_analysis()
    assert memory.temp_size_in_bytes < 256 * 2**20
    split = split_backward(gradients, 1, inputs)
    (dx,), crossing = jax.eval_shape(split.first, *inputs)
    assert dx.shape == x.shape
    assert sum(value.size for value in crossing) < 4 * x.size
    kept = [inputs[i] for i in split.kept]
    grads = jax.eval_shape(split.second, kept, crossing)
    assert [g.shape for g in grads] == [scale.shape, table.shape]
