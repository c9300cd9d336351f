# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of linear weights (LoRA, arXiv 2106.09685).

A weight W with an adapter acts as W + scale A B: A maps the inputs to `rank` numbers,
and B maps these to the outputs. The sum is never made, so a frozen W needs no gradient.
B is initially zero. A is cut over devices as the inputs of W are, B as its outputs are.

Owns the definition of an adapter, the shapes and initial values of its arrays, and the
product of a weight with its adapter. Does not own which weights have one
(`finetuning.py`).
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hetjax.models.linear.quantised import Quantised, product

A, B = "_lora_a", "_lora_b"


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a module's weight: the rank between A and B, and the factor of
    their product."""

    weight: str
    rank: int
    scale: float

    @property
    def names(self) -> tuple[str, str]:
        """The names of A and B: the weight's name with a suffix."""
        return self.weight + A, self.weight + B


@dataclass(frozen=True, eq=False, slots=True)
class Factors:
    """An adapter's arrays; compared by identity, as arrays are."""

    a: Any
    b: Any
    scale: float


@dataclass(frozen=True, eq=False, slots=True)
class Held:
    """A weight that is held quantised; also compared by identity."""

    weight: Quantised


def factor_dims(
    dims: tuple[Any, ...], num_inputs: int, between: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the sizes or axes of A (inputs, between) and of B (between, outputs)."""
    return (*dims[:num_inputs], between), (between, *dims[num_inputs:])


def first_factors(
    key: jax.Array, a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return initial values: A uniform within 1 / sqrt(inputs), as in PEFT, B zero."""
    limit = math.prod(a_shape[:-1]) ** -0.5
    a = jax.random.uniform(key, a_shape, jnp.float32, -limit, limit)
    return a, jnp.zeros(b_shape, jnp.float32)


def merged_weight(
    weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float
) -> np.ndarray:
    """Return W + scale A B; only the sum is allocated besides W."""
    merged = a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)
    merged *= scale
    merged = merged.reshape(weight.shape)
    merged += weight
    return merged


def linear(formula: str, x: jax.Array, weight: nnx.Param) -> jax.Array:
    """Contract x with a linear weight by the formula, and add its adapter's part."""
    about = weight.get_metadata()
    held: Held | None = about.get("held")
    y: Any
    if held is None:
        y = jnp.einsum(formula, x, weight[...])
    else:
        y = product(formula, x, held.weight)
    factors: Factors | None = about.get("factors")
    if factors is None:
        return y
    operands, outputs = formula.split("->")
    of_x, of_weight = operands.split(",")
    inputs = "".join(dim for dim in of_weight if dim not in outputs)
    kept = "".join(dim for dim in of_x if dim not in inputs)
    of_b = "r" + of_weight.removeprefix(inputs)
    z = jnp.einsum(f"{of_x},{inputs}r->{kept}r", x, factors.a) * factors.scale
    return y + jnp.einsum(f"{kept}r,{of_b}->{outputs}", z, factors.b)
