# SPDX-License-Identifier: Apache-2.0
"""The forward and backward pass of a stage as graphs, traced and never compiled.

Legend: B sequences of one data rank, L positions, D residual width.
Owns the tracing: the same scans, remat policies and split of residuals from weights
that the runtime compiles, for one data rank's share of a microbatch, so that every
buffer of a program appears here. Does not own sizes or times of what is traced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.costs.graph import Cuts, Dims, Graph, Origin, Value, graph_of
from hetjax.costs.remat import with_remat
from hetjax.costs.runs import Run, StageRuns
from hetjax.models.model import ModuleSpec, apply
from hetjax.plans.plan import Remat


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
    """The passes of a stage; inputs and outputs of the graphs are flat.

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


@dataclass(slots=True)
class _Split:
    """How to put a vjp together again; filled when the forward pass is traced."""

    tree: Any = None
    sources: tuple[int | None, ...] = ()  # index into (params, x) leaves, or saved


def passes(stage: StageRuns, shares: Shares, remat: Remat) -> Passes:
    """Trace the passes of a stage; the loss is part of the last stage's."""
    if stage.last and len(stage.runs) == 1:
        remat = "none"  # the head is never recomputed
    traced = _traced(stage, replace(shares, tensor=1), remat)
    return replace(traced, cuts=replace(traced.cuts, tensor=shares.tensor))


@lru_cache(maxsize=1024)
def _traced(stage: StageRuns, shares: Shares, remat: Remat) -> Passes:
    dims, split = Dims(), _Split()
    params, weights = (
        _abstract_params(stage, shares.dtype),
        _weights(stage, dims, shares),
    )
    inputs = _abstract_inputs(stage, shares)
    given = [_whole(dims, value) for value in inputs]

    def forward(params: Any, x: jax.Array, *targets: jax.Array) -> Any:
        return _forward(stage, remat, split, params, x, *targets)

    forward_graph = graph_of(
        jax.make_jaxpr(forward)(params, *inputs), (*weights, *given), dims
    )
    y, *saved = forward_graph.outputs
    abstract_saved = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in saved]
    abstract_dy = jax.ShapeDtypeStruct(y.shape, y.dtype)

    def backward(params: Any, x: jax.Array, saved: Sequence[Any], dy: Any) -> Any:
        return _backward(split, params, x, saved, dy)

    backward_graph = graph_of(
        jax.make_jaxpr(backward)(params, inputs[0], abstract_saved, abstract_dy),
        (*weights, given[0], *saved, _whole(dims, abstract_dy)),
        dims,
    )
    gradients = backward_graph.outputs[: len(weights)]
    for weight, gradient in zip(weights, gradients, strict=True):
        dims.like(weight, gradient)
    cuts = Cuts(dims=dims, cut=dims.cut_roots(), tensor=shares.tensor)
    return Passes(
        weights=weights, forward=forward_graph, backward=backward_graph, cuts=cuts
    )


def _forward(
    stage: StageRuns,
    remat: Remat,
    split: _Split,
    params: Any,
    x: jax.Array,
    *targets: jax.Array,
) -> Any:
    def of_params(params: Any) -> Any:
        return _output(stage, remat, params, x, *targets)

    def of_both(params: Any, x: jax.Array) -> Any:
        return _output(stage, remat, params, x, *targets)

    if stage.first:  # tokens have no gradient
        (y, _), vjp = jax.vjp(of_params, params)
    else:
        (y, _), vjp = jax.vjp(of_both, params, x)
    leaves, split.tree = jax.tree.flatten(vjp)
    given = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((params, x)))}
    split.sources = tuple(given.get(id(leaf)) for leaf in leaves)
    return y, [leaf for leaf in leaves if id(leaf) not in given]


def _backward(
    split: _Split, params: Any, x: jax.Array, saved: Sequence[jax.Array], dy: jax.Array
) -> Any:
    given, rest = jax.tree.leaves((params, x)), iter(saved)
    leaves = [next(rest) if i is None else given[i] for i in split.sources]
    vjp = jax.tree.unflatten(split.tree, leaves)
    return vjp((dy, jnp.ones((), jnp.float32)))


