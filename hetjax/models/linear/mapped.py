# SPDX-License-Identifier: Apache-2.0
"""Weights that are mapped over data ranks because what they are multiplied with is.

JAX's `ragged_dot` has no rule for mapping (vmap) some of its operands alone. Does not
own the mapping (`stage/microbatch.py`).
"""

import jax


@jax.custom_vjp
def mapped_like(rows_E: jax.Array, value: jax.Array) -> jax.Array:
    """Give the value, mapped where the rows are, and its gradient as it comes.

    A choice between two that are the same: the compiler takes it away, and so do costs.
    """
    return jax.lax.select_n(rows_E[0] >= 0, value, value)


def _forward(rows_E: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
    return mapped_like(rows_E, value), None


def _backward(_: None, dy: jax.Array) -> tuple[None, jax.Array]:
    return None, dy


mapped_like.defvjp(_forward, _backward)
