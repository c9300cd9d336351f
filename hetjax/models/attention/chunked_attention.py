# SPDX-License-Identifier: Apache-2.0
"""Causal attention block by block: no array grows with the square of the length.

Legend: B sequences, L positions, N query heads, K key/value heads, G = N / K query
heads per key/value head, H head size; Q positions in a block of queries, C positions
in a block of keys.

Owns the arithmetic, in plain JAX for every backend, and its custom derivative. The
derivative keeps queries, keys, values, output and one number per query (as
FlashAttention-2, arXiv 2307.08691). Tracing leaves out pairs of blocks in which no
query sees a key. Does not own the choice of this form (`attention.py`).

Why not tokamax: besides inputs and gradients, its `xla_chunked` (0.0.17) takes 2,103
MiB in bf16 and 2,575 MiB in fp32 at 8,192 positions on CPU (32 query heads of size 128,
8 key heads). This form takes 771 MiB (a CPU computes bf16 in fp32, and keeps the inputs
in both) and 289 MiB.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

KEPT = "attention"  # the name of output and per-row numbers in remat policies
# Positions. On two CPU cores, forward and backward, blocks of 512 take this share of
# the time of all scores at once (`xla`), in bf16 and fp32, with 4 heads of size 16 and
# 16 of size 64: at 128 positions 0.7 to 0.8, at 256 and 512 0.5 to 0.8, at 1,024 0.1 to
# 0.4, at 2,048 0.1 to 0.2. Blocks of 256 take less there (0.2 to 0.5 at 512), but
# accelerators would wait for the many small kernels of a loop.
BLOCK = 512
_UNSEEN = -1e30  # finite: so is the maximum of a row that has seen no key yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Visibility:
    """Which keys a query scores, and how.

    A query sees its own and all earlier positions, or the last `window` of these if
    given. With a `soft_cap`, scores become soft_cap x tanh(score / soft_cap).
    """

    window: int | None = None
    soft_cap: float | None = None


ALL_BEFORE = Visibility()


def chunked_attention(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    *,
    visibility: Visibility = ALL_BEFORE,
    documents_BL: jax.Array | None = None,
    max_block: int = BLOCK,
) -> jax.Array:
    """Return z_BLNH, the sum of values weighted by softmax(q k / sqrt(H)).

    With `documents_BL` (integers), positions see only their own document. Scores and
    sums are fp32; factors of products have the dtype of the inputs. Blocks have at most
    `max_block` positions.
    """
    B, L, N, H = q_BLNH.shape
    K = k_BLKH.shape[2]
    q_BLKGH = q_BLNH.reshape(B, L, K, N // K, H)
    blocks = _Blocks(L, max_block, visibility)
    padded = (blocks.padded(x) for x in (q_BLKGH, k_BLKH, v_BLKH, documents_BL))
    z_BLKGH: jax.Array = _attention(blocks, *padded)
    return z_BLKGH[:, :L].reshape(q_BLNH.shape)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The cut of positions into equal blocks, and the pairs of blocks to compute."""

    length: int
    max_block: int
    visibility: Visibility

    @property
    def number(self) -> int:
        return -(-self.length // self.max_block)

    @property
    def size(self) -> int:
        return -(-self.length // self.number)

    @property
    def pairs(self) -> jax.Array:
        """(first query, first key) of each pair in which some query sees some key."""
        starts = range(0, self.number * self.size, self.size)
        window = self.visibility.window or self.length
        seen = [
            (query, key)
            for query in starts
            for key in starts
            if key <= query and query - (key + self.size - 1) < window
        ]
        return jnp.asarray(seen, jnp.int32)

    def padded(self, x_BL: jax.Array | None) -> jax.Array | None:
        """Pad to whole blocks; no query that counts sees the padding."""
        if x_BL is None or self.length == self.number * self.size:
            return x_BL
        padding = [(0, 0)] * x_BL.ndim
        padding[1] = (0, self.number * self.size - self.length)
        return jnp.pad(x_BL, padding)

    def cut(self, x: jax.Array, start: jax.Array, axis: int = 1) -> jax.Array:
        if self.number == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, start, self.size, axis)

    def put(
        self, x: jax.Array, block: jax.Array, start: jax.Array, axis: int = 1
    ) -> jax.Array:
        if self.number == 1:
            return block
        return jax.lax.dynamic_update_slice_in_dim(x, block, start, axis)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    blocks: _Blocks,
    q_BLKGH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    documents_BL: jax.Array | None,
) -> jax.Array:
    return _forward(blocks, q_BLKGH, k_BLKH, v_BLKH, documents_BL)[0]


