# SPDX-License-Identifier: Apache-2.0
"""Attention in blocks against the plain formula, and what its programs hold.

Legend: B sequences, L positions, N query heads, K key/value heads, H head size.
"""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.models.attention.attention import Attention, AttentionConfig
from hetjax.models.attention.chunked_attention import Visibility, chunked_attention
from hetjax.models.configs import NormConfig
from hetjax.models.model import ModuleSpec, abstract_params, apply
from hetjax.plans.plan import Remat
from hetjax.stage.remat import with_remat

H = 8


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, int, Visibility, bool, int]:
    """Draw length, block, both numbers of heads, visibility, documents or not, seed."""
    length, num_kv_heads = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    window = draw(st.none() | st.integers(1, length))
    cap = draw(st.none() | st.sampled_from([0.5, 5.0]))
    return (
        length,
        draw(st.integers(1, 12)),
        num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads,
        Visibility(window=window, soft_cap=cap),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


def plain(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    seen: Visibility,
    documents_BL: jax.Array | None,
) -> jax.Array:
    """Return the formula's result, with all scores at once."""
    group = q_BLNH.shape[2] // k_BLKH.shape[2]
    k_BLNH, v_BLNH = (jnp.repeat(x, group, axis=2) for x in (k_BLKH, v_BLKH))
    s_BNLL = jnp.einsum("bqnh,bknh->bnqk", q_BLNH, k_BLNH) / np.sqrt(H)
    if seen.soft_cap is not None:
        s_BNLL = seen.soft_cap * jnp.tanh(s_BNLL / seen.soft_cap)
    index_L = np.arange(q_BLNH.shape[1])
    back_LL = index_L[:, None] - index_L[None, :]
    mask = jnp.asarray((back_LL >= 0) & (back_LL < (seen.window or np.inf)))
    mask_BNLL = jnp.broadcast_to(mask[None, None], s_BNLL.shape)
    if documents_BL is not None:
        same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
        mask_BNLL &= same_BLL[:, None]
    p_BNLL = jax.nn.softmax(jnp.where(mask_BNLL, s_BNLL, -jnp.inf), axis=-1)
    return jnp.einsum("bnqk,bknh->bqnh", p_BNLL, v_BLNH)


@settings(max_examples=4, deadline=None)
@given(cases())
@example((13, 5, 2, 1, Visibility(window=3), True, 0))
@example((16, 4, 2, 2, Visibility(window=1, soft_cap=0.5), False, 1))
@example((12, 12, 4, 2, Visibility(window=5, soft_cap=5.0), True, 2))
@example((1, 1, 3, 1, Visibility(), True, 3))
def test_blocks_give_the_output_and_gradients_of_the_formula(case: Any):
    length, block, N, K, visibility, documented, seed = case
    rng = np.random.default_rng(seed)
    draw = lambda n: jnp.asarray(rng.normal(size=(2, length, n, H)), jnp.float32)  # noqa: E731
    q, k, v, dz = draw(N), draw(K), draw(K), draw(N)
    ends = rng.random((2, length)) < 0.2
    documents = jnp.asarray(np.cumsum(ends, axis=1)) if documented else None

    def chunked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return chunked_attention(
            q, k, v, visibility=visibility, documents_BL=documents, max_block=block
        )

    def formula(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return plain(q, k, v, visibility, documents)

    def both(form: Any) -> Any:
        def passes(*given: jax.Array) -> tuple[jax.Array, ...]:
            z, vjp = jax.vjp(form, *given)
            return z, *vjp(dz)

        return jax.jit(passes)(q, k, v)

    for ours, theirs in zip(both(chunked), both(formula), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_low_precision_is_as_close_to_fp32_as_its_steps(dtype: str, bound: float):
    keys = jax.random.split(jax.random.key(1), 4)
    exact = [jax.random.normal(key, (1, 50, 2, H)) for key in keys]
    low = [x.astype(dtype) for x in exact]

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dz: jax.Array) -> list[Any]:
        z, vjp = jax.vjp(lambda *x: chunked_attention(*x, max_block=16), q, k, v)
        return [z, *vjp(dz)]

    for ours, theirs in zip(jax.jit(both)(*low), both(*exact), strict=True):
        assert ours.dtype == dtype
        error = np.abs(np.asarray(ours, np.float32) - theirs)
        assert np.max(error) <= bound * np.max(np.abs(theirs))


LONG = AttentionConfig(
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    norm=NormConfig(kind="rms"),
    rope_theta=1e4,
)
LENGTH = 4096


def test_a_long_sequence_makes_no_square_of_scores_and_little_beside_its_inputs():
    """4,096 positions: all scores of the four heads are 256 MiB."""
    shapes = [jax.ShapeDtypeStruct((1, LENGTH, n, 16), jnp.float32) for n in (4, 2, 2)]

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        z, vjp = jax.vjp(chunked_attention, q, k, v)
        return vjp(z)

    program = jax.jit(both).lower(*shapes).compile()
    assert not re.search(rf"{LENGTH},(\d+,)?{LENGTH}\b", program.as_text() or "")
    memory: Any = program.memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 2**20


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_what_is_kept_of_a_block_grows_as_its_length(remat: Remat):
    config = replace(LONG, form="chunked")
    spec = ModuleSpec("block_000.attention", Attention, config)
    params = {
        name: jax.ShapeDtypeStruct(param.shape, jnp.float32)
        for name, param in abstract_params(spec).items()
    }

    def run(params: Any, x_BLD: jax.Array) -> jax.Array:
        def unit(x_BLD: jax.Array, own: Any) -> tuple[jax.Array, None]:
            return apply(spec, own, x_BLD)[0], None

        stacked = jax.tree.map(lambda p: jnp.stack([p, p]), params)
        return jax.lax.scan(with_remat(unit, remat, looped=True), x_BLD, stacked)[0]

    def kept(length: int) -> int:
        x_BLD = jax.ShapeDtypeStruct((1, length, 64), jnp.float32)
        leaves = jax.eval_shape(lambda p, x: jax.vjp(run, p, x)[1], params, x_BLD)
        return sum(leaf.size for leaf in jax.tree.leaves(leaves))

    fixed = 2 * kept(2048) - kept(4096)
    assert abs(fixed) < 0.05 * kept(4096)
    growth = kept(4096) - kept(2048)  # and a pair of numbers per pair of blocks
    assert abs(kept(6144) - kept(4096) - growth) < 0.01 * growth


def test_heads_cut_over_devices_exchange_nothing():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    cut = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
    shapes = [
        jax.ShapeDtypeStruct((1, 600, n, 16), jnp.float32, sharding=cut)
        for n in (4, 2, 2)
    ]

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        z, vjp = jax.vjp(chunked_attention, q, k, v)
        return vjp(z)

    text = jax.jit(both).lower(*shapes).compile().as_text() or ""
    assert "while(" in text and "f32[1,600,2,16]" in text
    assert not re.search(r"(all-reduce|all-gather|all-to-all|permute|scatter)", text)


def test_the_module_takes_the_form_that_it_is_told():
    spec = ModuleSpec("block_000.attention", Attention, replace(LONG, form="chunked"))
    plainly = replace(spec, config=replace(LONG, form="xla"))
    draw = np.random.default_rng(0)
    params = {  # outputs of about one: the tolerance below assumes that
        name: jnp.asarray(draw.normal(scale=0.125, size=p.shape), jnp.float32)
        for name, p in abstract_params(spec).items()
    }
    x_BLD = jax.random.normal(jax.random.key(0), (1, 40, 64))
    ours, theirs = (
        jax.jit(apply, static_argnums=0)(s, params, x_BLD)[0] for s in (spec, plainly)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for chosen, derivatives in ((spec, 1), (plainly, 0)):  # custom ones
        jaxpr = jax.make_jaxpr(lambda p, x, s=chosen: apply(s, p, x))(params, x_BLD)
        assert str(jaxpr).count("custom_vjp_call[") == derivatives
