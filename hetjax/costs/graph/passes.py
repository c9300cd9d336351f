# SPDX-License-Identifier: Apache-2.0
"""Traces the passes of a stage as graphs, without compiling them.

Legend: B sequences of one data rank, L positions, D residual width.
Owns the tracing of the functions that the runtime compiles, for one data rank's share
of a microbatch, so that every buffer of a program appears here; and the single trace of
stages that differ only in their numbers of units. Does not own these functions
(`hetjax/stage/`) nor sizes or times of the traced arrays.
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

# where the search for primes that stand for numbers in traces starts; indices of
# sequences times positions still fit 32 bits
_MANY_SEQUENCES, _MANY_UNITS = 10_001, 1_000_003


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """One device's part of a microbatch: a data rank's sequences, and a tensor rank's
    part of the cut dims. `dtype` is that of compute, `attention` its form (None: the
    modules' form), `packed` whether sequences consist of several documents."""

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

    `forward`: weights, input (if packed, also documents; on the last stage, also
    targets) -> output or loss, *saved. `backward`: weights, input, *saved, output's
    gradient -> gradients of the trained weights and, unless the stage is the first,
    the input's. Both graphs share the saved values.
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
    """`Passes` with the backward split into I and W; I has the backward's inputs.

    `input_gradient` returns the input's gradient (on the first stage a zero) and the
    values that cross to W. `weight_gradient`: `kept` of the inputs, crossing values ->
    weight gradients.
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
        """The residuals, as in `Passes`."""
        return self.forward.outputs[1:]

    @property
    def crossing(self) -> tuple[Value, ...]:
        """The values that I computes for W."""
        return self.input_gradient.outputs[1:]


_PassesT = TypeVar("_PassesT", Passes, SplitPasses)


def passes(stage: StageStacks, shares: Shares, remat: Remat) -> Passes:
    """Trace the passes of a stage; those of the last stage include the loss."""
    traced = _traced(stage, _traced_as(shares), _remat(stage, remat))
    return replace(traced, cuts=replace(traced.cuts, tensor=shares.tensor))


def split_passes(stage: StageStacks, shares: Shares, remat: Remat) -> SplitPasses:
    """Trace the passes with a split backward, which takes many times as long."""
    traced = _split_traced(stage, _traced_as(shares), _remat(stage, remat))
    return replace(traced, cuts=replace(traced.cuts, tensor=shares.tensor))


def _traced_as(shares: Shares) -> Shares:
    """Return the shares to trace instead: a tensor rank's operations are those of the
    whole."""
    return replace(shares, tensor=1)


def _remat(stage: StageStacks, remat: Remat) -> Remat:
    """Return the stage's remat; the head is never recomputed."""
    called = [stack for stack in stage.stacks if stack.only is None]
    return "none" if stage.last and len(called) == 1 else remat


@lru_cache(maxsize=1024)
def _traced(stage: StageStacks, shares: Shares, remat: Remat) -> Passes:
    alike, units = _by_primes(stage, shares)
    return _sized(_traced_alike(alike, shares, remat), Sizes(units))


@lru_cache(maxsize=1024)
def _traced_alike(stage: StageStacks, shares: Shares, remat: Remat) -> Passes:
    """Trace a stage whose numbers of units are primes.

    With one sequence, the first stage does not sum its gradients of positions over
    sequences: that case has its own trace. Other sums over one sequence are traced, and
    cost nothing.
    """
    if stage.first and shares.num_sequences == 1:
        return _passes_of(stage, shares, remat)
    alike, sequences = _by_prime(stage, shares)
    return _sized(_passes_of(stage, alike, remat), Sizes(sequences))


def _sized(found: _PassesT, sizes: Sizes) -> _PassesT:
    """Return the passes with numbers in place of the primes in their trace."""

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
    if shares.num_sequences == 1:  # no sums over sequences
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
    """The common part of both kinds of backward; `inputs` are the backward's."""

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
    """Return the stage with a prime as the number of units of each stack of several,
    and the numbers that the primes stand for. The primes divide no size of the stage.

    Stages that differ only in these numbers share one trace: they have the same
    operations, and a prime is recognised in every size of which it is a factor.
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
    """Return shares with a prime as the number of sequences, and what it stands for;
    unchanged with a head, which splits its tokens depending on their number."""
    if stage.last:
        return shares, {}
    prime = next(_primes_for(_sizes(stage, shares), _MANY_SEQUENCES))
    return replace(shares, num_sequences=prime), {prime: shares.num_sequences}


def _sizes(stage: StageStacks, shares: Shares) -> set[int]:
    shapes = [p.shape for stack in stage.stacks for p in stack.leaves().values()]
    return {shares.num_sequences, shares.seq_len, shares.hidden_size}.union(*shapes)


def _primes_for(sizes: Collection[int], least: int) -> Iterator[int]:
    """Yield primes from `least` on, odd and below two million, that divide no size."""
    primes = (n for n in count(least, 2) if all(n % d for d in range(3, 1_500, 2)))
    return (p for p in primes if all(size % p for size in sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Forward:
    """A traced forward, its backward's function, and the abstract arguments of that
    function: weights, input, saved, output's gradient."""

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
    """The traced halves of a backward; the second gets `kept` of the inputs."""

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
    """Return the compute weights, one dict per stack, not sharded."""
    return tuple(
        {
            leaf: jax.ShapeDtypeStruct(stack.shape(param), param.held_in(shares.dtype))
            for leaf, param in stack.leaves().items()
        }
        for stack in stage.stacks
    )


def _weights(stage: StageStacks, dims: Dims, shares: Shares) -> tuple[Value, ...]:
    """Return the compute weights as values, in JAX's order of flattened dicts."""
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
    """Return tokens or the residual stream, packed or not; for the last stage also
    targets."""
    shape = (shares.num_sequences, shares.seq_len)
    tokens_BL = jax.ShapeDtypeStruct(shape, jnp.int32)
    x_BLD = jax.ShapeDtypeStruct((*shape, shares.hidden_size), jnp.dtype(shares.dtype))
    x: Any = tokens_BL if stage.first else x_BLD
    given = Packed(x, tokens_BL) if shares.packed else x
    return (given, tokens_BL) if stage.last else (given,)


def _whole(dims: Dims, abstract: Any) -> Value:
    """Return a value that arrives whole on every tensor rank."""
    logical = (None,) * len(abstract.shape)
    return dims.value(abstract.shape, abstract.dtype, Origin.BATCH, logical)
