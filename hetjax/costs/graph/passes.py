# SPDX-License-Identifier: Apache-2.0
"""The passes of a stage as graphs, traced and never compiled.

Legend: B sequences of one data rank, L positions, D residual width.
Owns the tracing of the functions that the runtime compiles, for one data rank's share
of a microbatch, so that every buffer of a program appears here; and that stages which
differ in their numbers of units alone are traced once. Does not own these functions
(`hetjax/stage/`) nor sizes or times of what is traced.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import chain, compress, count
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from hetjax.cluster.catalogue import Precision
from hetjax.costs.graph.sizes import Sizes
from hetjax.costs.graph.values import Cuts, Dims, Graph, Origin, Value, graph_of
from hetjax.models.model import AbstractParam
from hetjax.plans.plan import AttentionForm, Remat
from hetjax.stage.backward_split import split_backward
from hetjax.stage.function import (
    Packed,
    Residuals,
    StageFunction,
    rank_forward,
    rank_gradients,
)
from hetjax.stage.jaxprs import ClosedJaxpr
from hetjax.stage.partition import BlockStack, StageStacks

# from where primes are sought that stand for numbers in traces; sequences times
# positions still have indices of 32 bits
_MANY_SEQUENCES, _MANY_UNITS = 10_001, 1_000_003


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """What one device computes of a microbatch: a data rank's sequences, a tensor
    rank's part of the cut dims; `dtype` is that of compute, `attention` its form (None:
    as modules say), `packed` whether sequences are of several documents."""

    num_sequences: int
    seq_len: int
    hidden_size: int
    dtype: Precision
    tensor: int
    attention: AttentionForm | None = None
    packed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Forward and backward of a stage; inputs and outputs of the graphs are flat.

    `forward`: weights, input (where packed, also documents; of the last stage also
    targets) -> output or loss, *saved. `backward`: weights, input, *saved, output's
    gradient -> gradients of those that are trained and, unless the stage is the first,
    the input's. They share the saved values.
    """

    weights: tuple[Value, ...]
    trained: tuple[Value, ...]
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
    trained: tuple[Value, ...]
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


_PassesT = TypeVar("_PassesT", Passes, SplitPasses)


def passes(stage: StageStacks, shares: Shares, remat: Remat) -> Passes:
    """Trace the passes of a stage; the loss is part of the last stage's."""
    traced = _traced(stage, _traced_as(shares), _remat(stage, remat))
    return replace(traced, cuts=replace(traced.cuts, tensor=shares.tensor))


def split_passes(stage: StageStacks, shares: Shares, remat: Remat) -> SplitPasses:
    """The same with the backward split; takes many times as long to trace."""
    traced = _split_traced(stage, _traced_as(shares), _remat(stage, remat))
    return replace(traced, cuts=replace(traced.cuts, tensor=shares.tensor))


def _traced_as(shares: Shares) -> Shares:
    """The shares that are traced in place of these: a tensor rank's operations are
    those of the whole."""
    return replace(shares, tensor=1)


def _remat(stage: StageStacks, remat: Remat) -> Remat:
    """The head is never recomputed."""
    called = [stack for stack in stage.stacks if stack.only is None]
    return "none" if stage.last and len(called) == 1 else remat


@lru_cache(maxsize=1024)
def _traced(stage: StageStacks, shares: Shares, remat: Remat) -> Passes:
    alike, units = _by_primes(stage, shares)
    return _sized(_traced_alike(alike, shares, remat), Sizes(units))


@lru_cache(maxsize=1024)
def _traced_alike(stage: StageStacks, shares: Shares, remat: Remat) -> Passes:
    """The same of a stage with primes for its units.

    The first stage's gradients of positions are not summed over one sequence. Other
    sums over one are traced, and cost nothing.
    """
    if stage.first and shares.num_sequences == 1:
        return _passes_of(stage, shares, remat)
    alike, sequences = _by_prime(stage, shares)
    return _sized(_passes_of(stage, alike, remat), Sizes(sequences))


def _sized(found: _PassesT, sizes: Sizes) -> _PassesT:
    """The passes with numbers in place of the primes that they were traced with."""

    def sized(part: Any) -> Any:
        if isinstance(part, Graph):
            return sizes.graph(part)
        return sizes.values(part) if isinstance(part, tuple) else part

    return replace(
        found, **{part.name: sized(getattr(found, part.name)) for part in fields(found)}
    )


