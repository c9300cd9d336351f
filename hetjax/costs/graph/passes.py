# SPDX-License-Identifier: Apache-2.0
"""The passes of a stage as graphs, traced and never compiled.

Legend: B sequences of one data rank, L positions, D residual width.
Owns the tracing of the functions that the runtime compiles, for one data rank's share
of a microbatch, so that every buffer of a program appears here. Does not own these
functions (`hetjax/stage/`) nor sizes or times of what is traced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.costs.graph.values import Cuts, Dims, Graph, Origin, Value, graph_of
from hetjax.plans.plan import Remat
from hetjax.stage.backward_split import split_backward
from hetjax.stage.function import (
    Residuals,
    StageFunction,
    rank_forward,
    rank_gradients,
)
from hetjax.stage.partition import StageStacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """What one device computes of a microbatch: a data rank's sequences, a tensor
    rank's part of the cut dims; `dtype` is that of compute."""

    num_sequences: int
    seq_len: int
    hidden_size: int
    dtype: str
    tensor: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Forward and backward of a stage; inputs and outputs of the graphs are flat.

    `forward`: weights, input (of the last stage also targets) -> output or loss,
    *saved. `backward`: weights, input, *saved, output's gradient -> weight gradients
    and, unless the stage is the first, the input's. They share the saved values.
    """

    weights: tuple[Value, ...]
    forward: Graph
    backward: Graph
    cuts: Cuts

    @property
    def saved(self) -> tuple[Value, ...]:
        """The residuals: what the backward pass needs besides weights and input."""
        return self.forward.outputs[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPasses:
    """The same with the backward split in I and W, I's inputs those of the backward.

    `input_gradient` gives the input's gradient (of the first stage a zero) and what
    crosses to W; `weight_gradient`: `kept` of the inputs, crossing values -> weight
    gradients.
    """

    weights: tuple[Value, ...]
    forward: Graph
    input_gradient: Graph
    weight_gradient: Graph
    kept: tuple[Value, ...]
    cuts: Cuts

    @property
    def saved(self) -> tuple[Value, ...]:
        """The residuals, as of whole passes."""
        return self.forward.outputs[1:]

    @property
    def crossing(self) -> tuple[Value, ...]:
        """What I makes for W."""
        return self.input_gradient.outputs[1:]


def passes(stage: StageStacks, shares: Shares, remat: Remat) -> Passes:
    """Trace the passes of a stage; the loss is part of the last stage's."""
    traced = _traced(stage, replace(shares, tensor=1), _remat(stage, remat))
    return replace(traced, cuts=replace(traced.cuts, tensor=shares.tensor))


def split_passes(stage: StageStacks, shares: Shares, remat: Remat) -> SplitPasses:
    """The same with the backward split; takes many times as long to trace."""
    traced = _split_traced(stage, replace(shares, tensor=1), _remat(stage, remat))
    return replace(traced, cuts=replace(traced.cuts, tensor=shares.tensor))


def _remat(stage: StageStacks, remat: Remat) -> Remat:
    """The head is never recomputed."""
    called = [stack for stack in stage.stacks if stack.only is None]
    return "none" if stage.last and len(called) == 1 else remat


@lru_cache(maxsize=1024)
def _traced(stage: StageStacks, shares: Shares, remat: Remat) -> Passes:
    tracing = _forward_traced(stage, shares, remat)
    weights, dims = tracing.weights, tracing.dims
    backward = graph_of(
        jax.make_jaxpr(tracing.gradients)(*tracing.abstract), tracing.inputs, dims
    )
    _cut_alike(dims, weights, backward.outputs[: len(weights)])
    return Passes(
        weights=weights,
        forward=tracing.forward,
        backward=backward,
        cuts=Cuts(dims=dims, cut=dims.cut_roots(), tensor=shares.tensor),
    )


