# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (arXiv 2104.09864) in the half-split form of Llama.

Legend: B sequences, L positions, N heads, H head size, h = H / 2.
Owns the rotation. Does not own who is rotated (`attention.py`).
"""

import jax
import jax.numpy as jnp


def rotate(x_BLNH: jax.Array, *, theta: float) -> jax.Array:
    """Rotate dims (i, i + H/2) of position p by p * theta^(-2i/H), in fp32."""
    _, num_positions, _, head_size = x_BLNH.shape
    frequency_h = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    position_L = jnp.arange(num_positions, dtype=jnp.float32)
    angle_1L1h = (position_L[:, None] * frequency_h[None, :])[None, :, None, :]
    cos, sin = jnp.cos(angle_1L1h), jnp.sin(angle_1L1h)
    a_BLNh, b_BLNh = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    turned = (a_BLNh * cos - b_BLNh * sin, b_BLNh * cos + a_BLNh * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BLNH.dtype)
