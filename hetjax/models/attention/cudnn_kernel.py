# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention: the forward, and the gradients from what the forward kept.

Legend: B sequences, L positions, N query heads, K key/value heads, H head size.
For NVIDIA GPUs from compute capability 8.0, in bf16 and fp16. Owns the calls of cuDNN.
They bypass JAX's public function, which looks for a GPU at trace time and cannot run
the backward pass separately. Does not own the choice of cuDNN (`attention.py`).
"""

from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from hetjax.models.attention.chunked_attention import Visibility

_LATER: dict[str, Any] = (  # additional options that JAX requires from 0.12 on
    {"score_mod": None}
    if "score_mod" in signature(cudnn._dot_product_attention_fwd_rule).parameters
    else {}
)


def forward(
    visibility: Visibility,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    documents_BL: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return z_BLNH and the logarithm of the sum of each row's exponentials (BNL)."""
    assert documents_BL is None, "cuDNN is asked for whole sequences"
    z_BLNH, log_total_BNL = cudnn._dot_product_attention_fwd_p_wrapper.bind(
        *_operands(q_BLNH, k_BLKH, v_BLKH),
        is_training=True,
        **_options(visibility, q_BLNH),
    )
    return z_BLNH, log_total_BNL


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
    assert documents_BL is None, "cuDNN is asked for whole sequences"
    dq_BLNH, dk_BLKH, dv_BLKH = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        *_operands(q_BLNH, k_BLKH, v_BLKH),
        log_total_BNL,
        z_BLNH,
        dz_BLNH,
        **_options(visibility, q_BLNH),
    )
    return dq_BLNH, dk_BLKH, dv_BLKH


def _operands(
    q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array
) -> tuple[jax.Array, ...]:
    """Return cuDNN's operands, with no bias, lengths, offsets or pages."""
    nothing = jnp.zeros(0, q_BLNH.dtype)
    return q_BLNH, k_BLKH, v_BLKH, *[nothing] * 7


def _options(visibility: Visibility, q_BLNH: jax.Array) -> dict[str, Any]:
    assert visibility.soft_cap is None, "cuDNN is asked for scores without a cap"
    return {
        "scale": q_BLNH.shape[-1] ** -0.5,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.CAUSAL,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": visibility.window,
        **_LATER,
    }
