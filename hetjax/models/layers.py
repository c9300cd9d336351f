# SPDX-License-Identifier: Apache-2.0
"""The modules that decoders are made of: norms, attention, MLPs, and the two ends.

Legend: B sequences, L positions, D residual width, N query heads, K key/value heads
(N / K queries share one), H head size, h = H / 2, F inner width, V padded vocabulary,
S longest sequence.
Owns these modules with their configs and their initial values (as GPT-2). Does not own
experts (`moe.py`), configs of whole models and what configs refuse (`configs.py`),
which modules make up a model, nor what is tied to what (`decoders.py`: the `table` of a
tied head is the embedding's).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.errors import BadInput
from hetjax.models.configs import NormConfig, require_divides, require_positive

Logical = tuple[str | None, ...]
STD = 0.02


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], logical: Logical, std: float = STD
) -> nnx.Param:
    """Make an fp32 parameter drawn from N(0, std^2)."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * std
    return nnx.Param(value, logical=logical)


def zeros(shape: tuple[int, ...], logical: Logical) -> nnx.Param:
    """Make an fp32 parameter of zeros (biases)."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), logical=logical)


def residual_std(num_blocks: int) -> float:
    """Scale projections into the residual stream by its 2 x num_blocks additions."""
    return STD / math.sqrt(2 * num_blocks)


class Norm(nnx.Module):
    """Normalise the last dim; mapped in fp32, given back in the dtype of the input."""

    def __init__(self, config: NormConfig, size: int) -> None:
        self.config = config
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32), logical=(None,))
        self.bias = zeros((size,), (None,)) if config.kind == "layer" else None

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLD = x_BLD.astype(jnp.float32)
        if self.bias is not None:
            y_BLD -= jnp.mean(y_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(jnp.square(y_BLD), axis=-1, keepdims=True)
        y_BLD *= jax.lax.rsqrt(variance_BL1 + self.config.eps)
        y_BLD *= _along_last(self.scale)
        if self.bias is not None:
            y_BLD += _along_last(self.bias)
        return y_BLD.astype(x_BLD.dtype)


def _along_last(parameter: nnx.Param) -> jax.Array:
    return parameter[...].astype(jnp.float32)[None, None, :]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig:
    """Widths of either MLP."""

    hidden_size: int
    inner_size: int
    norm: NormConfig
    output_std: float = STD

    def __post_init__(self) -> None:
        require_positive("mlp", self)


class GeluMlp(nnx.Module):
    """Map x to x + down(gelu(up(norm(x)))), with biases, tanh form of GELU (GPT-2)."""

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.inner_size
        self.norm = Norm(config.norm, D)
        self.up = normal(rngs, (D, F), (None, "mlp"))
        self.up_bias = zeros((F,), ("mlp",))
        self.down = normal(rngs, (F, D), ("mlp", None), config.output_std)
        self.down_bias = zeros((D,), (None,))

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLF = jnp.einsum("bld,df->blf", self.norm(x_BLD), self.up[...])
        y_BLF = jax.nn.gelu(y_BLF + self.up_bias[...][None, None, :], approximate=True)
        y_BLD = jnp.einsum("blf,fd->bld", y_BLF, self.down[...])
        return x_BLD + y_BLD + self.down_bias[...][None, None, :]


class SwigluMlp(nnx.Module):
    """Map x to x + down(silu(gate(norm(x))) * up(norm(x))) (arXiv 2002.05202)."""

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.inner_size
        self.norm = Norm(config.norm, D)
        self.gate = normal(rngs, (D, F), (None, "mlp"))
        self.up = normal(rngs, (D, F), (None, "mlp"))
        self.down = normal(rngs, (F, D), ("mlp", None), config.output_std)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLD = self.norm(x_BLD)
        gate_BLF = jnp.einsum("bld,df->blf", y_BLD, self.gate[...])
        up_BLF = jnp.einsum("bld,df->blf", y_BLD, self.up[...])
        inner_BLF = jax.nn.silu(gate_BLF) * up_BLF
        return x_BLD + jnp.einsum("blf,fd->bld", inner_BLF, self.down[...])


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig:
    """`num_positions` = 0: no learned positions."""

    padded_vocab_size: int
    hidden_size: int
    num_positions: int = 0

    def __post_init__(self) -> None:
        require_positive("embedding", self, exempt=("num_positions",))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Rows of the table from `vocab_size` on are padding."""

    vocab_size: int
    padded_vocab_size: int
    hidden_size: int
    norm: NormConfig

    def __post_init__(self) -> None:
        require_positive("head", self, exempt=("padded_vocab_size",))
        if self.padded_vocab_size < self.vocab_size:
            raise BadInput(
                got=f"head: padded_vocab_size = {self.padded_vocab_size} below "
                f"vocab_size = {self.vocab_size}",
                allowed=f"padded_vocab_size of {self.vocab_size} or more",
                fix=f"set padded_vocab_size to {padded(self.vocab_size, 128)}",
            )


