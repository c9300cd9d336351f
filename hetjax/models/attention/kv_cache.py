# SPDX-License-Identifier: Apache-2.0
"""Attention of new positions to the cached keys and values of earlier positions.

Legend: B sequences, L new positions, S cached positions, N query heads, K key/value
heads, G = N / K query heads per key/value head, H head size.

Owns the cache of keys and values and attention to it; nothing here has a derivative.
With a window the cache holds all positions, too, and a mask hides those behind the
window. Does not own the computation of queries, keys and values (`attention.py`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetjax.models.attention.chunked_attention import Visibility


class KVCache(NamedTuple):
    """Keys and values of positions 0 to S-1; arbitrary where not yet written."""

    k_BSKH: jax.Array
    v_BSKH: jax.Array

    def with_more(
        self, k_BLKH: jax.Array, v_BLKH: jax.Array, start: jax.Array
    ) -> "KVCache":
        """Return the cache with the positions from `start` on; there must be room."""

        def put(kept: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(kept, new, start, axis=1)

        return KVCache(put(self.k_BSKH, k_BLKH), put(self.v_BSKH, v_BLKH))


def attend_cached(
    q_BLNH: jax.Array, kept: KVCache, start: jax.Array, visibility: Visibility
) -> jax.Array:
    """Return z_BLNH of queries at the positions from `start` on, also in the cache.

    Precision is that of `chunked_attention`: scores and sums in fp32, factors of
    products in the dtype of the inputs.
    """
    B, L, N, H = q_BLNH.shape
    S, K = kept.k_BSKH.shape[1:3]
    q_BLKGH = q_BLNH.reshape(B, L, K, N // K, H)
    s_BKGLS = _product("blkgh,bskh->bkgls", q_BLKGH, kept.k_BSKH) * H**-0.5
    if (cap := visibility.soft_cap) is not None:
        s_BKGLS = cap * jnp.tanh(s_BKGLS / cap)
    seen_LS = _seen(start + jnp.arange(L, dtype=start.dtype), S, visibility.window)
    s_BKGLS = jnp.where(seen_LS[None, None, None], s_BKGLS, -jnp.inf)
    p_BKGLS = jax.nn.softmax(s_BKGLS, axis=-1).astype(q_BLNH.dtype)
    z_BLKGH = _product("bkgls,bskh->blkgh", p_BKGLS, kept.v_BSKH)
    return z_BLKGH.astype(q_BLNH.dtype).reshape(q_BLNH.shape)


def _seen(query_L: jax.Array, num_kept: int, window: int | None) -> jax.Array:
    """Whether a query sees a cached position: not a later one, and in the window."""
    back_LS = query_L[:, None] - jnp.arange(num_kept, dtype=query_L.dtype)[None, :]
    seen_LS = back_LS >= 0
    return seen_LS if window is None else seen_LS & (back_LS < window)


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)
