# SPDX-License-Identifier: Apache-2.0
"""What compiles on two tensor-parallel devices, and what a backward pass keeps.

Legend: B sequences, L positions, D residual width.
"""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.models.decoders import GPTConfig, model_of
from hetjax.models.experts.moe import Routing
from hetjax.models.model import abstract_params, apply
from hetjax.models.presets import TINY

GPT = GPTConfig(name="gpt", vocab_size=1000, hidden_size=64, num_blocks=1, num_heads=4)
MOE = replace(TINY, routing=Routing(num_experts=4, top_k=2))
BIASED = replace(
    TINY,
    biases="all",
    mlp_biases=True,
    embedding_scale=12.0,
    residual_scale=0.22,
    query_scale=0.1,
    logit_divisor=6.0,
    rope_blocks=(False, True),
)
FAMILIES = pytest.mark.parametrize(
    "config", [GPT, TINY, MOE, BIASED], ids=["gpt", "llama", "moe", "biased"]
)


def _forward(layer):
    def forward(params, *inputs):
        for spec in layer.modules:
            inputs = (apply(spec, params[spec.path], *inputs)[0],)
        return inputs[0]

    return forward


def _abstract(layer, mesh, dtype):
    def cut(param):
        spec = PartitionSpec(*("tensor" if name else None for name in param.logical))
        return NamedSharding(mesh, spec)

    return {
        spec.path: {
            name: jax.ShapeDtypeStruct(param.shape, dtype, sharding=cut(param))
            for name, param in abstract_params(replace(spec, tied=())).items()
        }
        for spec in layer.modules
    }


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (GPT, jnp.float32),
        (TINY, jnp.bfloat16),
        (MOE, jnp.float32),
        (BIASED, jnp.float32),
        (BIASED, jnp.bfloat16),
    ],
    ids=["gpt", "llama in bf16", "moe", "biased", "biased in bf16"],
)
def test_tensor_parallel_layers_communicate_by_all_reduce_alone(config, dtype):
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "tensor"))
    model, whole = model_of(config), NamedSharding(mesh, PartitionSpec())
    tokens_BL = jax.ShapeDtypeStruct((2, 16), jnp.int32, sharding=whole)
    shape = (2, 16, config.hidden_size)
    x_BLD = jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
    cases = (
        (model.layers[0], (tokens_BL,), 1),  # rows of the table
        (model.layers[1], (x_BLD,), 2),  # attention, MLP or experts
        (model.layers[-1], (x_BLD, tokens_BL), 2),  # maximum; sums
    )
    for layer, inputs, num_all_reduces in cases:
        program = jax.jit(_forward(layer), out_shardings=whole)
        text = program.lower(_abstract(layer, mesh, dtype), *inputs).compile().as_text()
        kinds = r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
        found = Counter(re.findall(rf"\b{kinds}(?:-start)?\(", text or ""))
        assert found == {"all-reduce": num_all_reduces}, (layer.name, found)


@FAMILIES
def test_a_block_keeps_weights_for_its_backward_as_themselves_and_never_as_copies(
    config,
):
    layer = model_of(config).layers[1]
    params = {
        s.path: {
            name: jax.ShapeDtypeStruct(p.shape, jnp.float32)
            for name, p in abstract_params(s).items()
        }
        for s in layer.modules
    }
    kept = {}

    def forward(params, x_BLD):
        y_BLD, vjp = jax.vjp(_forward(layer), params, x_BLD)
        own = {id(leaf) for leaf in jax.tree.leaves(params)}
        leaves = jax.tree.leaves(vjp)
        kept["copies"] = sum(t.size for t in leaves if id(t) not in own)
        kept["own"] = sum(t.size for t in leaves if id(t) in own)
        return y_BLD

    copies = {}
    for num_sequences in (1, 2):
        shape = (num_sequences, 4, config.hidden_size)
        x_BLD = jax.ShapeDtypeStruct(shape, jnp.float32)
        jax.eval_shape(forward, params, x_BLD)
        copies[num_sequences] = kept["copies"]
    fixed = 2 * copies[1] - copies[2]  # does not scale with the microbatch
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert kept["own"] > 0.9 * weights
    assert fixed < 0.02 * weights


@FAMILIES
def test_blocks_scan_over_stacked_parameters_and_vmap_over_a_data_dim(config):
    layer = model_of(config).layers[1]
    forward = _forward(layer)
    rng = np.random.default_rng(0)
    stacked = {
        s.path: {
            name: jnp.asarray(rng.normal(size=(2, *p.shape)) * 0.05, jnp.float32)
            for name, p in abstract_params(s).items()
        }
        for s in layer.modules
    }
    first, second = (jax.tree.map(lambda p, i=i: p[i], stacked) for i in (0, 1))
    x_XBLD = jax.random.normal(jax.random.key(2), (2, 1, 8, config.hidden_size))

    def scanned(x_BLD):
        return jax.lax.scan(lambda x, p: (forward(p, x), None), x_BLD, stacked)[0]

    got = jax.jit(jax.vmap(scanned))(x_XBLD)
    forward = jax.jit(forward)
    for x_BLD, y_BLD in zip(x_XBLD, got, strict=True):
        expected = forward(second, forward(first, x_BLD))
        np.testing.assert_allclose(y_BLD, expected, rtol=1e-5, atol=1e-5)