class Embedding(nnx.Module):
    """Map tokens_BL (int32) to the residual stream x_BLD in the table's dtype."""

    def __init__(self, config: EmbeddingConfig, *, rngs: nnx.Rngs) -> None:
        V, S, D = config.padded_vocab_size, config.num_positions, config.hidden_size
        self.table = normal(rngs, (V, D), ("vocab", None))
        self.positions = normal(rngs, (S, D), (None, None)) if S else None

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        x_BLD = jnp.take(self.table[...], tokens_BL, axis=0)
        if self.positions is None:
            return x_BLD
        num_positions = tokens_BL.shape[1]
        return x_BLD + self.positions[:num_positions][None]


class Head(nnx.Module):
    """Final norm and projection onto the vocabulary."""

    def __init__(self, config: HeadConfig, *, rngs: nnx.Rngs) -> None:
        V, D = config.padded_vocab_size, config.hidden_size
        self.config = config
        self.norm = Norm(config.norm, D)
        self.table = normal(rngs, (V, D), ("vocab", None))

    def __call__(self, x_BLD: jax.Array, targets_BL: jax.Array) -> jax.Array:
        """Give the cross-entropy summed over tokens, in nats (fp32 scalar)."""
        logits_BLV = self._project(x_BLD)
        return jnp.sum(_cross_entropy(self.config.vocab_size, logits_BLV, targets_BL))

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Give fp32 logits_BLV; those of padding are -inf."""
        return _masked(self._project(x_BLD), self.config.vocab_size)

    def _project(self, x_BLD: jax.Array) -> jax.Array:
        return jnp.einsum("bld,vd->blv", self.norm(x_BLD), self.table[...])


def padded(vocab_size: int, multiple: int) -> int:
    """Round the vocabulary up to a multiple."""
    return -(-vocab_size // multiple) * multiple


# An own derivative, so that the only [B, L, V] arrays kept are the logits in compute
# dtype and their cotangent; fp32 values of that size live inside fusions.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    vocab_size: int, logits_BLV: jax.Array, targets_BL: jax.Array
) -> jax.Array:
    return _cross_entropy_forward(vocab_size, logits_BLV, targets_BL)[0]


def _cross_entropy_forward(
    vocab_size: int, logits_BLV: jax.Array, targets_BL: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    z_BLV = _masked(logits_BLV, vocab_size)
    log_total_BL = jax.nn.logsumexp(z_BLV, axis=-1)
    # A masked sum, not a gather: a sharded V then costs one all-reduce of [B, L].
    target_BL = jnp.sum(jnp.where(_is_target(z_BLV, targets_BL), z_BLV, 0.0), axis=-1)
    return log_total_BL - target_BL, (logits_BLV, targets_BL, log_total_BL)


def _cross_entropy_backward(
    vocab_size: int, saved: tuple[jax.Array, ...], d_BL: jax.Array
) -> tuple[jax.Array, None]:
    logits_BLV, targets_BL, log_total_BL = saved
    z_BLV = _masked(logits_BLV, vocab_size)
    probability_BLV = jnp.exp(z_BLV - log_total_BL[..., None])
    one_hot_BLV = _is_target(z_BLV, targets_BL).astype(jnp.float32)
    d_BLV = (probability_BLV - one_hot_BLV) * d_BL[..., None]
    return d_BLV.astype(logits_BLV.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _masked(logits_BLV: jax.Array, vocab_size: int) -> jax.Array:
    z_BLV = logits_BLV.astype(jnp.float32)
    if vocab_size == logits_BLV.shape[-1]:
        return z_BLV
    return jnp.where(_vocab_index(z_BLV) < vocab_size, z_BLV, -jnp.inf)


def _is_target(z_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    return _vocab_index(z_BLV) == targets_BL[..., None]


def _vocab_index(z_BLV: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, z_BLV.shape, z_BLV.ndim - 1)
