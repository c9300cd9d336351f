# SPDX-License-Identifier: Apache-2.0
"""Frozen linear weights in few bits (QLoRA, arXiv 2305.14314), dequantised where used.

A weight is cut into blocks of 64 along the last dim of its inputs. Each block has one
fp32 scale. For `nf4` the scale is the block's largest magnitude, and codes stand for
fractions of it. For `int8` the scale is a 127th of that magnitude, and codes stand for
multiples of it. The 16 numbers of NF4 are those of the paper's appendix E. Two NF4
codes share a byte, the first in its low bits. The scales themselves are not quantised.

The product dequantises the weight to the precision of its input, then discards it. The
backward pass dequantises it again, whatever else the forward pass keeps.

Owns the forms, the conversion of a weight to a form, and its product. Does not own
which weights are quantised (`finetuning.py`).
"""

import math
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.models.configs import FrozenForm
from hetjax.models.linear.mapped import mapped_like

SCALES = "_scales"  # suffix of the scales' name; codes have the weight's name
BLOCK = 64
DTYPES: dict[FrozenForm, str] = {"int8": "int8", "nf4": "uint8"}
_PER_BYTE: dict[FrozenForm, int] = {"int8": 1, "nf4": 2}
_LARGEST = 127
_ROUNDED_AT_ONCE = 2**17  # numbers, unless one block with all outputs has more
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

Shape = tuple[int, ...]


class Quantised(NamedTuple):
    """A quantised weight: arrays, or their shapes."""

    codes: Any
    scales: Any


def quantised_shapes(form: FrozenForm, shape: Shape, num_inputs: int) -> Quantised:
    """Return the shapes of a weight's codes and scales; dims stay in their places."""
    size, dim = shape[num_inputs - 1], num_inputs - 1
    codes, scales = size // _PER_BYTE[form], size // _block(size)
    return Quantised(*((*shape[:dim], n, *shape[dim + 1 :]) for n in (codes, scales)))


def can_quantise(form: FrozenForm, shape: Shape, num_inputs: int) -> bool:
    """Whether the weight's codes fill their bytes."""
    return shape[num_inputs - 1] % _PER_BYTE[form] == 0


