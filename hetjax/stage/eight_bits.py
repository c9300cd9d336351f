# SPDX-License-Identifier: Apache-2.0
"""Holds an optimizer's moments in 8 bits between two updates of a parameter.

As in Dettmers et al. (arXiv 2110.02861), a moment is stored in blocks. Each has an fp32
scale, its largest magnitude, and for each value a code for its share of the scale. Here
a block is a row along a dim that no stage cuts, so that no cut changes a code. Codes
stand for fourth powers: steps are fine near 0, as theirs are, and two square roots find
a code, whereas a table of codes would need a search.

Owns the codes, the blocks and the state that holds them. Does not own which moments a
rule has, nor their mark (`hetjax/optimizers/`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.mesh.axes import tensor_dim
from hetjax.models.model import AbstractParam
from hetjax.optimizers.moments import Moment

LEAST_SIZE = 4096  # elements: smaller parameters stay in fp32, as in the paper
LEAST_ROW = 16  # elements: parameters with shorter rows stay in fp32, too
_MOST_SIGNED = 127
_MOST_UNSIGNED = 256  # of 1 to 256: a mean of squares never rounds to 0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "exact"],
    meta_fields=["signed"],
)
@dataclass(frozen=True, slots=True)
class HeldMoment:
    """A moment as it is held, by leaf.

    Codes are shaped like the parameter, and each of its rows has a scale. Leaves that
    are too small for codes are `exact`.
    """

    codes: dict[str, Any]
    scales: dict[str, Any]
    exact: dict[str, Any]
    signed: bool


def held(state: Any, parameters: Mapping[str, AbstractParam]) -> Any:
    """Return the state of one unit with its moments in 8 bits; traceable."""
    rows = {leaf: row_dim(param) for leaf, param in parameters.items()}

    def held_moment(node: Any) -> Any:
        return _held(node, rows) if isinstance(node, Moment) else node

    return jax.tree.map(
        held_moment, state, is_leaf=lambda node: isinstance(node, Moment)
    )


def seen(state: Any) -> Any:
    """Return the state with its moments in fp32, as the rule sees it; traceable."""

    def moment_seen(node: Any) -> Any:
        return _seen(node) if isinstance(node, HeldMoment) else node

    return jax.tree.map(moment_seen, state, is_leaf=_is_held)


def has_codes(state: Any) -> bool:
    """Return whether any moment of the state is held in 8 bits."""
    return any(map(_is_held, jax.tree.leaves(state, is_leaf=_is_held)))


def row_dim(param: AbstractParam) -> int | None:
    """Return the dim of a parameter along which rows of its moments lie; None: exact.

    The longest dim that tensor ranks do not cut. Data ranks cut the same dim as tensor
    ranks do. If tensor ranks cut none, data ranks cut the first dim that can be cut:
    rows are then along the last.
    """
    shape, cut = param.shape, tensor_dim(param.logical)
    if len(shape) < 2 or math.prod(shape) < LEAST_SIZE:
        return None
    uncut = [dim for dim in range(len(shape)) if dim != cut]
    found = uncut[-1] if cut is None else max(uncut, key=lambda dim: shape[dim])
    return found if shape[found] >= LEAST_ROW else None


def encode(values: jax.Array, dim: int, *, signed: bool) -> tuple[Any, Any]:
    """Return (codes, scales of rows along the dim): the nearest code of every value."""
    sizes = jnp.abs(values)
    scales = jnp.max(sizes, axis=dim, keepdims=True)
    shares = jnp.where(scales > 0, sizes / jnp.where(scales > 0, scales, 1), 0)
    if signed:
        codes = _nearest(shares, 0, _MOST_SIGNED) * jnp.sign(values)
        return codes.astype(jnp.int8), scales
    codes = _nearest(shares, 1, _MOST_UNSIGNED)
    return (codes - 1).astype(jnp.uint8), scales


def decode(codes: jax.Array, scales: jax.Array, *, signed: bool) -> jax.Array:
    """Return the fp32 values that codes stand for."""
    numbers = codes.astype(jnp.float32)
    if signed:
        return jnp.sign(numbers) * _share(numbers, _MOST_SIGNED) * scales
    return _share(numbers + 1, _MOST_UNSIGNED) * scales


def _nearest(shares: jax.Array, least: int, most: int) -> jax.Array:
    """Return the number in least..most of the nearest share; shares are from 0 to 1."""
    root = jnp.sqrt(jnp.sqrt(shares))
    low = jnp.clip(jnp.floor(root * most), least, most - 1)
    middle = (_share(low, most) + _share(low + 1, most)) * 0.5
    return low + (shares > middle).astype(jnp.float32)


def _share(number: jax.Array, most: int) -> jax.Array:
    """Return the share of its row's scale that a number stands for."""
    root = number * (1 / most)
    square = root * root
    return square * square


def _held(moment: Moment, rows: Mapping[str, int | None]) -> HeldMoment:
    codes, scales, exact = {}, {}, {}
    for leaf, value in moment.values.items():
        if (dim := rows[leaf]) is None:
            exact[leaf] = value
        else:
            codes[leaf], scales[leaf] = encode(value, dim, signed=moment.signed)
    return HeldMoment(codes, scales, exact, moment.signed)


def _seen(moment: HeldMoment) -> Moment:
    found = {
        leaf: decode(codes, moment.scales[leaf], signed=moment.signed)
        for leaf, codes in moment.codes.items()
    }
    return Moment(moment.exact | found, moment.signed)


def _is_held(node: Any) -> bool:
    return isinstance(node, HeldMoment)
