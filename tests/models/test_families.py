# SPDX-License-Identifier: Apache-2.0
"""Whole models: names and grain, tied head, causality, dtypes, initial loss."""

import math
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.models.decoders import GPTConfig, LlamaConfig, model_of
from hetjax.models.experts.moe import Routing
from hetjax.models.head import Head
from hetjax.models.model import Model, Params, abstract_params, apply, bind, init_params

GPT = GPTConfig(
    name="gpt",
    vocab_size=50,
    hidden_size=16,
    num_blocks=2,
    num_heads=4,
    max_seq_len=8,
    vocab_multiple=8,
)
LLAMA = LlamaConfig(
    name="llama",
    vocab_size=50,
    hidden_size=16,
    inner_size=24,
    num_blocks=2,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=8,
    vocab_multiple=8,
)
MIXTRAL = replace(LLAMA, routing=Routing(num_experts=4, top_k=2))
SCALED = replace(
    LLAMA,
    biases="all",
    mlp_biases=True,
    rope_blocks=(True, False),
    embedding_scale=12.0,
    residual_scale=0.22,
    query_scale=0.1,
    logit_divisor=8.0,
    tied=True,
)
FAMILIES = pytest.mark.parametrize(
    "config", [GPT, LLAMA, MIXTRAL, SCALED], ids=["gpt", "llama", "mixtral", "scaled"]
)


@cache
def _init(model: Model) -> dict[str, Params]:
    def start():
        return {
            spec.path: init_params(spec, jax.random.fold_in(jax.random.key(0), index))
            for index, spec in enumerate(model.modules)
        }

    return jax.jit(start)()


def _tied(spec, params: dict[str, Params]) -> Params:
    """Add the parameters that the module shares, found by their full path."""
    shared = {}
    for own, path in spec.tied:
        owner, _, name = path.rpartition(".")
        shared[own] = params[owner][name]
    return params[spec.path] | shared


@partial(jax.jit, static_argnums=0)
def _stream(model: Model, params: dict[str, Params], tokens_BL):
    """Run all but the head; return the residual stream and the auxiliary loss."""
    x, total = tokens_BL, jnp.zeros(())
    for spec in model.modules[:-1]:
        x, aux = apply(spec, _tied(spec, params), x)
        total += aux
    return x, total


def _tokens(seed=0):
    return jax.random.randint(jax.random.key(seed), (2, 8), 0, 50, jnp.int32)


@FAMILIES
def test_grain_changes_the_layers_but_not_the_modules_nor_their_order(config):
    whole, halves = model_of(config), model_of(replace(config, grain="half"))
    feed_forward = "moe" if config is MIXTRAL else "mlp"
    assert [layer.name for layer in whole.layers] == [
        "embedding",
        "block_000",
        "block_001",
        "head",
    ]
    assert [layer.name for layer in halves.layers] == [
        "embedding",
        "block_000.attention",
        f"block_000.{feed_forward}",
        "block_001.attention",
        f"block_001.{feed_forward}",
        "head",
    ]
    assert whole.modules == halves.modules


def test_equal_blocks_have_equal_classes_and_configs():
    first, second = model_of(LLAMA).layers[1:3]
    for a, b in zip(first.modules, second.modules, strict=True):
        assert (a.cls, a.config, a.name) == (b.cls, b.config, b.name)
        assert (a.block, b.block) == ("block_000", "block_001")


@FAMILIES
def test_an_untrained_model_is_as_unsure_as_the_vocabulary_is_large(config):
    model = model_of(config)
    params, head = _init(model), model.modules[-1]
    x, aux = _stream(model, params, _tokens())
    loss, _ = apply(head, _tied(head, params), x, _tokens(1))
    assert loss / 16 == pytest.approx(math.log(50), rel=0.02)
    # A balanced router costs coefficient x tokens in each of the two blocks.
    assert float(aux) == pytest.approx(
        0.01 * 16 * 2 if config is MIXTRAL else 0.0, rel=0.1
    )


@FAMILIES
def test_bf16_parameters_give_a_bf16_stream_and_an_fp32_loss(config):
    model = model_of(config)
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), _init(model))
    x, aux = _stream(model, low, _tokens())
    head = model.modules[-1]
    loss, _ = apply(head, _tied(head, low), x, _tokens(1))
    assert (x.dtype, loss.dtype, aux.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)


@FAMILIES
def test_logits_do_not_depend_on_later_tokens(config):
    model = model_of(config)
    params, tokens_BL = _init(model), _tokens()
    head = bind(model.modules[-1], _tied(model.modules[-1], params))
    assert isinstance(head, Head)
    one = head.logits(_stream(model, params, tokens_BL)[0])
    changed = tokens_BL.at[:, 5:].set((tokens_BL[:, 5:] + 7) % 50)
    two = head.logits(_stream(model, params, changed)[0])
    np.testing.assert_allclose(one[:, :5], two[:, :5], atol=1e-6)
    assert np.abs(np.asarray(one[:, 5:, :50] - two[:, 5:, :50])).max() > 1e-3


def test_the_gpt_head_reads_the_embedding_table_and_owns_none():
    model = model_of(GPT)
    head, params = model.modules[-1], _init(model)
    assert head.tied == (("table", "embedding.table"),)
    assert set(abstract_params(head)) == {"norm.scale", "norm.bias"}
    assert set(params["head"]) == {"norm.scale", "norm.bias"}

    x = np.random.default_rng(0).normal(size=(1, 3, 16)).astype(np.float32)
    module = bind(head, _tied(head, params))
    assert isinstance(module, Head)
    logits = module.logits(jnp.asarray(x))[..., :50]
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    expected = y @ np.asarray(params["embedding"]["table"])[:50].T
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_llama_has_its_own_head_table():
    assert set(abstract_params(model_of(LLAMA).modules[-1])) == {"norm.scale", "table"}


def test_residual_projections_start_smaller_with_more_blocks():
    for num_blocks, expected in ((2, 0.02 / 2), (32, 0.02 / 8)):
        model = model_of(replace(LLAMA, hidden_size=64, num_blocks=num_blocks))
        params = init_params(model.modules[1], jax.random.key(0))
        assert float(jnp.std(params["out"])) == pytest.approx(expected, rel=0.05)
        assert float(jnp.std(params["q"])) == pytest.approx(0.02, rel=0.05)
        assert np.all(np.asarray(params["norm.scale"]) == 1.0)
