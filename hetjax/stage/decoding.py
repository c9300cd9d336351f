# SPDX-License-Identifier: Apache-2.0
"""Defines the mathematics of one stage that continues texts, from its modules' state.

Owns how a stage's stacks continue, and the layout of their state: by stack and module,
with texts on dim 0, then the units of a stack. All texts of a batch continue by the
same number of positions. Does not own the modules (`hetjax/models/decoding.py`), nor
compiled programs (`hetjax/runtime/execution/text_programs.py`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.models.decoding import continued, room
from hetjax.stage.arrays import compute_dtype
from hetjax.stage.function import (
    StageFunction,
    StageParams,
    called_stacks,
    head_logits,
    params_of,
)
from hetjax.stage.partition import BlockStack

Kept = tuple[Any, ...]  # by stack, then by module


def rooms(
    function: StageFunction, params: StageParams, num_texts: int, num_positions: int
) -> Kept:
    """Return room for the state of `num_texts` texts of `num_positions` positions."""

    def of_unit(stack: BlockStack, own: dict[str, jax.Array]) -> Kept:
        return tuple(
            room(module, params_of(function, module, own, params), num_positions)
            for module in stack.unit
        )

    def of_stack(stack: BlockStack, own: dict[str, jax.Array]) -> Kept:
        if not stack.stacked:
            return of_unit(stack, own)
        return jax.vmap(lambda own: of_unit(stack, own))(own)

    one = tuple(of_stack(*called) for called in called_stacks(function, params)[0])
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (num_texts, *a.shape)), one)


def decode(
    function: StageFunction,
    params: StageParams,
    x: jax.Array,
    kept: Kept,
    start: jax.Array,
) -> tuple[jax.Array, Kept]:
    """Return the residual stream from position `start` on, and the new state.

    A stage with the head returns the stream that the head receives.
    """
    if not function.first:
        x = x.astype(compute_dtype(function.stacks, params))

    def decode_text(x: jax.Array, kept: Kept) -> tuple[jax.Array, Kept]:
        x, found = x[None], list[Any]()
        stacks = called_stacks(function, params)[0]
        for (stack, own), before in zip(stacks, kept, strict=True):
            x, after = _through(function, stack, own, params, x, before, start)
            found.append(after)
        return x[0], tuple(found)

    return _per_text(decode_text, x.shape[0])(x, kept)


def logits_after(
    function: StageFunction, params: StageParams, x_BLD: jax.Array, at: jax.Array
) -> jax.Array:
    """Return logits_V of the first text after one of these positions (last stage)."""
    x_11D = jax.lax.dynamic_slice_in_dim(x_BLD[:1], at, 1, axis=1)
    return head_logits(function, params, x_11D)


def _through(
    function: StageFunction,
    stack: BlockStack,
    own: dict[str, jax.Array],
    params: StageParams,
    x: jax.Array,
    kept: Kept,
    start: jax.Array,
) -> tuple[jax.Array, Kept]:
    def unit(x: jax.Array, given: tuple[Any, Kept]) -> tuple[jax.Array, Kept]:
        own, before = given
        found = list[Any]()
        for module, of_module in zip(stack.unit, before, strict=True):
            of_own = params_of(function, module, own, params)
            x, after = continued(module, of_own, x, of_module, start)
            found.append(after)
        return x, tuple(found)

    if not stack.stacked:
        return unit(x, (own, kept))
    return jax.lax.scan(unit, x, (own, kept))


def _per_text(text_function: Callable[..., Any], num_texts: int) -> Callable[..., Any]:
    """Map `text_function` over the leading dim of its arrays, which numbers texts."""
    if num_texts > 1:
        return jax.vmap(text_function)

    def single(*arrays: Any) -> Any:
        found = text_function(*jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: a[None], found)

    return single
