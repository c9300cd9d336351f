# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts against a Python loop over tokens, including drops.

Legend: B sequences, L positions, D residual width, E experts.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.errors import BadInput
from hetjax.models.experts.moe import Moe, MoeConfig, Routing, routed
from hetjax.models.layers import NormConfig
from hetjax.models.model import ModuleSpec, abstract_params, apply

CONFIG = MoeConfig(
    hidden_size=8,
    inner_size=12,
    routing=Routing(num_experts=4, top_k=2, capacity_factor=0.75),
    norm=NormConfig(kind="rms", eps=1e-5),
)


apply_jit = jax.jit(apply, static_argnums=0)


def _case(routing, seed, num_sequences=2, seq_len=9):
    spec = ModuleSpec("block_000.moe", Moe, replace(CONFIG, routing=routing))
    rng = np.random.default_rng(seed)
    exact = {
        name: rng.normal(size=param.shape)
        for name, param in abstract_params(spec).items()
    }
    params = {name: jnp.asarray(v, jnp.float32) for name, v in exact.items()}
    return spec, params, exact, rng.normal(size=(num_sequences, seq_len, 8))


def _reference(routing, p, x):
    """Route token by token: an expert refuses once its capacity is used up."""
    out, aux, dropped = x.copy(), 0.0, 0
    num_positions = x.shape[1]
    share = routing.top_k * num_positions / routing.num_experts
    capacity = min(num_positions, int(np.ceil(share * routing.capacity_factor)))
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["norm.scale"]
    for b in range(len(x)):
        taken = np.zeros(routing.num_experts, int)
        asked = np.zeros(routing.num_experts)
        probability = np.zeros(routing.num_experts)
        for i, token in enumerate(y[b]):
            logits = token @ p["router"]
            probability += np.exp(logits) / np.exp(logits).sum() / num_positions
            best = np.argsort(-logits)[: routing.top_k]
            gates = np.exp(logits[best]) / np.exp(logits[best]).sum()
            for e, gate in zip(best, gates, strict=True):
                asked[e] += 1
                if taken[e] == capacity:
                    dropped += 1
                    continue
                taken[e] += 1
                inner = token @ p["gate"][e]
                inner = inner / (1 + np.exp(-inner)) * (token @ p["up"][e])
                out[b, i] += gate * (inner @ p["down"][e])
        frequency = asked / (routing.top_k * num_positions)
        aux += num_positions * routing.num_experts * (frequency @ probability)
    return out, aux * routing.balance_coefficient, dropped


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("capacity_factor", [0.5, 1.0, 9.0])
def test_experts_and_balance_loss_agree_with_a_loop_over_tokens(top_k, capacity_factor):
    routing = Routing(num_experts=4, top_k=top_k, capacity_factor=capacity_factor)
    spec, params, exact, x = _case(routing, seed=top_k)
    expected, expected_aux, dropped = _reference(routing, exact, x)
    assert (dropped > 0) == (capacity_factor < 1) or capacity_factor == 1.0
    got, aux = apply_jit(spec, params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(aux, expected_aux, rtol=1e-5)


def test_a_token_over_capacity_keeps_only_its_residual():
    routing = Routing(num_experts=4, top_k=1, capacity_factor=4 / 9)  # capacity 1
    spec, params, _, x = _case(routing, seed=0)
    x[:] = x[:1, :1]  # all tokens equal: all want the same expert
    got, _ = apply_jit(spec, params, jnp.asarray(x, jnp.float32))
    assert np.all(np.asarray(got)[:, 1:] == x[:, 1:].astype(np.float32))
    assert np.all(np.abs(np.asarray(got)[:, 0] - x[:, 0]).sum(axis=-1) > 0)


@example(seed=8957)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_how_a_batch_is_cut_changes_neither_outputs_nor_losses(seed):
    spec, params, _, x = _case(CONFIG.routing, seed, num_sequences=3)
    whole, aux = apply_jit(spec, params, jnp.asarray(x, jnp.float32))
    parts = [
        apply_jit(spec, params, jnp.asarray(part, jnp.float32))
        for part in (x[:1], x[1:])
    ]
    joined = np.concatenate([part for part, _ in parts])
    # values up to 100 are summed, so the tolerance is relative to the largest
    atol = 1e-6 * np.abs(joined).max()
    np.testing.assert_allclose(whole, joined, rtol=1e-5, atol=atol)
    np.testing.assert_allclose(aux, sum(a for _, a in parts), rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), position=st.integers(1, 8))