@lru_cache(maxsize=256)
def _split_traced(stage: StageStacks, shares: Shares, remat: Remat) -> SplitPasses:
    tracing = _forward_traced(stage, shares, remat)
    weights, dims = tracing.weights, tracing.dims
    leaves, tree = jax.tree.flatten(tracing.abstract)

    def gradients(*leaves: Any) -> list[Any]:
        made = tracing.gradients(*jax.tree.unflatten(tree, leaves))
        dx = made[1:] or (jnp.zeros((), jnp.float32),)
        return jax.tree.leaves((dx, made[0]))

    split = split_backward(gradients, 1, leaves)
    traced, made = jax.make_jaxpr(split.first, return_shape=True)(*leaves)
    first = graph_of(traced, tracing.inputs, dims)
    kept = tuple(tracing.inputs[i] for i in split.kept)
    second = graph_of(
        jax.make_jaxpr(split.second)([leaves[i] for i in split.kept], made[1]),
        (*kept, *first.outputs[1:]),
        dims,
    )
    _cut_alike(dims, weights, second.outputs)
    return SplitPasses(
        weights=weights,
        forward=tracing.forward,
        input_gradient=first,
        weight_gradient=second,
        kept=kept,
        cuts=Cuts(dims=dims, cut=dims.cut_roots(), tensor=shares.tensor),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tracing:
    """A traced forward, and what its backward is to be traced with.

    `abstract` are the backward's arguments (weights, input, saved, output's gradient),
    `inputs` the values of their leaves.
    """

    dims: Dims
    weights: tuple[Value, ...]
    forward: Graph
    gradients: Any
    abstract: tuple[Any, ...]
    inputs: tuple[Value, ...]


def _forward_traced(stage: StageStacks, shares: Shares, remat: Remat) -> _Tracing:
    dims, residuals = Dims(), Residuals()
    weights, params = _weights(stage, dims, shares), _abstract_params(stage, shares)
    arrays = _abstract_inputs(stage, shares)
    given = tuple(_whole(dims, array) for array in arrays)
    function = partial(rank_forward, StageFunction(stage, remat), residuals)
    traced, (y, saved) = jax.make_jaxpr(function, return_shape=True)(params, *arrays)
    forward = graph_of(traced, (*weights, *given), dims)
    return _Tracing(
        dims=dims,
        weights=weights,
        forward=forward,
        gradients=partial(rank_gradients, residuals),
        abstract=(params, arrays[0], saved, y),
        inputs=(*weights, given[0], *forward.outputs[1:], _whole(dims, y)),
    )


def _cut_alike(
    dims: Dims, weights: Sequence[Value], gradients: Sequence[Value]
) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        dims.like(weight, gradient)


def _abstract_params(stage: StageStacks, shares: Shares) -> tuple[dict[str, Any], ...]:
    """Compute weights, one dict per stack, whatever cuts them."""
    return tuple(
        {
            leaf: jax.ShapeDtypeStruct(stack.shape(param), jnp.dtype(shares.dtype))
            for leaf, param in stack.leaves().items()
        }
        for stack in stage.stacks
    )


def _weights(stage: StageStacks, dims: Dims, shares: Shares) -> tuple[Value, ...]:
    """The same as values, in the order in which JAX flattens the dicts."""
    return tuple(
        dims.value(
            stack.shape(param),
            jnp.dtype(shares.dtype),
            Origin.WEIGHTS,
            (*(None,) * stack.stacked, *param.logical),
        )
        for stack in stage.stacks
        for _, param in sorted(stack.leaves().items())
    )


def _abstract_inputs(
    stage: StageStacks, shares: Shares
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Tokens or the residual stream; of the last stage also targets."""
    shape = (shares.num_sequences, shares.seq_len)
    tokens_BL = jax.ShapeDtypeStruct(shape, jnp.int32)
    x_BLD = jax.ShapeDtypeStruct((*shape, shares.hidden_size), jnp.dtype(shares.dtype))
    inputs = (tokens_BL,) if stage.first else (x_BLD,)
    return (*inputs, tokens_BL) if stage.last else inputs


def _whole(dims: Dims, abstract: Any) -> Value:
    """A value that arrives whole on every tensor rank."""
    logical = (None,) * len(abstract.shape)
    return dims.value(abstract.shape, abstract.dtype, Origin.BATCH, logical)
