# SPDX-License-Identifier: Apache-2.0
"""How parameters begin: GPT-2 style initial values with their logical axes beside them.

Owns the three kinds of initial value. Does not own which module has which parameter.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

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


def ones(shape: tuple[int, ...], logical: Logical) -> nnx.Param:
    """Make an fp32 parameter of ones (norm scales)."""
    return nnx.Param(jnp.ones(shape, jnp.float32), logical=logical)


def residual_std(num_blocks: int) -> float:
    """Scale projections into the residual stream by its 2 x num_blocks additions."""
    return STD / math.sqrt(2 * num_blocks)
