# SPDX-License-Identifier: Apache-2.0
"""Attention by kernels: splash in Pallas' interpreter against the plain formula in
float64, what both keep, and what cuDNN receives. Neither runs on a device here.

Legend: B sequences, L positions, N query heads, K key/value heads, H head size.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.models.attention import splash_kernel
from hetjax.models.attention.attention import (
    Attention,
    AttentionConfig,
    AttentionForm,
    attend,
    in_form,
)
from hetjax.models.attention.chunked_attention import ALL_BEFORE, Visibility
from hetjax.models.attention.kernel_attention import KernelName, kernel_attention
from hetjax.models.configs import NormConfig
from hetjax.models.model import ModuleSpec, abstract_params, apply
from hetjax.plans.plan import AttentionForm as PlanForm
from hetjax.plans.plan import Remat
from hetjax.stage.jaxprs import bodies
from hetjax.stage.remat import with_remat

B, L, N, K = 2, 256, 4, 2
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Pallas interpret what a TPU would compute."""
    made = splash_kernel.splash.make_splash_mha
    monkeypatch.setattr(
        splash_kernel.splash, "make_splash_mha", partial(made, interpret=True)
    )


def drawn(head_size: int, length: int = L) -> tuple[np.ndarray, ...]:
    """Return queries, keys, values, and the gradient of the output."""
    rng = np.random.default_rng(head_size)
    return tuple(rng.normal(size=(B, length, n, head_size)) for n in (N, K, K, N))


