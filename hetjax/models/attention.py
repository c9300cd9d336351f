# SPDX-License-Identifier: Apache-2.0
"""Attention as a module of a decoder, its positions (RoPE), and the form it takes.

Legend: B sequences, L positions, D residual width, N query heads, K key/value heads
(N / K queries share one), H head size, h = H / 2.
Owns the module with its config, and which form computes it. Does not own the form in
blocks (`chunked_attention.py`).
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.errors import BadInput
from hetjax.models.chunked_attention import chunked_attention
from hetjax.models.configs import NormConfig, require_divides, require_positive
from hetjax.models.kernel_attention import KernelName, kernel_attention
from hetjax.models.layers import STD, Norm, normal, zeros
from hetjax.models.model import ModuleSpec

AttentionForm = Literal["xla", "chunked", "cudnn", "splash"]
KERNELS = frozenset(get_args(KernelName))  # forms that some devices have
SHORT = 2048  # positions


def rotate(x_BLNH: jax.Array, *, theta: float) -> jax.Array:
    """Rotate dims (i, i + H/2) of position p by p * theta^(-2i/H), in fp32.

    RoPE (arXiv 2104.09864) in the half-split form of Llama.
    """
    _, num_positions, _, head_size = x_BLNH.shape
    frequency_h = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    position_L = jnp.arange(num_positions, dtype=jnp.float32)
    angle_1L1h = (position_L[:, None] * frequency_h[None, :])[None, :, None, :]
    cos, sin = jnp.cos(angle_1L1h), jnp.sin(angle_1L1h)
    a_BLNh, b_BLNh = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    turned = (a_BLNh * cos - b_BLNh * sin, b_BLNh * cos + a_BLNh * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BLNH.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """`num_kv_heads` below `num_heads` is grouped-query attention."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm: NormConfig
    biases: Literal["none", "all"] = "none"
    rope_theta: float | None = None  # None: positions are not the attention's matter
    output_std: float = STD
    form: AttentionForm | None = None  # None: `plain_form` of the length

    def __post_init__(self) -> None:
        require_positive("attention", self)
        require_divides("attention", self, "num_kv_heads", "num_heads")
        if self.rope_theta is not None and self.head_size % 2:
            raise BadInput(
                got=f"attention: head_size = {self.head_size} with RoPE",
                allowed="an even head_size: RoPE turns pairs",
                fix=f"set head_size to {self.head_size + 1}, or rope_theta to None",
            )


class Attention(nnx.Module):
    """Map x_BLD to x_BLD + attention(norm(x_BLD))."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs) -> None:
        D, H = config.hidden_size, config.head_size
        N, K = config.num_heads, config.num_kv_heads
        self.config = config
        self.norm = Norm(config.norm, D)
        self.q = normal(rngs, (D, N, H), (None, "heads", None))
        self.k = normal(rngs, (D, K, H), (None, "kv_heads", None))
        self.v = normal(rngs, (D, K, H), (None, "kv_heads", None))
        self.out = normal(rngs, (N, H, D), ("heads", None, None), config.output_std)
        biased = config.biases == "all"
        self.q_bias = zeros((N, H), ("heads", None)) if biased else None
        self.k_bias = zeros((K, H), ("kv_heads", None)) if biased else None
        self.v_bias = zeros((K, H), ("kv_heads", None)) if biased else None
        self.out_bias = zeros((D,), (None,)) if biased else None

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLD = self.norm(x_BLD)
        q_BLNH = self._turn(_project(y_BLD, self.q, self.q_bias))
        k_BLKH = self._turn(_project(y_BLD, self.k, self.k_bias))
        v_BLKH = _project(y_BLD, self.v, self.v_bias)
        z_BLNH = attend(q_BLNH, k_BLKH, v_BLKH, form=self.config.form)
        y_BLD = jnp.einsum("blnh,nhd->bld", z_BLNH, self.out[...])
        if self.out_bias is not None:
            y_BLD += self.out_bias[...][None, None, :]
        return x_BLD + y_BLD

    def _turn(self, x_BLNH: jax.Array) -> jax.Array:
        theta = self.config.rope_theta
        return x_BLNH if theta is None else rotate(x_BLNH, theta=theta)


def _project(x_BLD: jax.Array, weight: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    y_BLNH = jnp.einsum("bld,dnh->blnh", x_BLD, weight[...])
    return y_BLNH if bias is None else y_BLNH + bias[...][None, None]


def in_form(spec: ModuleSpec, form: AttentionForm | None) -> ModuleSpec:
    """Give the module with its attention, if it is one, in this form; None: as is."""
    if form is None or not isinstance(spec.config, AttentionConfig):
        return spec
    return replace(spec, config=replace(spec.config, form=form))


def attend(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    *,
    form: AttentionForm | None = None,
) -> jax.Array:
    """Give z_BLNH, causal, in the form asked for or the one that suits the length."""
    form = form or plain_form(q_BLNH.shape[1])
    if form == "chunked":
        return chunked_attention(q_BLNH, k_BLKH, v_BLKH)
    if form != "xla":
        return kernel_attention(q_BLNH, k_BLKH, v_BLKH, kernel=form)
    if q_BLNH.dtype == jnp.float16:  # JAX's own asks for a product that CPUs have not
        return _attend_in_float16(q_BLNH, k_BLKH, v_BLKH)
    # JAX's own code promotes bf16 with fp32 here, which strict promotion refuses. Its
    # bf16 derivative does so again at lowering: whoever compiles that says the same.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q_BLNH, k_BLKH, v_BLKH, is_causal=True)


def _attend_in_float16(
    q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array
) -> jax.Array:
    """Attention whose softmax is in fp32; queries are scaled before they can overflow.

    Legend: G = N / K queries share a key; Q positions of queries, C of keys.
    """
    B, L, N, H = q_BLNH.shape
    K = k_BLKH.shape[2]
    q_BLKGH = (q_BLNH * H**-0.5).reshape(B, L, K, N // K, H)
    s_BKGQC = jnp.einsum("bqkgh,bckh->bkgqc", q_BLKGH, k_BLKH).astype(jnp.float32)
    seen_QC = jnp.tril(jnp.ones((L, L), bool))[None, None, None]
    p_BKGQC = jax.nn.softmax(jnp.where(seen_QC, s_BKGQC, -jnp.inf), axis=-1)
    z_BLKGH = jnp.einsum("bkgqc,bckh->bqkgh", p_BKGQC.astype(v_BLKH.dtype), v_BLKH)
    return z_BLKGH.reshape(q_BLNH.shape)


def plain_form(seq_len: int) -> AttentionForm:
    """Give the form, of those that run everywhere, that suits a length.

    Blocks begin where memory lacks: an accelerator waits for the many small kernels of
    a loop. At 2,048 positions the roofline of a step of a 22B GPT on eight A100 says
    1.20 s in one piece and 1.24 in blocks.
    """
    return "xla" if seq_len <= SHORT else "chunked"
