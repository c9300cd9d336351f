# SPDX-License-Identifier: Apache-2.0
"""The attention module of a decoder, and the choice of the form that computes it.

Legend: B sequences, L positions, D residual width, N query heads, K key/value heads
(each serves N / K query heads), H head size.
Owns the module with its config, and the choice of form. Does not own the chunked form
(`chunked_attention.py`) nor the cache of keys and values (`kv_cache.py`).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.errors import BadInput
from hetjax.models.attention.chunked_attention import (
    ALL_BEFORE,
    Visibility,
    chunked_attention,
)
from hetjax.models.attention.kernel_attention import KernelName, kernel_attention
from hetjax.models.attention.kv_cache import KVCache, attend_cached
from hetjax.models.configs import (
    NormConfig,
    RopeScaling,
    require_divides,
    require_positive,
)
from hetjax.models.layers import STD, Norm, biased, linear_weight, scaled, zeros
from hetjax.models.linear.adapters import linear
from hetjax.models.model import Model, ModuleSpec
from hetjax.models.positions import positions_within, rotate

AttentionForm = Literal["xla", "chunked", "cudnn", "splash"]
KERNELS = frozenset(get_args(KernelName))  # forms that only some devices have


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """`num_kv_heads` below `num_heads` is grouped-query attention.

    With `qk_norm`, queries and keys of each head are normalised by its rule. With
    `post_norm`, attention's output is normalised by `norm`. The output is multiplied by
    `residual_scale` before it is added to the residual stream.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm: NormConfig
    biases: Literal["none", "qkv", "all"] = "none"
    qk_norm: NormConfig | None = None
    query_scale: float | None = None  # None: 1 / sqrt(head_size)
    window: int | None = None  # positions that a query sees; None: all up to its own
    rope_theta: float | None = None  # None: no RoPE
    rope_scaling: RopeScaling | None = None
    post_norm: bool = False
    residual_scale: float = 1.0
    output_std: float = STD
    form: AttentionForm | None = None  # None: chunked

    def __post_init__(self) -> None:
        require_positive("attention", self)
        require_divides("attention", self, "num_kv_heads", "num_heads")
        if self.rope_theta is not None and self.head_size % 2:
            raise BadInput(
                got=f"attention: head_size = {self.head_size} with RoPE",
                allowed="an even head_size: RoPE rotates pairs of numbers",
                fix=f"set head_size to {self.head_size + 1}, or rope_theta to None",
            )


class Attention(nnx.Module):
    """Map x_BLD to x_BLD + attention(norm(x_BLD))."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs) -> None:
        D, H = config.hidden_size, config.head_size
        N, K = config.num_heads, config.num_kv_heads
        self.config = config
        self.norm = Norm(config.norm, D)
        self.q = linear_weight(rngs, (D, N, H), (None, "heads", None))
        self.k = linear_weight(rngs, (D, K, H), (None, "kv_heads", None))
        self.v = linear_weight(rngs, (D, K, H), (None, "kv_heads", None))
        self.out = linear_weight(
            rngs,
            (N, H, D),
            ("heads", None, None),
            config.output_std,
            num_inputs=2,
        )
        has_biases = config.biases != "none"
        self.q_bias = zeros((N, H), ("heads", None)) if has_biases else None
        self.k_bias = zeros((K, H), ("kv_heads", None)) if has_biases else None
        self.v_bias = zeros((K, H), ("kv_heads", None)) if has_biases else None
        self.out_bias = zeros((D,), (None,)) if config.biases == "all" else None
        self.q_norm = Norm(config.qk_norm, H) if config.qk_norm else None
        self.k_norm = Norm(config.qk_norm, H) if config.qk_norm else None
        self.post_norm = Norm(config.norm, D) if config.post_norm else None

    def __call__(
        self, x_BLD: jax.Array, documents_BL: jax.Array | None = None
    ) -> jax.Array:
        place_BL = None if documents_BL is None else positions_within(documents_BL)
        q_BLNH, k_BLKH, v_BLKH = self._projected(x_BLD, place_BL)
        z_BLNH = attend(
            q_BLNH,
            k_BLKH,
            v_BLKH,
            visibility=Visibility(window=self.config.window),
            documents_BL=documents_BL,
            form=self.config.form,
        )
        return self._added(x_BLD, z_BLNH)

    def keeps(self, num_positions: int) -> KVCache:
        """Return a cache with room for the keys and values of so many positions."""
        shape = 1, num_positions, self.config.num_kv_heads, self.config.head_size
        dtype = self.norm.scale[...].dtype  # of compute; linear weights may be codes
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def continued(
        self, x_BLD: jax.Array, kept: KVCache, start: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """Map the positions from `start` on, which also see the cached positions."""
        place_BL = (start + jnp.arange(x_BLD.shape[1], dtype=start.dtype))[None, :]
        q_BLNH, k_BLKH, v_BLKH = self._projected(x_BLD, place_BL)
        kept = kept.with_more(k_BLKH, v_BLKH, start)
        visibility = Visibility(window=self.config.window)
        z_BLNH = attend_cached(q_BLNH, kept, start, visibility)
        return self._added(x_BLD, z_BLNH), kept

    def _projected(
        self, x_BLD: jax.Array, place_BL: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values, rotated by their places (None: 0 to L-1)."""
        y_BLD = self.norm(x_BLD)
        q_BLNH = _normed(_project(y_BLD, self.q, self.q_bias), self.q_norm)
        k_BLKH = _normed(_project(y_BLD, self.k, self.k_bias), self.k_norm)
        v_BLKH = _project(y_BLD, self.v, self.v_bias)
        q_BLNH = self._scaled(self._turned(q_BLNH, place_BL))
        return q_BLNH, self._turned(k_BLKH, place_BL), v_BLKH

    def _added(self, x_BLD: jax.Array, z_BLNH: jax.Array) -> jax.Array:
        y_BLD = linear("blnh,nhd->bld", z_BLNH, self.out)
        y_BLD = _normed(biased(y_BLD, self.out_bias), self.post_norm)
        return x_BLD + scaled(y_BLD, self.config.residual_scale)

    def _turned(self, x_BLNH: jax.Array, place_BL: jax.Array | None) -> jax.Array:
        theta, scaling = self.config.rope_theta, self.config.rope_scaling
        if theta is None:
            return x_BLNH
        return rotate(x_BLNH, theta=theta, scaling=scaling, place_BL=place_BL)

    def _scaled(self, q_BLNH: jax.Array) -> jax.Array:
        """Rescale queries: attention divides by sqrt(H), the config sets its scale."""
        scale = self.config.query_scale
        return (
            q_BLNH if scale is None else scaled(q_BLNH, scale * q_BLNH.shape[-1] ** 0.5)
        )