@lru_cache(maxsize=1024)
def _passes_of(stage: StageStacks, shares: Shares, remat: Remat) -> Passes:
    graphs = _Graphs.from_stage(stage, shares, remat)
    dims, trained = graphs.dims, graphs.trained
    backward = graph_of(_backward(stage, shares, remat), graphs.inputs, dims)
    _cut_alike(dims, trained, backward.outputs[: len(trained)])
    return Passes(
        weights=graphs.weights,
        trained=trained,
        forward=graphs.forward,
        backward=backward,
        cuts=Cuts(dims=dims, cut=dims.cut_roots(), tensor=shares.tensor),
    )


@lru_cache(maxsize=256)
def _split_traced(stage: StageStacks, shares: Shares, remat: Remat) -> SplitPasses:
    alike, units = _by_primes(stage, shares)
    return _sized(_split_traced_alike(alike, shares, remat), Sizes(units))


@lru_cache(maxsize=256)
def _split_traced_alike(
    stage: StageStacks, shares: Shares, remat: Remat
) -> SplitPasses:
    if shares.num_sequences == 1:  # nothing is summed over it
        return _split_passes_of(stage, shares, remat)
    alike, sequences = _by_prime(stage, shares)
    return _sized(_split_passes_of(stage, alike, remat), Sizes(sequences))