def _forward(
    blocks: _Blocks,
    q_BLKGH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    documents_BL: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    def add(sums: tuple[jax.Array, ...], pair: Any) -> tuple[Any, None]:
        query, key = pair
        top_BKLG, total_BKLG, z_BKLGH = sums
        before_BKQG = blocks.cut(top_BKLG, query, 2)
        s_BKQGC, seen = _scores(blocks, q_BLKGH, k_BLKH, documents_BL, pair)
        top_BKQG = jnp.maximum(before_BKQG, jnp.max(s_BKQGC, axis=-1))
        p_BKQGC = jnp.where(seen, jnp.exp(s_BKQGC - top_BKQG[..., None]), 0.0)
        shrink_BKQG = jnp.exp(before_BKQG - top_BKQG)
        total_BKQG = blocks.cut(total_BKLG, query, 2) * shrink_BKQG
        total_BKQG += jnp.sum(p_BKQGC, axis=-1)
        z_BKQGH = blocks.cut(z_BKLGH, query, 2) * shrink_BKQG[..., None]
        z_BKQGH += _product("bkqrc,bckh->bkqrh", p_BKQGC, blocks.cut(v_BLKH, key))
        return (
            blocks.put(top_BKLG, top_BKQG, query, 2),
            blocks.put(total_BKLG, total_BKQG, query, 2),
            blocks.put(z_BKLGH, z_BKQGH, query, 2),
        ), None

    z_BKLGH = jnp.zeros_like(q_BLKGH.swapaxes(1, 2), jnp.float32)
    start = jnp.full_like(z_BKLGH[..., 0], _UNSEEN), z_BKLGH[..., 0], z_BKLGH
    top_BKLG, total_BKLG, z_BKLGH = _over_pairs(blocks, add, start, q_BLKGH)
    z_BKLGH = (z_BKLGH / total_BKLG[..., None]).astype(q_BLKGH.dtype)
    z_BLKGH = checkpoint_name(z_BKLGH.swapaxes(1, 2), KEPT)
    log_total_BKLG = checkpoint_name(top_BKLG + jnp.log(total_BKLG), KEPT)
    saved = q_BLKGH, k_BLKH, v_BLKH, documents_BL, z_BLKGH, log_total_BKLG
    return z_BLKGH, saved


def _backward(
    blocks: _Blocks, saved: tuple[Any, ...], dz_BLKGH: jax.Array
) -> tuple[jax.Array | None, ...]:
    q_BLKGH, k_BLKH, v_BLKH, documents_BL, z_BLKGH, log_total_BKLG = saved
    mean_BLKG = jnp.sum(
        dz_BLKGH.astype(jnp.float32) * z_BLKGH.astype(jnp.float32), axis=-1
    )
    mean_BKLG = mean_BLKG.swapaxes(1, 2)  # the mean of dp, weighted by p

    def add(sums: tuple[jax.Array, ...], pair: Any) -> tuple[Any, None]:
        query, key = pair
        s_BKQGC, seen = _scores(blocks, q_BLKGH, k_BLKH, documents_BL, pair)
        log_total_BKQG = blocks.cut(log_total_BKLG, query, 2)
        p_BKQGC = jnp.where(seen, jnp.exp(s_BKQGC - log_total_BKQG[..., None]), 0.0)
        dz_BQKGH, q_BQKGH = (blocks.cut(x, query) for x in (dz_BLKGH, q_BLKGH))
        k_BCKH, v_BCKH = (blocks.cut(x, key) for x in (k_BLKH, v_BLKH))
        dp_BKQGC = _product("bqkrh,bckh->bkqrc", dz_BQKGH, v_BCKH)
        ds_BKQGC = p_BKQGC * (dp_BKQGC - blocks.cut(mean_BKLG, query, 2)[..., None])
        ds_BKQGC *= _slope(blocks, s_BKQGC, q_BLKGH.shape[-1])
        dq_BKQGH = _product("bkqrc,bckh->bkqrh", ds_BKQGC, k_BCKH)
        # q before r, as rows lie in memory: einsum sorts the summed dims by letter.
        dk_BKHC = _product("bqkrh,bkqrc->bkhc", q_BQKGH, ds_BKQGC)
        dv_BKHC = _product("bqkrh,bkqrc->bkhc", dz_BQKGH, p_BKQGC)
        added = (dq_BKQGH, query, 2), (dk_BKHC, key, 3), (dv_BKHC, key, 3)
        return tuple(
            blocks.put(x, blocks.cut(x, at, axis) + d, at, axis)
            for x, (d, at, axis) in zip(sums, added, strict=True)
        ), None

    start = tuple(
        jnp.zeros_like(x, jnp.float32)
        for x in (q_BLKGH.swapaxes(1, 2), _last(k_BLKH), _last(v_BLKH))
    )
    sums = _over_pairs(blocks, add, start, q_BLKGH)
    dq_BKLGH, dk_BKHL, dv_BKHL = (d.astype(q_BLKGH.dtype) for d in sums)
    return dq_BKLGH.swapaxes(1, 2), _first(dk_BKHL), _first(dv_BKHL), None


_attention.defvjp(_forward, _backward)


def _scores(
    blocks: _Blocks,
    q_BLKGH: jax.Array,
    k_BLKH: jax.Array,
    documents_BL: jax.Array | None,
    pair: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return s_BKQGC of a pair of blocks, and a mask of the scores that count."""
    query, key = pair
    q_BQKGH, k_BCKH = blocks.cut(q_BLKGH, query), blocks.cut(k_BLKH, key)
    s_BKQGC = _product("bqkrh,bckh->bkqrc", q_BQKGH, k_BCKH)
    s_BKQGC *= 1 / math.sqrt(q_BLKGH.shape[-1])
    if (cap := blocks.visibility.soft_cap) is not None:
        s_BKQGC = cap * jnp.tanh(s_BKQGC / cap)
    back_QC = query - key + _index(blocks.size, 0) - _index(blocks.size, 1)
    seen = back_QC >= 0
    if (window := blocks.visibility.window) is not None:
        seen &= back_QC < window
    seen = seen[None, None, :, None]
    if documents_BL is not None:
        own_BQ, other_BC = (blocks.cut(documents_BL, at) for at in (query, key))
        seen &= (own_BQ[:, :, None] == other_BC[:, None, :])[:, None, :, None]
    return jnp.where(seen, s_BKQGC, _UNSEEN), seen


def _slope(blocks: _Blocks, s_BKQGC: jax.Array, head_size: int) -> jax.Array | float:
    """Return the derivative of scores by the product of query and key."""
    scale, cap = 1 / math.sqrt(head_size), blocks.visibility.soft_cap
    if cap is None:
        return scale
    # without the limit, the slopes of scores that do not count would be infinite
    return scale * (1 - jnp.square(jnp.maximum(s_BKQGC / cap, -1.0)))


def _over_pairs(
    blocks: _Blocks, add: Callable[..., Any], start: Any, q_BLKGH: jax.Array
) -> Any:
    """Return the sums over all pairs; a single block needs no loop."""
    if blocks.number == 1:
        first = _after(np.int32(0), q_BLKGH)
        return add(start, (first, first))[0]
    return jax.lax.scan(add, start, _after(blocks.pairs, q_BLKGH))[0]


def _after(pairs: Any, q_BLKGH: jax.Array) -> jax.Array:
    """Return the pairs, available only once the queries are. Masks depend on the pairs
    alone: JAX would otherwise hoist all of them out of the loop at once."""
    return jax.lax.optimization_barrier((pairs, q_BLKGH))[0]


def _last(x_BLKH: jax.Array) -> jax.Array:
    """Return x_BKHL."""
    return jnp.moveaxis(x_BLKH, 1, 3)


def _first(x_BKHL: jax.Array) -> jax.Array:
    """Return x_BLKH."""
    return jnp.moveaxis(x_BKHL, 3, 1)


def _index(size: int, dim: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), dim)


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return fp32 sums of products of factors in the smaller of the two dtypes."""
    dtype = min(a.dtype, b.dtype, key=lambda d: d.itemsize)
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)