def _normed(x: jax.Array, norm: Norm | None) -> jax.Array:
    return x if norm is None else norm(x)


def _project(x_BLD: jax.Array, weight: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    y_BLNH = linear("bld,dnh->blnh", x_BLD, weight)
    return y_BLNH if bias is None else y_BLNH + bias[...][None, None]


def head_sizes(model: Model) -> tuple[int, ...]:
    """Return the distinct head sizes of the model's attention modules, in order."""
    configs = [spec.config for spec in model.modules]
    return tuple(
        sorted({c.head_size for c in configs if isinstance(c, AttentionConfig)})
    )


def in_form(spec: ModuleSpec, form: AttentionForm | None) -> ModuleSpec:
    """Return the module; if it is attention, in this form (None: unchanged)."""
    if form is None or not isinstance(spec.config, AttentionConfig):
        return spec
    return replace(spec, config=replace(spec.config, form=form))


def attend(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    *,
    visibility: Visibility = ALL_BEFORE,
    form: AttentionForm | None = None,
    documents_BL: jax.Array | None = None,
) -> jax.Array:
    """Return z_BLNH in the given form (None: chunked, which runs everywhere).

    With documents, positions see only their own document. The form `xla` supports no
    soft cap.
    """
    among: Any = {"visibility": visibility, "documents_BL": documents_BL}
    if form in (None, "chunked"):
        return chunked_attention(q_BLNH, k_BLKH, v_BLKH, **among)
    if form != "xla":
        return kernel_attention(q_BLNH, k_BLKH, v_BLKH, kernel=form, **among)
    assert visibility.soft_cap is None, visibility
    window, same_BLL = visibility.window, None
    if documents_BL is not None:
        same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    if q_BLNH.dtype == jnp.float16:  # JAX's own form needs a product that CPUs lack
        return _attend_in_float16(q_BLNH, k_BLKH, v_BLKH, window, same_BLL)
    # JAX's own code promotes bf16 with fp32 here, which strict promotion refuses. Its
    # bf16 derivative does so again at lowering: compile that in the same context.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            q_BLNH,
            k_BLKH,
            v_BLKH,
            mask=None if same_BLL is None else same_BLL[:, None],
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
        )


def _attend_in_float16(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    window: int | None,
    same_BLL: jax.Array | None,
) -> jax.Array:
    """Return attention with an fp32 softmax; scaled queries keep scores from overflow.

    Legend: G = N / K query heads per key head; Q positions of queries, C of keys.
    """
    B, L, N, H = q_BLNH.shape
    K = k_BLKH.shape[2]
    q_BLKGH = (q_BLNH * H**-0.5).reshape(B, L, K, N // K, H)
    s_BKGQC = jnp.einsum("bqkgh,bckh->bkgqc", q_BLKGH, k_BLKH).astype(jnp.float32)
    causal_QC = jnp.tri(L, dtype=bool)
    seen_QC = (
        causal_QC if window is None else causal_QC & ~jnp.tri(L, k=-window, dtype=bool)
    )
    seen_BQC = seen_QC[None] if same_BLL is None else seen_QC[None] & same_BLL
    s_BKGQC = jnp.where(seen_BQC[:, None, None], s_BKGQC, -jnp.inf)
    p_BKGQC = jax.nn.softmax(s_BKGQC, axis=-1)
    z_BLKGH = jnp.einsum("bkgqc,bckh->bqkgh", p_BKGQC.astype(v_BLKH.dtype), v_BLKH)
    return z_BLKGH.reshape(q_BLNH.shape)