@lru_cache(maxsize=256)
def _split_passes_of(stage: StageStacks, shares: Shares, remat: Remat) -> SplitPasses:
    graphs = _Graphs.from_stage(stage, shares, remat)
    dims, trained = graphs.dims, graphs.trained
    halves = _halves(stage, shares, remat)
    first = graph_of(halves.first, graphs.inputs, dims)
    kept = tuple(graphs.inputs[i] for i in halves.kept)
    second = graph_of(halves.second, (*kept, *first.outputs[1:]), dims)
    _cut_alike(dims, trained, second.outputs)
    return SplitPasses(
        weights=graphs.weights,
        trained=trained,
        forward=graphs.forward,
        input_gradient=first,
        weight_gradient=second,
        kept=kept,
        cuts=Cuts(dims=dims, cut=dims.cut_roots(), tensor=shares.tensor),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graphs:
    """What both kinds of backward have in common; `inputs` are the backward's."""

    dims: Dims
    weights: tuple[Value, ...]
    trained: tuple[Value, ...]
    forward: Graph
    inputs: tuple[Value, ...]

    @classmethod
    def from_stage(cls, stage: StageStacks, shares: Shares, remat: Remat) -> "_Graphs":
        traced, dims = _forward(stage, shares, remat), Dims()
        weights = _weights(stage, dims, shares)
        x, *targets = (
            jax.tree.map(partial(_whole, dims), jax.tree.leaves(given))
            for given in _abstract_inputs(stage, shares)
        )
        forward = graph_of(traced.jaxpr, (*weights, *x, *chain(*targets)), dims)
        dy = _whole(dims, traced.abstract[-1])
        inputs = (*weights, *x, *forward.outputs[1:], dy)
        is_trained = [param.trained for _, param in _in_order(stage)]
        return cls(
            dims=dims,
            weights=weights,
            trained=tuple(compress(weights, is_trained)),
            forward=forward,
            inputs=inputs,
        )


def _by_primes(
    stage: StageStacks, shares: Shares
) -> tuple[StageStacks, dict[int, int]]:
    """The stage with a prime for the units of each stack of several, which divides no
    size of the stage; and the numbers that they stand for.

    Stages that differ in these numbers alone have one trace: no operation is another
    for them, and a prime is found again in every size that it is a factor of.
    """
    primes = _primes_for(_sizes(stage, shares), _MANY_UNITS)
    stacks, units = [], {}
    for stack in stage.stacks:
        if stack.stacked:
            prime = next(primes)
            units[prime] = stack.num_units
            stack = replace(stack, num_units=prime)
        stacks.append(stack)
    return replace(stage, stacks=tuple(stacks)), units


def _by_prime(stage: StageStacks, shares: Shares) -> tuple[Shares, dict[int, int]]:
    """The same for sequences. But a head cuts its tokens by how many there are."""
    if stage.last:
        return shares, {}
    prime = next(_primes_for(_sizes(stage, shares), _MANY_SEQUENCES))
    return replace(shares, num_sequences=prime), {prime: shares.num_sequences}


def _sizes(stage: StageStacks, shares: Shares) -> set[int]:
    shapes = [p.shape for stack in stage.stacks for p in stack.leaves().values()]
    return {shares.num_sequences, shares.seq_len, shares.hidden_size}.union(*shapes)


def _primes_for(sizes: Collection[int], least: int) -> Iterator[int]:
    """Primes from an odd number below two millions on that divide none of the sizes."""
    primes = (n for n in count(least, 2) if all(n % d for d in range(3, 1_500, 2)))
    return (p for p in primes if all(size % p for size in sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Forward:
    """A traced forward, its backward's function, and what that is called with:
    weights, input, saved, output's gradient."""

    jaxpr: ClosedJaxpr
    gradients: Any
    abstract: tuple[Any, ...]


@lru_cache(maxsize=1024)
def _forward(stage: StageStacks, shares: Shares, remat: Remat) -> _Forward:
    residuals = Residuals()
    params, arrays = _abstract_params(stage, shares), _abstract_inputs(stage, shares)
    stage_function = StageFunction(
        stage, remat, attention=shares.attention, packed=shares.packed
    )
    function = partial(rank_forward, stage_function, residuals)
    jaxpr, (y, saved) = jax.make_jaxpr(function, return_shape=True)(params, *arrays)
    return _Forward(
        jaxpr=jaxpr,
        gradients=partial(rank_gradients, residuals),
        abstract=(params, arrays[0], saved, y),
    )


@lru_cache(maxsize=1024)
def _backward(stage: StageStacks, shares: Shares, remat: Remat) -> ClosedJaxpr:
    forward = _forward(stage, shares, remat)
    return jax.make_jaxpr(forward.gradients)(*forward.abstract)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Halves:
    """The traced halves of a backward; the second is given `kept` of the inputs."""

    first: ClosedJaxpr
    second: ClosedJaxpr
    kept: tuple[int, ...]


@lru_cache(maxsize=256)
def _halves(stage: StageStacks, shares: Shares, remat: Remat) -> _Halves:
    forward = _forward(stage, shares, remat)
    leaves, tree = jax.tree.flatten(forward.abstract)

    def gradients(*leaves: Any) -> list[Any]:
        made = forward.gradients(*jax.tree.unflatten(tree, leaves))
        dx = made[1:] or (jnp.zeros((), jnp.float32),)
        return jax.tree.leaves((dx, made[0]))

    split = split_backward(gradients, 1, leaves)
    first, made = jax.make_jaxpr(split.first, return_shape=True)(*leaves)
    second = jax.make_jaxpr(split.second)([leaves[i] for i in split.kept], made[1])
    return _Halves(first=first, second=second, kept=tuple(split.kept))


def _cut_alike(
    dims: Dims, weights: Sequence[Value], gradients: Sequence[Value]
) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        dims.like(weight, gradient)


def _abstract_params(stage: StageStacks, shares: Shares) -> tuple[dict[str, Any], ...]:
    """Compute weights, one dict per stack, whatever cuts them."""
    return tuple(
        {
            leaf: jax.ShapeDtypeStruct(stack.shape(param), param.held_in(shares.dtype))
            for leaf, param in stack.leaves().items()
        }
        for stack in stage.stacks
    )


def _weights(stage: StageStacks, dims: Dims, shares: Shares) -> tuple[Value, ...]:
    """The same as values, in the order in which JAX flattens the dicts."""
    return tuple(
        dims.value(
            stack.shape(param),
            param.held_in(shares.dtype),
            Origin.WEIGHTS,
            (*(None,) * stack.stacked, *param.logical),
        )
        for stack, param in _in_order(stage)
    )


def _in_order(stage: StageStacks) -> Iterator[tuple[BlockStack, AbstractParam]]:
    for stack in stage.stacks:
        for _, param in sorted(stack.leaves().items(), key=lambda each: each[0]):
            yield stack, param


def _abstract_inputs(stage: StageStacks, shares: Shares) -> tuple[Any, ...]:
    """Tokens or the residual stream, packed or not; of the last stage also targets."""
    shape = (shares.num_sequences, shares.seq_len)
    tokens_BL = jax.ShapeDtypeStruct(shape, jnp.int32)
    x_BLD = jax.ShapeDtypeStruct((*shape, shares.hidden_size), jnp.dtype(shares.dtype))
    x: Any = tokens_BL if stage.first else x_BLD
    given = Packed(x, tokens_BL) if shares.packed else x
    return (given, tokens_BL) if stage.last else (given,)


def _whole(dims: Dims, abstract: Any) -> Value:
    """A value that arrives whole on every tensor rank."""
    logical = (None,) * len(abstract.shape)
    return dims.value(abstract.shape, abstract.dtype, Origin.BATCH, logical)
