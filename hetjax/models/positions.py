# SPDX-License-Identifier: Apache-2.0
"""Where a position stands: rotary embeddings (RoPE, arXiv 2104.09864).

Legend: B sequences, L positions, N heads, H head size, h = H / 2.
Owns the rotation and how it is stretched over more positions. Does not own learned
positions (`layers.py`).
"""

import math

import jax
import jax.numpy as jnp

from hetjax.models.configs import RopeScaling


def rotate(
    x_BLNH: jax.Array,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    start: jax.Array | None = None,
) -> jax.Array:
    """Rotate dims (i, i + H/2) of position p by p * theta^(-2i/H), in fp32.

    The half-split form of Llama. Positions count from `start` (int32), or from 0.
    """
    _, num_positions, _, head_size = x_BLNH.shape
    frequency_h = frequencies(head_size, theta, scaling)
    position_L = jnp.arange(num_positions, dtype=jnp.float32)
    if start is not None:
        position_L += start.astype(jnp.float32)
    angle_1L1h = (position_L[:, None] * frequency_h[None, :])[None, :, None, :]
    cos, sin = jnp.cos(angle_1L1h), jnp.sin(angle_1L1h)
    a_BLNh, b_BLNh = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    turned = (a_BLNh * cos - b_BLNh * sin, b_BLNh * cos + a_BLNh * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BLNH.dtype)


def frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Give radians per position, frequency_h in fp32, theta^(-2i/H) but for scaling.

    As Llama 3.1 does it: dims with few turns in the original length are slowed down by
    the factor, those with many are not, and those between in part. Made where they are
    used: a constant of the program would be kept for its backward.
    """
    exponent_h = jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size
    frequency_h = theta**-exponent_h
    if scaling is None:
        return frequency_h
    slowed_h = frequency_h / scaling.factor
    if scaling.kind == "linear":
        return slowed_h
    turns_h = scaling.original_positions * frequency_h / (2 * math.pi)
    share_h = (turns_h - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
    share_h = jnp.clip(share_h, 0.0, 1.0)
    return (1 - share_h) * slowed_h + share_h * frequency_h