def quantised(form: FrozenForm, weight: jax.Array, num_inputs: int) -> Quantised:
    """Quantise a weight (fp32): each number to the nearest code."""
    dim = num_inputs - 1
    blocks = _split(weight, dim, weight.shape[dim] // _block(weight.shape[dim]))
    largest = jnp.max(jnp.abs(blocks), axis=dim + 1, keepdims=True)
    scales = largest / _LARGEST if form == "int8" else largest
    shares = (blocks / jnp.where(scales > 0, scales, 1)).reshape(weight.shape)
    if form == "int8":
        codes = jnp.round(shares).astype(jnp.int8)
    else:
        codes = _packed(_nearest(shares), dim)
    return Quantised(codes, jnp.squeeze(scales, dim + 1))


def whole(held: Quantised, num_inputs: int, dtype: Any) -> jax.Array:
    """Dequantise a weight to this dtype."""
    dim = num_inputs - 1
    if held.codes.dtype == DTYPES["nf4"]:
        values = _looked_up(_unpacked(held.codes, dim))
    else:
        values = held.codes.astype(jnp.float32)
    blocks = _split(values, dim, held.scales.shape[dim])
    scaled = blocks * jnp.expand_dims(held.scales, dim + 1)
    return scaled.reshape(values.shape).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(formula: str, x: jax.Array, held: Quantised) -> jax.Array:
    """Contract x with the weight by the formula, as einsum does.

    The weight has no gradient.
    """
    return jnp.einsum(formula, x, _operand(formula, held, x.dtype))


def _product_forward(
    formula: str, x: jax.Array, held: Quantised
) -> tuple[jax.Array, Quantised]:
    return jnp.einsum(formula, x, _operand(formula, held, x.dtype)), held


def _product_backward(
    formula: str, held: Quantised, dy: jax.Array
) -> tuple[jax.Array, None]:
    of_x, of_weight, of_y = _dims(formula)
    weight = _operand(formula, held, dy.dtype)
    return jnp.einsum(f"{of_y},{of_weight}->{of_x}", dy, weight), None


product.defvjp(_product_forward, _product_backward)


def _operand(formula: str, held: Quantised, dtype: Any) -> jax.Array:
    """Dequantise the weight; its inputs end with the last dim that is summed over."""
    _, of_weight, of_y = _dims(formula)
    last = max(at for at, dim in enumerate(of_weight) if dim not in of_y)
    return whole(held, last + 1, dtype)


def _dims(formula: str) -> tuple[str, str, str]:
    operands, of_y = formula.split("->")
    of_x, of_weight = operands.split(",")
    return of_x, of_weight, of_y


@jax.custom_vjp
def ragged_product(x_RI: jax.Array, held: Quantised, rows_E: jax.Array) -> jax.Array:
    """Multiply rows by the weight of their expert, as `ragged_dot` does.

    The weight (experts, inputs, outputs) has no gradient.
    """
    held = Quantised(held.codes, mapped_like(rows_E, held.scales))
    return jax.lax.ragged_dot(x_RI, whole(held, 2, x_RI.dtype), rows_E)


def _ragged_forward(
    x_RI: jax.Array, held: Quantised, rows_E: jax.Array
) -> tuple[jax.Array, tuple[Quantised, jax.Array]]:
    return ragged_product(x_RI, held, rows_E), (held, rows_E)


def _ragged_backward(
    kept: tuple[Quantised, jax.Array], dy_RO: jax.Array
) -> tuple[jax.Array, None, None]:
    held, rows_E = kept
    held = Quantised(held.codes, mapped_like(rows_E, held.scales))
    weight_EOI = jnp.swapaxes(whole(held, 2, dy_RO.dtype), 1, 2)
    return jax.lax.ragged_dot(dy_RO, weight_EOI, rows_E), None, None


ragged_product.defvjp(_ragged_forward, _ragged_backward)


def quantised_on_host(
    form: FrozenForm, weight: np.ndarray, num_inputs: int
) -> Quantised:
    """Quantise on the host's CPU: all hosts get equal bits, whatever their devices."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        held = _quantiser(form, num_inputs)(weight)
    return Quantised(*map(np.asarray, held))


def rounded(form: FrozenForm, weight: np.ndarray, num_inputs: int) -> np.ndarray:
    """Quantise a weight (fp32) and dequantise it again.

    Only some blocks are quantised at once, as that takes several times their bytes.
    """
    size = _block(weight.shape[num_inputs - 1])
    outputs = math.prod(weight.shape[num_inputs:])
    blocks = weight.reshape(-1, size, outputs)
    found = np.empty(blocks.shape, np.float32)
    step = max(1, _ROUNDED_AT_ONCE // (size * outputs))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for start in range(0, len(blocks), step):
            here = slice(start, start + step)
            held = _quantiser(form, 2)(blocks[here])
            found[here] = _restorer(2)(held)
    return found.reshape(weight.shape)


@cache
def _quantiser(form: FrozenForm, num_inputs: int) -> Any:
    return jax.jit(lambda weight: quantised(form, weight, num_inputs))


@cache
def _restorer(num_inputs: int) -> Any:
    return jax.jit(lambda held: whole(held, num_inputs, jnp.float32))


def _block(size: int) -> int:
    """Return 64, or the largest power of two below it that divides the size."""
    return math.gcd(BLOCK, size)


def _split(value: jax.Array, dim: int, num_blocks: int) -> jax.Array:
    before, after = value.shape[:dim], value.shape[dim + 1 :]
    return value.reshape(*before, num_blocks, value.shape[dim] // num_blocks, *after)


def _nearest(shares: jax.Array) -> jax.Array:
    """Return the index of the nearest of the 16 numbers."""
    between = [(low + high) / 2 for low, high in zip(NF4, NF4[1:], strict=False)]
    return sum(
        ((shares > middle).astype(jnp.uint8) for middle in between),
        start=jnp.zeros(shares.shape, jnp.uint8),
    )


def _packed(codes: jax.Array, dim: int) -> jax.Array:
    pairs = _split(codes, dim, codes.shape[dim] // 2)
    first, second = (
        jax.lax.index_in_dim(pairs, at, dim + 1, keepdims=False) for at in (0, 1)
    )
    return first | (second << 4)


def _unpacked(codes: jax.Array, dim: int) -> jax.Array:
    rank = codes.ndim + 1
    shifts = jax.lax.broadcasted_iota(
        jnp.uint8, tuple(2 if at == dim + 1 else 1 for at in range(rank)), dim + 1
    )
    pairs = (jnp.expand_dims(codes, dim + 1) >> (4 * shifts)) & 15
    return pairs.reshape(*codes.shape[:dim], -1, *codes.shape[dim + 1 :])


def _looked_up(codes: jax.Array) -> jax.Array:
    """Return the number of each code by comparisons: no device has to gather."""
    numbers = [jnp.full(codes.shape, value, jnp.float32) for value in NF4]
    return jax.lax.select_n(codes.astype(jnp.int32), *numbers)
