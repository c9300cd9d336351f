# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of positions (RoPE, arXiv 2104.09864).

Legend: B sequences, L positions, N heads, H head size, h = H / 2.
Owns the rotation, its scaling to more positions, and the numbering of positions in
packed sequences. Does not own learned positions (`layers.py`).
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
    place_BL: jax.Array | None = None,
) -> jax.Array:
    """Rotate dims (i, i + H/2) of position p by p * theta^(-2i/H), in fp32.

    The half-split form of Llama. p is `place_BL` (int32); None: p counts from 0.
    """
    _, num_positions, _, head_size = x_BLNH.shape
    frequency_h = frequencies(head_size, theta, scaling)
    if place_BL is None:
        place_BL = jnp.arange(num_positions)[None, :]
    position_BL = place_BL.astype(jnp.float32)
    angle_BL1h = (position_BL[..., None] * frequency_h[None, None, :])[:, :, None, :]
    cos, sin = jnp.cos(angle_BL1h), jnp.sin(angle_BL1h)
    a_BLNh, b_BLNh = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    turned = (a_BLNh * cos - b_BLNh * sin, b_BLNh * cos + a_BLNh * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BLNH.dtype)


def positions_within(documents_BL: jax.Array) -> jax.Array:
    """Count the positions of each document from 0; a document is contiguous."""
    place_BL = jax.lax.broadcasted_iota(jnp.int32, documents_BL.shape, 1)
    before_BL = jnp.pad(documents_BL[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start_BL = jnp.where(documents_BL != before_BL, place_BL, 0)
    return place_BL - jax.lax.cummax(start_BL, axis=1)


def frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Return radians per position, frequency_h in fp32, theta^(-2i/H) but for scaling.

    As in Llama 3.1, dims with few turns in the original length are slowed down by the
    factor, those with many are not, and those between in part. Computed where used: a
    constant of the program would be kept for its backward.
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
