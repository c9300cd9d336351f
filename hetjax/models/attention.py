# SPDX-License-Identifier: Apache-2.0
"""Causal self-attention with its pre-norm and residual addition.

Legend: B sequences, L positions, D residual width, N query heads, K key/value heads
(N / K queries share one), H head size.
Owns the attention half of a block. Does not own the rotation (`rope.py`) nor the
attention kernel, which is JAX's.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.norm import Norm, NormConfig
from hetjax.models.parameters import STD, normal, zeros
from hetjax.models.requirement import require_divides, require_positive
from hetjax.models.rope import rotate


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

    def __post_init__(self) -> None:
        require_positive(
            "attention",
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            output_std=self.output_std,
        )
        kv_heads = ("num_kv_heads", self.num_kv_heads)
        require_divides("attention", kv_heads, ("num_heads", self.num_heads))
        if self.rope_theta is not None:
            require_positive("attention", rope_theta=self.rope_theta)
            pair = ("2 (RoPE turns pairs)", 2)
            require_divides("attention", pair, ("head_size", self.head_size))


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
        z_BLNH = _attend(q_BLNH, k_BLKH, v_BLKH)
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


def _attend(q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array) -> jax.Array:
    # JAX's own code promotes bf16 with fp32 here, which strict promotion refuses. Its
    # bf16 derivative does so again at lowering: whoever compiles that says the same.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q_BLNH, k_BLKH, v_BLKH, is_causal=True)
