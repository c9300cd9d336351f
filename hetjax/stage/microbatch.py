# SPDX-License-Identifier: Apache-2.0
"""Defines the mathematics of one stage on a microbatch, which its data ranks share.

Owns how the functions of one data rank (`function.py`) are mapped over all of them, the
conversion of what arrives, and accumulation. The runtime compiles these.

The batch dim of a microbatch is split over the data axis by an explicit vmap. So
gradients stay separate per data rank, and are summed once per step, not per microbatch.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.mesh.axes import abstract_mesh
from hetjax.models.attention.attention import KERNELS
from hetjax.stage.arrays import compute_dtype
from hetjax.stage.function import (
    Given,
    Residuals,
    Scale,
    StageFunction,
    StageParams,
    head_logits,
    head_loss,
    output,
    rank_forward,
    rank_fused,
    rank_gradients,
    stream,
)


def evaluate(
    function: StageFunction,
    params: StageParams,
    x: Given,
    targets: jax.Array | None = None,
) -> jax.Array:
    """Return the output of a microbatch, or its cross-entropy (last stage)."""
    function = replace(function, held=function.held.validated())

    def rank_output(x: Given, targets: jax.Array | None) -> jax.Array:
        return output(function, params, x, targets)[0]

    targets = None if targets is None else _split(function, targets)
    y = _over_data(function, rank_output)(_arrived(function, params, x), targets)
    return jnp.sum(y) if function.last else _merge(y)


def row_losses(
    function: StageFunction, params: StageParams, x: jax.Array, targets: jax.Array
) -> jax.Array:
    """Return losses_B: cross-entropy of a microbatch's sequences (last stage)."""
    function = replace(function, held=function.held.validated())

    def rank_losses(x: jax.Array, targets: jax.Array) -> jax.Array:
        x = stream(function, params, x)[0]
        head = partial(head_loss, function, params)
        return jax.lax.map(lambda row: head(row[0][None], row[1][None]), (x, targets))

    split = _arrived(function, params, x), _split(function, targets)
    return _merge(_over_data(function, rank_losses)(*split))


def logits(
    function: StageFunction, params: StageParams, given: Given, position: jax.Array
) -> jax.Array:
    """Return logits_V of the last stage for the first sequence at one position."""

    def rank_stream(given: Given) -> jax.Array:
        return stream(function, params, given)[0]

    x = _merge(_over_data(function, rank_stream)(_arrived(function, params, given)))
    x_11D = jax.lax.dynamic_slice_in_dim(x[:1], position, 1, axis=1)
    return head_logits(function, params, x_11D)


def forward(
    function: StageFunction, residuals: Residuals, params: StageParams, x: Given
) -> tuple[jax.Array, list[jax.Array]]:
    """Return the output and the residuals of a stage that is not the last."""
    rank_pass = partial(rank_forward, function, residuals, params)
    y, saved = _over_data(function, rank_pass)(_arrived(function, params, x))
    return _merge(y), saved


def forward_loss(
    function: StageFunction,
    residuals: Residuals,
    params: StageParams,
    x: Given,
    targets: jax.Array,
    loss: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """Return the loss and the residuals of the last stage; `loss` sums over tokens."""
    rank_pass = partial(rank_forward, function, residuals, params)
    split = _arrived(function, params, x), _split(function, targets)
    ce, saved = _over_data(function, rank_pass)(*split)
    return loss + jnp.sum(ce), saved


def backward(
    function: StageFunction,
    residuals: Residuals,
    params: StageParams,
    x: Given,
    saved: list[jax.Array],
    dy: jax.Array,
    scale: Scale,
    acc: StageParams,
) -> tuple[StageParams, jax.Array]:
    """Return fp32 gradient sums (leading dim: data rank) and the input's gradient.

    Tokens have no gradient: for the first stage it is a zero, as an array to wait for.
    """
    dx, grads = gradients(function, residuals, params, x, saved, dy, scale)
    return accumulate(acc, grads), dx


def gradients(
    function: StageFunction,
    residuals: Residuals,
    params: StageParams,
    x: Given,
    saved: list[jax.Array],
    dy: jax.Array | None,
    scale: Scale,
) -> tuple[jax.Array, StageParams]:
    """Return the input's gradient, and those of trained weights, not accumulated.

    The latter are per data rank.
    """

    def gradients_on_rank(x: Given, saved: list[jax.Array], dy: jax.Array | None):
        return rank_gradients(residuals, params, x, saved, dy, scale)

    dy = None if dy is None else _arrived(function, params, dy)
    x = _arrived(function, params, x)
    grads = _over_data(function, gradients_on_rank)(x, saved, dy)
    return _input_gradient(function, grads), grads[0]


def fused(
    function: StageFunction,
    params: StageParams,
    x: Given,
    targets: jax.Array,
    scale: Scale,
    acc: StageParams,
    loss: jax.Array,
) -> tuple[StageParams, jax.Array, jax.Array]:
    """Run forward and backward of the last stage; `loss` accumulates the token sum."""

    def fused_on_rank(x: Given, targets: jax.Array):
        return rank_fused(function, params, x, targets, scale)

    split = _arrived(function, params, x), _split(function, targets)
    ce, grads = _over_data(function, fused_on_rank)(*split)
    dx = _input_gradient(function, grads)
    return accumulate(acc, grads[0]), loss + jnp.sum(ce), dx


def _arrived(function: StageFunction, params: StageParams, given: Any) -> Any:
    """Return what another stage has sent, split over data, in the compute precision.

    This is outside of the differentiated function: gradients sent back have their
    sender's precision.
    """
    dtype = compute_dtype(function.stacks, params)

    def converted(x: jax.Array) -> jax.Array:
        return x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(dtype)

    return _split(function, jax.tree.map(converted, given))


def accumulate(acc: StageParams, grads: StageParams) -> StageParams:
    """Add one microbatch's gradients to the fp32 sums."""
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), acc, grads)


def _over_data(
    function: StageFunction, rank_function: Callable[..., Any]
) -> Callable[..., Any]:
    """Map a function over the leading data dim, or strip and re-add it if it is 1."""

    def single(*arrays: Any) -> Any:
        out = rank_function(*jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: a[None], out)

    several = function.data > 1
    mapped = jax.vmap(rank_function, spmd_axis_name="data") if several else single
    return _knowing_the_mesh(function, mapped)


def _knowing_the_mesh(
    function: StageFunction, mapped: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the function, traced so that attention kernels find their mesh."""
    if function.attention not in KERNELS or function.data * function.tensor == 1:
        return mapped

    def traced(*arrays: Any) -> Any:
        mesh = abstract_mesh(data=function.data, tensor=function.tensor)
        with jax.sharding.use_abstract_mesh(mesh):
            return mapped(*arrays)

    return traced


def _input_gradient(function: StageFunction, grads: tuple[Any, ...]) -> jax.Array:
    return jnp.zeros((), jnp.float32) if function.first else _merge(grads[1])


def _split(function: StageFunction, given: Any) -> Any:
    num = function.data
    return jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), given)


def _merge(y: jax.Array) -> jax.Array:
    return y.reshape(y.shape[0] * y.shape[1], *y.shape[2:])
