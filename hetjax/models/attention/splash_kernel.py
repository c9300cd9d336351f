# SPDX-License-Identifier: Apache-2.0
"""JAX's splash attention: the forward, and the gradients from what the forward kept.

Legend: B sequences, L positions, N query heads, K key/value heads, H head size.
For TPUs. Owns the calls of the kernel: masks, blocks, the order of dims, and the
scaling of queries. Does not own the choice of this kernel (`attention.py`).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

from hetjax.models.attention.chunked_attention import Visibility

LANES = 128  # of a TPU: sizes of blocks are multiples
_BLOCKS = tuple(range(4 * LANES, 0, -LANES))  # sizes in positions, the best first


def forward(
    visibility: Visibility,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    documents_BL: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return z_BLNH and the logarithm of the sum of each row's exponentials (BNL)."""
    kernel: Any = _kernel(visibility, q_BLNH)  # its type lacks some of its operands
    heads_first = map(_heads_first, (_scaled(q_BLNH), k_BLKH, v_BLKH))
    z_BNLH, (log_total_BNL,) = jax.vmap(kernel)(*heads_first, _segments(documents_BL))
    return _heads_first(z_BNLH), log_total_BNL


def backward(
    visibility: Visibility,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    documents_BL: jax.Array | None,
    z_BLNH: jax.Array,
    log_total_BNL: jax.Array,
    dz_BLNH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values."""
    kernel = _kernel(visibility, q_BLNH)
    gradients = partial(splash._splash_attention_bwd, **kernel.kwargs)

    def sequence_gradients(*saved: Any) -> tuple[jax.Array, ...]:
        *given, z_NLH, log_total_NL, dz_NLH = saved
        residuals = (*given, None, z_NLH, log_total_NL)  # no sinks
        infos = kernel.dq_mask_info, kernel.dkv_mask_info
        return gradients(res=(*residuals, *infos), do=dz_NLH)[3:6]

    heads_first = map(_heads_first, (_scaled(q_BLNH), k_BLKH, v_BLKH))
    rest = _heads_first(z_BLNH), log_total_BNL, _heads_first(dz_BLNH)
    found = jax.vmap(sequence_gradients)(*heads_first, _segments(documents_BL), *rest)
    dq_BLNH, dk_BLKH, dv_BLKH = map(_heads_first, found)
    return _scaled(dq_BLNH), dk_BLKH, dv_BLKH


def _kernel(visibility: Visibility, q_BLNH: jax.Array) -> splash.SplashAttentionKernel:
    """Return the kernel for all heads of one sequence; masks stay formulas."""
    _, length, num_heads, _ = q_BLNH.shape
    size = (length, length)
    mask = (
        masks.CausalMask(size)
        if visibility.window is None
        else masks.LocalMask(size, (visibility.window - 1, 0), 0)
    )
    block = next(block for block in _BLOCKS if length % block == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        attn_logits_soft_cap=visibility.soft_cap,
    )


def _scaled(q_BLNH: jax.Array) -> jax.Array:
    return (q_BLNH * q_BLNH.shape[-1] ** -0.5).astype(q_BLNH.dtype)


def _segments(documents_BL: jax.Array | None) -> splash.SegmentIds | None:
    if documents_BL is None:
        return None
    ids_BL = documents_BL.astype(jnp.int32)
    return splash.SegmentIds(q=ids_BL, kv=ids_BL)


def _heads_first(x_BLNH: jax.Array) -> jax.Array:
    """Swap BLNH to BNLH, or back."""
    return x_BLNH.swapaxes(1, 2)