def _output(
    stage: StageRuns, remat: Remat, params: Any, x: jax.Array, *targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The stage's output (or summed loss) and its auxiliary loss."""
    aux = jnp.zeros((), jnp.float32)
    for index, run in enumerate(stage.runs[:-1] if stage.last else stage.runs):
        x, run_aux = _run_output(stage, remat, run, params[index], params, x)
        aux += run_aux
    if not stage.last:
        return x, aux
    (head,), own = stage.runs[-1].unit, params[len(stage.runs) - 1]
    module_params = _module_params(stage, head, own, params)
    return apply(head, module_params, x, *targets)[0], aux


def _run_output(
    stage: StageRuns, remat: Remat, run: Run, own: Any, params: Any, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def unit(x: jax.Array, own: Any) -> tuple[jax.Array, jax.Array]:
        aux = jnp.zeros((), jnp.float32)
        for spec in run.unit:
            module_params = _module_params(stage, spec, own, params)
            x, module_aux = apply(spec, module_params, x)
            aux += module_aux
        return x, aux

    kept = with_remat(unit, remat, looped=run.stacked)
    if not run.stacked:
        return kept(x, own)
    x, aux = jax.lax.scan(kept, x, own)
    return x, jnp.sum(aux)


def _module_params(
    stage: StageRuns, spec: ModuleSpec, own: Any, params: Any
) -> dict[str, jax.Array]:
    prefix, held = spec.name + ".", dict(stage.tied)
    mine = {
        leaf.removeprefix(prefix): value
        for leaf, value in own.items()
        if leaf.startswith(prefix)
    }
    tied = {name: held[path] for name, path in spec.tied}
    return mine | {name: params[index][leaf] for name, (index, leaf) in tied.items()}


def _abstract_params(stage: StageRuns, dtype: str) -> tuple[dict[str, Any], ...]:
    """One dict per run, then one for borrowed parameters."""

    def stacked(run: Run, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        units = (run.num_units,) if run.stacked else ()
        return jax.ShapeDtypeStruct((*units, *shape), jnp.dtype(dtype))

    own = [
        {leaf: stacked(run, param.shape) for leaf, param in run.params().items()}
        for run in stage.runs
    ]
    borrowed = {
        path: jax.ShapeDtypeStruct(param.shape, jnp.dtype(dtype))
        for path, param in stage.borrowed
    }
    return *own, borrowed


def _weights(stage: StageRuns, dims: Dims, shares: Shares) -> tuple[Value, ...]:
    """The same as values, in the order in which JAX flattens the dicts."""
    held = [(run.num_units * run.stacked, run.params()) for run in stage.runs]
    held.append((0, dict(stage.borrowed)))
    return tuple(
        dims.value(
            (*([units] if units else []), *param.shape),
            jnp.dtype(shares.dtype),
            Origin.WEIGHTS,
            (*([None] if units else []), *param.logical),
        )
        for units, params in held
        for _, param in sorted(params.items())
    )


def _abstract_inputs(
    stage: StageRuns, shares: Shares
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Tokens or the residual stream; of the last stage also targets."""
    shape = (shares.num_sequences, shares.seq_len)
    tokens_BL = jax.ShapeDtypeStruct(shape, jnp.int32)
    x_BLD = jax.ShapeDtypeStruct((*shape, shares.hidden_size), jnp.dtype(shares.dtype))
    inputs = (tokens_BL,) if stage.first else (x_BLD,)
    return (*inputs, tokens_BL) if stage.last else inputs


def _whole(dims: Dims, abstract: jax.ShapeDtypeStruct) -> Value:
    """A value that arrives whole on every tensor rank."""
    logical = (None,) * len(abstract.shape)
    return dims.value(abstract.shape, abstract.dtype, Origin.BATCH, logical)
