# SPDX-License-Identifier: Apache-2.0
"""The mathematics of one stage as pure functions, before any compilation.

Owns how a stage calls its runs (scan, remat, tied parameters, loss) and how its
vector-Jacobian product is cut into a forward and a backward function whose residuals
hold neither weights nor the stage input. Does not own meshes or compiled programs
(`programs.py`).

The batch dim of a microbatch is split over the data axis by an explicit vmap, so that
gradients stay apart per data rank and are summed once per step, not per microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.costs.remat import with_remat
from hetjax.models.model import ModuleSpec, apply, bind
from hetjax.plans.plan import Remat
from hetjax.runtime.layout import LeafId, Run

StageParams = tuple[dict[str, jax.Array], ...]  # one dict per run: leaf name -> array


@dataclass(frozen=True, slots=True)
class StageGraph:
    """What decides a stage's mathematics; equal graphs compile to equal programs.

    `tied` says where the stage holds each tied parameter (full path -> leaf).
    """

    runs: tuple[Run, ...]
    tied: tuple[tuple[str, LeafId], ...]
    first: bool
    last: bool
    remat: Remat
    data: int


@dataclass(slots=True)
class Residuals:
    """How to put a vjp together again; filled when the forward function is traced."""

    tree: Any = None
    sources: tuple[int | None, ...] = ()  # index into (params, x) leaves, or saved


def output(
    graph: StageGraph, params: StageParams, x: jax.Array, targets: Any
) -> tuple[jax.Array, jax.Array]:
    """The stage's output (or summed loss, if it is the last) and its auxiliary loss."""
    aux = jnp.zeros((), jnp.float32)
    body, head = _called(graph, params)
    for run, run_params in body:
        x, run_aux = _call_run(graph, run, run_params, params, x)
        aux += run_aux
    if head is None:
        return x, aux
    (spec,), own = head[0].units[0], head[1]
    return apply(spec, _module_params(graph, spec, own, params), x, targets)[0], aux


def forward(
    graph: StageGraph, residuals: Residuals, params: StageParams, x: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Output of a stage that is not the last, and what its backward needs besides
    the weights and the input."""
    y, saved = _forward(graph, residuals, params, x, None)
    return _merge(y), saved


def forward_loss(
    graph: StageGraph,
    residuals: Residuals,
    params: StageParams,
    x: jax.Array,
    targets: jax.Array,
    loss: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """The same of the last stage; `loss` accumulates the token sum."""
    ce, saved = _forward(graph, residuals, params, x, _split(graph, targets))
    return loss + jnp.sum(ce), saved


def backward(
    graph: StageGraph,
    residuals: Residuals,
    params: StageParams,
    x: jax.Array,
    saved: list[jax.Array],
    dy: jax.Array,
    acc: StageParams,
) -> tuple[StageParams, jax.Array]:
    """Accumulated fp32 gradients (leading dim: data rank) and the input's gradient.

    Tokens have no gradient: of the first stage it is a zero, an array to wait for.
    """
    dx, grads = gradients(graph, residuals, params, x, saved, dy)
    return accumulate(acc, grads), dx


def gradients(
    graph: StageGraph,
    residuals: Residuals,
    params: StageParams,
    x: jax.Array,
    saved: list[jax.Array],
    dy: jax.Array | None,
) -> tuple[jax.Array, StageParams]:
    """The input's gradient, and those of the weights per data rank, not yet added.

    `dy` is None on the last stage, where the loss is what is differentiated.
    """

    def one(x: jax.Array, saved: list[jax.Array], dy: jax.Array | None):
        given, rest = jax.tree.leaves((params, x)), iter(saved)
        leaves = [next(rest) if i is None else given[i] for i in residuals.sources]
        vjp = jax.tree.unflatten(residuals.tree, leaves)
        d_loss = jnp.ones((), jnp.float32)
        return vjp((d_loss if dy is None else dy, d_loss))

    dy = None if dy is None else _split(graph, dy)
    grads = _over_data(graph, one)(_split(graph, x), saved, dy)
    return _input_gradient(graph, grads), grads[0]


def fused(
    graph: StageGraph,
    params: StageParams,
    x: jax.Array,
    targets: jax.Array,
    acc: StageParams,
    loss: jax.Array,
) -> tuple[StageParams, jax.Array, jax.Array]:
    """Forward and backward of the last stage; `loss` accumulates the token sum."""

    def one(x: jax.Array, targets: jax.Array):
        (ce, aux), vjp = jax.vjp(*_differentiable(graph, params, x, targets))
        return ce, vjp((jnp.ones_like(ce), jnp.ones_like(aux)))

    ce, grads = _over_data(graph, one)(_split(graph, x), _split(graph, targets))
    dx = _input_gradient(graph, grads)
    return accumulate(acc, grads[0]), loss + jnp.sum(ce), dx


def logits(
    graph: StageGraph, params: StageParams, x: jax.Array, position: jax.Array
) -> jax.Array:
    """logits_V of the last stage for the first sequence at one position."""
    body, head = _called(graph, params)
    assert head is not None, "only the last stage has logits"
    for run, run_params in body:
        x, _ = _call_run(graph, run, run_params, params, x)
    x_11D = jax.lax.dynamic_slice_in_dim(x[:1], position, 1, axis=1)
    (spec,), own = head[0].units[0], head[1]
    module: Any = bind(spec, _module_params(graph, spec, own, params))
    return module.logits(x_11D)[0, 0]


def accumulate(acc: StageParams, grads: StageParams) -> StageParams:
    """Add one microbatch's gradients to the fp32 sums."""
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), acc, grads)