def test_later_tokens_never_push_out_earlier_ones(seed, position):
    spec, params, _, x = _case(CONFIG.routing, seed)
    other = x.copy()
    other[:, position:] = np.random.default_rng(seed + 1).normal(
        size=other[:, position:].shape
    )
    one, _ = apply_jit(spec, params, jnp.asarray(x, jnp.float32))
    two, _ = apply_jit(spec, params, jnp.asarray(other, jnp.float32))
    np.testing.assert_allclose(one[:, :position], two[:, :position], atol=1e-6)


def test_the_router_learns_from_outputs_and_from_the_balance_loss():
    spec, params, _, x = _case(CONFIG.routing, seed=5)
    x_BLD = jnp.asarray(x, jnp.float32)

    def f(p):
        return apply(spec, p, x_BLD)

    parts = jax.jit(jax.jacrev(lambda p: jnp.stack([jnp.sum(y) for y in f(p)])))
    assert np.all(np.abs(np.asarray(parts(params)["router"])).sum(axis=(1, 2)) > 0)


def test_the_loop_over_tokens_gives_the_same_router_gradient_by_differences():
    spec, params, exact, x = _case(CONFIG.routing, seed=6)
    weight = np.random.default_rng(0).normal(size=x.shape)

    def loss(p):
        out, aux = apply(spec, p, jnp.asarray(x, jnp.float32))
        return jnp.sum(out * jnp.asarray(weight, jnp.float32)) + aux

    grads = jax.jit(jax.grad(loss))(params)["router"]
    for d, e in ((0, 0), (3, 1), (7, 3)):
        ends = []
        for step in (1e-5, -1e-5):
            moved = {**exact, "router": exact["router"].copy()}
            moved["router"][d, e] += step
            out, aux, _ = _reference(CONFIG.routing, moved, x)
            ends.append((out * weight).sum() + aux)
        slope = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(grads[d, e], slope, rtol=1e-3, atol=1e-3)


def test_experts_are_those_of_the_highest_scores_and_of_equals_the_first():
    choices = jnp.array([0.0, 1.0, 1.0, 2.0, 2.0, -1e9])
    logits_BLE = jax.random.choice(jax.random.key(0), choices, (2, 50, 8))
    to = routed(Routing(num_experts=8, top_k=3), jnp.eye(8), logits_BLE)
    _, expert_BLk = jax.lax.top_k(logits_BLE, 3)
    np.testing.assert_array_equal(to.expert_BLk, expert_BLk)


def test_data_ranks_route_their_tokens_without_each_other():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    cut = NamedSharding(mesh, PartitionSpec("data"))
    routing, router_DE = Routing(num_experts=8, top_k=2), jnp.ones((16, 8))

    def weights(y_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        to = routed(routing, router_DE, y_BLD)
        return to.expert_BLk, to.weight_BLk

    every = jax.jit(jax.vmap(weights, spmd_axis_name="data"), out_shardings=cut)
    y_RBLD = jax.ShapeDtypeStruct((2, 1, 32, 16), jnp.float32, sharding=cut)
    text = every.lower(y_RBLD).compile().as_text() or ""
    assert not re.findall(r"\b(?:all|collective|reduce)-[a-z-]+\(", text)


def test_more_choices_than_experts_are_refused():
    with pytest.raises(BadInput, match="top_k = 5 of 4 experts"):
        Routing(num_experts=4, top_k=5)
