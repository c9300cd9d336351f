# SPDX-License-Identifier: Apache-2.0
"""Counts against published totals and closed forms; a user's modules count, too."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hetjax.costs.graph.flops import forward_flops
from hetjax.models.decoders import model_of
from hetjax.models.experts.moe import Routing
from hetjax.models.model import (
    AuxLoss,
    Layer,
    Model,
    ModuleSpec,
    apply,
    init_params,
    parameter_count,
    tensor_sizes,
)
from hetjax.models.presets import (
    GPT2_124M,
    LLAMA2_7B,
    LLAMA3_8B,
    MIXTRAL_8X7B,
    PUBLISHED,
    TINY,
    model_config,
    model_preset,
)

# counted by transformers; the published ones are 1.24, 3.21, 8.03, 70.6 B, ...
OF_PUBLISHED = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "mistral-7b": 7_241_732_096,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


def _total(config):
    return sum(map(parameter_count, model_of(config).layers))


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (replace(GPT2_124M, vocab_multiple=1), 124_439_808),
        (GPT2_124M, 124_439_808 + (50_304 - 50_257) * 768),
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA3_8B, 8_030_261_248),
        (MIXTRAL_8X7B, 46_702_792_704),
    ],
)
def test_totals_are_the_published_ones(config, published):
    assert _total(config) == published


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_of_published_models_are_theirs(name):
    config = replace(model_config(name), vocab_multiple=1)
    assert _total(config) == OF_PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "hidden", "blocks"),
    [("gpt3-1.3b", 2048, 24), ("gpt3-2.6b", 2560, 32), ("gpt3-6.7b", 4096, 32)],
)
def test_gpt3_totals_follow_the_closed_form(name, hidden, blocks):
    layers = model_preset(name).layers
    block = 12 * hidden**2 + 13 * hidden
    ends = (51_200 + 1_024) * hidden + 2 * hidden
    assert sum(map(parameter_count, layers)) == blocks * block + ends


def test_a_tied_table_counts_once_under_layer_zero():
    layers = model_of(GPT2_124M).layers
    assert parameter_count(layers[0]) == (50_304 + 1_024) * 768
    assert parameter_count(layers[-1]) == 2 * 768


def test_flops_of_a_llama_follow_the_closed_form():
    L, D, F, V = 96, 128, 352, 1024
    attention = 2 * L * D * (128 + 2 * 64 + 128) + 2 * (2 * L * L * 128)
    block = attention + 3 * 2 * L * D * F
    assert forward_flops(model_of(TINY), L) == (0, *[block] * 4, 2 * L * D * V)


def test_flops_of_a_gpt_follow_the_closed_form():
    L, D, V = 32, 768, 50_304
    block = 24 * L * D**2 + 4 * L**2 * D
    flops = forward_flops(model_of(GPT2_124M), L)
    assert flops == (0, *[block] * 12, 2 * L * D * V)


def test_flops_of_halves_add_up_to_those_of_the_block():
    whole = forward_flops(model_of(TINY), 64)
    halves = forward_flops(model_of(replace(TINY, grain="half")), 64)
    assert [a + b for a, b in zip(halves[1:-1:2], halves[2:-1:2], strict=True)] == list(
        whole[1:-1]
    )


def test_flops_of_experts_count_capacity_and_dispatch():
    L, D, F, E, C = 64, 128, 352, 4, 40  # C = 2 * 64 / 4 * 1.25
    config = replace(TINY, grain="half", routing=Routing(num_experts=E, top_k=2))
    expected = 2 * L * D * E + 2 * (2 * L * E * C * D) + 3 * 2 * E * C * D * F
    assert forward_flops(model_of(config), L)[2] == expected


def test_sizes_to_divide_are_told_by_logical_axis():
    assert tensor_sizes(model_of(TINY)) == {
        "heads": (4,),
        "kv_heads": (2,),
        "mlp": (352,),
        "vocab": (1024,),
    }
    assert tensor_sizes(model_of(MIXTRAL_8X7B)) == {
        "experts": (8,),
        "heads": (32,),
        "kv_heads": (8,),
        "vocab": (32_000,),
    }
    assert tensor_sizes(model_of(GPT2_124M))["vocab"] == (50_304,)


@dataclass(frozen=True)
class Width:
    """The config of the user's modules below."""

    size: int
    vocab_size: int


class Lookup(nnx.Module):
    def __init__(self, config, *, rngs):
        shape = (config.vocab_size, config.size)
        self.table = nnx.Param(
            jax.random.normal(rngs.params(), shape), logical=("vocab", None)
        )

    def __call__(self, tokens_BL):
        return self.table[...][tokens_BL]


class Twice(nnx.Module):
    """A scan in a checkpoint in a jit, with an auxiliary loss: all must be walked."""

    def __init__(self, config, *, rngs):
        shape = (config.size, config.size)
        self.mix = nnx.Param(
            jax.random.normal(rngs.params(), shape), logical=(None, None)
        )
        self.loss = AuxLoss(jnp.zeros(()))

    def __call__(self, x_BLD):
        self.loss[...] = 3.0 * x_BLD.shape[0] * x_BLD.shape[1]

        @jax.jit
        @jax.checkpoint
        def run(w_DD, x_BLD):
            return jax.lax.scan(lambda x, _: (x @ w_DD, None), x_BLD, length=2)[0]

        return run(self.mix[...], x_BLD)


class Scores(nnx.Module):
    def __init__(self, config, *, rngs):
        shape = (config.vocab_size, config.size)
        self.rows = nnx.Param(
            jax.random.normal(rngs.params(), shape), logical=("vocab", None)
        )

    def logits(self, x_BLD):
        return jnp.einsum("bld,vd->blv", x_BLD, self.rows[...])

    def __call__(self, x_BLD, targets_BL):
        log_p_BLV = jax.nn.log_softmax(self.logits(x_BLD), axis=-1)
        return -jnp.take_along_axis(log_p_BLV, targets_BL[..., None], axis=-1).sum()


def _users_model():
    width = Width(size=6, vocab_size=10)
    tied = (("rows", "embedding.table"),)
    modules = (
        ModuleSpec("embedding", Lookup, width),
        ModuleSpec("block_000.twice", Twice, width),
        ModuleSpec("head", Scores, width, tied=tied),
    )
    return Model("mine", tuple(Layer(m.path, (m,)) for m in modules), 10, 16)


def test_a_users_own_modules_run_and_count():
    model = _users_model()
    assert [parameter_count(layer) for layer in model.layers] == [60, 36, 0]
    assert forward_flops(model, 5) == (0, 2 * (2 * 5 * 6 * 6), 2 * 5 * 6 * 10)
    assert tensor_sizes(model) == {"vocab": (10,)}
    lookup, twice, scores = model.modules
    tokens = np.array([[1, 2, 3], [4, 5, 9]], np.int32)
    table = init_params(lookup, jax.random.key(0))["table"]
    mix = init_params(twice, jax.random.key(1))["mix"]
    assert init_params(scores, jax.random.key(2)) == {}
    x, _ = apply(lookup, {"table": table}, jnp.asarray(tokens))
    y, aux = apply(twice, {"mix": mix}, x)
    loss, _ = apply(scores, {"rows": table}, y, jnp.asarray(tokens))
    assert aux == 3.0 * 6
    logits = np.asarray(table)[tokens] @ np.asarray(mix) @ np.asarray(mix)
    logits = logits.astype(np.float64) @ np.asarray(table).T
    picked = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    expected = (np.log(np.exp(logits).sum(-1)) - picked).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
