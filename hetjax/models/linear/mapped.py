# SPDX-License-Identifier: Apache-2.0
"""Maps weights over data ranks (vmap) where the rows they multiply are mapped.

JAX's `ragged_dot` has no vmap rule for the case that only some operands are mapped.
Does not own the mapping (`stage/microbatch.py`).
"""

import jax


@jax.custom_vjp
def mapped_like(rows_E: jax.Array, value: jax.Array) -> jax.Array:
    """Return the value, mapped where the rows are; its gradient passes unchanged.

    This selects between two equal values: the compiler and costs remove the choice.
    """
    return jax.lax.select_n(rows_E[0] >= 0, value, value)


def _forward(rows_E: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
    return mapped_like(rows_E, value), None


def _backward(_: None, dy: jax.Array) -> tuple[None, jax.Array]:
    return None, dy


mapped_like.defvjp(_forward, _backward)