def exact(
    q_BLNH: np.ndarray,
    k_BLKH: np.ndarray,
    v_BLKH: np.ndarray,
    dz_BLNH: np.ndarray,
    *,
    seen: Visibility = ALL_BEFORE,
    documents_BL: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return output and gradients by the formula, derived manually, in float64."""
    length, head_size = q_BLNH.shape[1], q_BLNH.shape[3]
    group = q_BLNH.shape[2] // k_BLKH.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k_BLKH, v_BLKH))
    s = np.einsum("bqnh,bknh->bnqk", q_BLNH, k) / np.sqrt(head_size)
    slope = np.ones_like(s)
    if seen.soft_cap is not None:
        capped = np.tanh(s / seen.soft_cap)
        s, slope = seen.soft_cap * capped, 1 - capped**2
    back = np.arange(length)[:, None] - np.arange(length)[None]
    mask = np.broadcast_to((back >= 0) & (back < (seen.window or length)), s.shape)
    if documents_BL is not None:
        same = documents_BL[:, :, None] == documents_BL[:, None, :]
        mask = mask & same[:, None]
    p = np.where(
        mask, np.exp(s - s.max(axis=-1, keepdims=True, where=mask, initial=-99)), 0
    )
    p /= p.sum(axis=-1, keepdims=True)
    z = np.einsum("bnqk,bknh->bqnh", p, v)
    dp = np.einsum("bqnh,bknh->bnqk", dz_BLNH, v)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * slope / np.sqrt(head_size)
    dk = np.einsum("bnqk,bqnh->bknh", ds, q_BLNH)
    dv = np.einsum("bnqk,bqnh->bknh", p, dz_BLNH)
    shared = lambda x: x.reshape(B, length, -1, group, head_size).sum(axis=3)  # noqa: E731
    return [z, np.einsum("bnqk,bknh->bqnh", ds, k), shared(dk), shared(dv)]


def both(attention: Any) -> Any:
    def passes(q: jax.Array, k: jax.Array, v: jax.Array, dz: jax.Array) -> Any:
        z, vjp = jax.vjp(attention, q, k, v)
        return z, *vjp(dz)

    return passes


def assert_near(found: Any, expected: Any, bound: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        error = np.abs(np.asarray(ours, np.float64) - theirs)
        assert np.max(error) <= bound * np.max(np.abs(theirs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_size", [16, 128])
def test_splash_gives_the_output_and_gradients_of_the_formula(
    interpreted: None, head_size: int, dtype: str
):
    given = drawn(head_size)
    low = [jnp.asarray(x, dtype) for x in given]
    found = jax.jit(both(partial(attend, form="splash")))(*low)
    assert {x.dtype.name for x in found} == {dtype}
    assert_near(found, exact(*given), BOUNDS[dtype])


@pytest.mark.parametrize("form", ["xla", "chunked"])
@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_the_forms_that_run_everywhere_give_those_of_the_formula(
    form: AttentionForm, dtype: str
):
    given = drawn(16, length=600)  # two blocks of the chunked form
    low = [jnp.asarray(x, dtype) for x in given]
    with jax.numpy_dtype_promotion("standard"):
        found = jax.jit(both(partial(attend, form=form)))(*low)
    assert_near(found, exact(*given), BOUNDS[dtype])


def test_splash_takes_windows_soft_caps_and_documents(interpreted: None):
    given, seen = drawn(16), Visibility(window=40, soft_cap=2.0)
    documents = np.cumsum(np.random.default_rng(0).random((B, L)) < 0.02, axis=1)
    attention = partial(
        kernel_attention,
        kernel="splash",
        visibility=seen,
        documents_BL=jnp.asarray(documents),
    )
    found = jax.jit(both(attention))(*(jnp.asarray(x, jnp.float32) for x in given))
    assert_near(
        found, exact(*given, seen=seen, documents_BL=documents), BOUNDS["float32"]
    )


def test_heads_and_sequences_cut_over_devices_exchange_nothing(interpreted: None):
    """Data ranks are mapped as in a stage, and the kernel cuts the heads."""
    given = drawn(16)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    cut = NamedSharding(mesh, PartitionSpec("data", None, None, "tensor"))
    ranks = [jax.device_put(jnp.asarray(x, jnp.float32)[:, None], cut) for x in given]

    def mapped(*ranks: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            one = both(partial(attend, form="splash"))
            return jax.vmap(one, spmd_axis_name="data")(*ranks)

    program = jax.jit(mapped).lower(*ranks).compile()
    text = program.as_text() or ""
    for collective in ("all-reduce", "all-gather", "all-to-all", "permute"):
        assert collective not in text
    found = [x[:, 0] for x in program(*ranks)]
    assert_near(found, exact(*given), BOUNDS["float32"])


CONFIG = AttentionConfig(
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    norm=NormConfig(kind="rms"),
    rope_theta=1e4,
)


def traced_block(form: KernelName, remat: Remat, length: int) -> tuple[Any, Any]:
    """Return the backward of two blocks in a loop, and what is kept for it."""
    spec = in_form(ModuleSpec("block_000.attention", Attention, CONFIG), form)
    params = {
        name: jax.ShapeDtypeStruct((2, *param.shape), jnp.bfloat16)
        for name, param in abstract_params(spec).items()
    }
    x_BLD = jax.ShapeDtypeStruct((1, length, 64), jnp.bfloat16)

    def run(params: Any, x_BLD: jax.Array) -> jax.Array:
        def unit(x_BLD: jax.Array, own: Any) -> tuple[jax.Array, None]:
            return apply(spec, own, x_BLD)[0], None

        return jax.lax.scan(with_remat(unit, remat, looped=True), x_BLD, params)[0]

    kept = jax.eval_shape(lambda p, x: jax.vjp(run, p, x)[1], params, x_BLD)
    backward = jax.make_jaxpr(lambda vjp, dy: vjp(dy))(kept, x_BLD)
    return backward.jaxpr, kept


def num_kernels(jaxpr: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        name = eqn.params.get("name", "")
        if str(name).startswith("attention_"):
            found[name] += 1
        else:
            found += sum(map(num_kernels, bodies(eqn)), start=Counter())
    return found


@pytest.mark.parametrize("form", get_args(KernelName))
@pytest.mark.parametrize(
    ("remat", "again"), [("none", 0), ("selective", 0), ("full", 1)]
)
def test_a_backward_runs_the_forward_kernel_again_only_if_nothing_is_kept(
    form: KernelName, remat: Remat, again: int
):
    backward, _ = traced_block(form, remat, 256)
    expected = Counter(attention_backward=1, attention_forward=again)
    assert num_kernels(backward) == +expected


@pytest.mark.parametrize("form", get_args(KernelName))
@pytest.mark.parametrize("remat", get_args(Remat))
def test_what_is_kept_grows_as_the_length(form: KernelName, remat: Remat):
    def kept(length: int) -> int:
        leaves = jax.tree.leaves(traced_block(form, remat, length)[1])
        return sum(leaf.size for leaf in leaves)

    one, two, three = map(kept, (256, 512, 768))
    assert three - two == two - one


def test_output_and_rows_are_kept_once():
    """Per attention: queries, keys, values, output, a number per row, and its norm."""
    _, kept = traced_block("cudnn", "selective", 256)
    shapes = Counter(leaf.shape[1:] for leaf in jax.tree.leaves(kept))
    assert shapes[(1, 4, 256)] == 1  # one number per row
    heads = shapes[(1, 256, 4, 16)], shapes[(1, 256, 2, 16)]
    assert heads <= (2, 2)


def test_cudnn_is_asked_for_causal_attention_of_queries_scaled_by_their_size():
    shapes = [jax.ShapeDtypeStruct((1, L, n, 64), jnp.bfloat16) for n in (N, K, K, N)]
    jaxpr = jax.make_jaxpr(both(partial(attend, form="cudnn")))(*shapes)
    asked: list[Any] = []

    def look(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name.startswith("dot_product_attention"):
                asked.append(eqn.params)
            for inner in bodies(eqn):
                look(inner)

    look(jaxpr.jaxpr)
    assert len(asked) == 2  # forward and backward, each once
    for params in asked:
        assert params["mask_type"].name == "CAUSAL"
        assert params["scale"] == 64**-0.5
        assert params["dropout_rate"] == 0.0


def test_plans_and_models_know_the_same_forms():
    assert get_args(PlanForm) == get_args(AttentionForm)


def test_a_module_without_attention_is_in_every_form_as_it_is():
    spec = ModuleSpec("block_000.other", Attention, "a config of its own")
    assert in_form(spec, "cudnn") is spec
    told = in_form(ModuleSpec("block_000.attention", Attention, CONFIG), "cudnn")
    assert told.config == replace(CONFIG, form="cudnn")