def _forward(
    graph: StageGraph,
    residuals: Residuals,
    params: StageParams,
    x: jax.Array,
    targets: jax.Array | None,
) -> tuple[jax.Array, list[jax.Array]]:
    def one(x: jax.Array, targets: jax.Array | None):
        (y, _), vjp = jax.vjp(*_differentiable(graph, params, x, targets))
        leaves, residuals.tree = jax.tree.flatten(vjp)
        given = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((params, x)))}
        residuals.sources = tuple(given.get(id(leaf)) for leaf in leaves)
        return y, [leaf for leaf in leaves if id(leaf) not in given]

    return _over_data(graph, one)(_split(graph, x), targets)


def _differentiable(
    graph: StageGraph,
    params: StageParams,
    x: jax.Array,
    targets: jax.Array | None = None,
) -> tuple[Any, ...]:
    """Function and primals for jax.vjp; token inputs are no primal."""
    if graph.first:
        return (lambda p: output(graph, p, x, targets)), params
    return (lambda p, x: output(graph, p, x, targets)), params, x


def _called(graph: StageGraph, params: StageParams):
    """The runs with their parameters: (body, head or None); held ones left out."""
    pairs = zip(graph.runs, params, strict=True)
    called = [(run, own) for run, own in pairs if run.only is None]
    return (called[:-1], called[-1]) if graph.last else (called, None)


def _call_run(
    graph: StageGraph,
    run: Run,
    run_params: dict[str, jax.Array],
    params: StageParams,
    x: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def unit(x: jax.Array, unit_params: dict[str, jax.Array]):
        aux = jnp.zeros((), jnp.float32)
        for spec in run.units[0]:
            module_params = _module_params(graph, spec, unit_params, params)
            x, module_aux = apply(spec, module_params, x)
            aux += module_aux
        return x, aux

    kept = with_remat(unit, graph.remat, looped=run.stacked)
    if not run.stacked:
        return kept(x, run_params)
    x, aux = jax.lax.scan(kept, x, run_params)
    return x, jnp.sum(aux)


def _module_params(
    graph: StageGraph,
    spec: ModuleSpec,
    unit_params: dict[str, jax.Array],
    params: StageParams,
) -> dict[str, jax.Array]:
    """A module's own parameters out of its unit's, and its tied ones."""
    prefix, held = spec.name + ".", dict(graph.tied)
    own = {
        leaf.removeprefix(prefix): value
        for leaf, value in unit_params.items()
        if leaf.startswith(prefix)
    }
    tied = {name: held[owner] for name, owner in spec.tied}
    return own | {name: params[run][leaf] for name, (run, leaf) in tied.items()}


def _over_data(graph: StageGraph, one: Callable[..., Any]) -> Callable[..., Any]:
    """Map `one` over the leading data dim; without a data axis add that dim only."""
    if graph.data > 1:
        return jax.vmap(one, spmd_axis_name="data")

    def single(*arrays: Any) -> Any:
        out = one(*jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: a[None], out)

    return single


def _input_gradient(graph: StageGraph, grads: tuple[Any, ...]) -> jax.Array:
    return jnp.zeros((), jnp.float32) if graph.first else _merge(grads[1])


def _split(graph: StageGraph, x: jax.Array) -> jax.Array:
    return x.reshape(graph.data, x.shape[0] // graph.data, *x.shape[1:])


def _merge(y: jax.Array) -> jax.Array:
    return y.reshape(y.shape[0] * y.shape[1], *y.shape[2:])
