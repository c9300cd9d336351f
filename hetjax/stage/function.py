# SPDX-License-Identifier: Apache-2.0
"""The mathematics of one stage as pure functions, before any compilation.

Owns how a stage calls its stacks (scan, tied parameters, loss, documents) and how its
vector-Jacobian product is cut into a forward and a backward function whose residuals
hold neither weights nor the stage input. The functions of one data rank are what costs
trace; those of a microbatch, which the runtime compiles, map them over the data ranks.
Does not own meshes or compiled programs (`hetjax/runtime/execution/programs.py`).

The batch dim of a microbatch is split over the data axis by an explicit vmap, so that
gradients stay apart per data rank and are summed once per step, not per microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax.mesh.axes import abstract_mesh
from hetjax.models.attention import KERNELS, AttentionForm, in_form
from hetjax.models.model import ModuleSpec, apply, bind
from hetjax.plans.plan import Remat
from hetjax.stage.arrays import PARTS, compute_dtype, joined_parts
from hetjax.stage.partition import BlockStack, StageStacks
from hetjax.stage.remat import with_remat

StageParams = tuple[dict[str, jax.Array], ...]  # a dict per stack: leaf name -> array


class Packed(NamedTuple):
    """What a stage is given of packed sequences: tokens or the residual stream, and the
    number of each position's document (0: padding); arrays or abstract ones."""

    x: Any
    documents_BL: Any


Given = jax.Array | Packed


class LossScales(NamedTuple):
    """What the gradients of cross-entropy and of auxiliary losses are multiplied by."""

    loss: Any
    aux: Any


Scale = jax.Array | LossScales | None  # one for both; None: 1


@dataclass(frozen=True, slots=True)
class StageFunction:
    """What decides a stage's mathematics; equal ones compile to equal programs.

    `data` is the number of data ranks that share a microbatch, `tensor` that of devices
    that share their heads. `attention` is the form of it; None: as modules say. Where
    sequences are `packed`, stages are given `Packed` and scaled by `LossScales`.
    """

    held: StageStacks
    remat: Remat
    data: int = 1
    tensor: int = 1
    attention: AttentionForm | None = None
    packed: bool = False

    @property
    def stacks(self) -> tuple[BlockStack, ...]:
        return self.held.stacks

    @property
    def first(self) -> bool:
        return self.held.first

    @property
    def last(self) -> bool:
        return self.held.last


@dataclass(slots=True)
class Residuals:
    """How to put a vjp together again; filled when the forward function is traced."""

    tree: Any = None
    sources: tuple[int | None, ...] = ()  # index into (params, x) leaves, or saved


def output(
    function: StageFunction, params: StageParams, given: Given, targets: Any
) -> tuple[jax.Array, jax.Array]:
    """The stage's output (or summed loss, if it is the last) and its auxiliary loss."""
    aux = jnp.zeros((), jnp.float32)
    x, documents_BL = _parts(given)
    body, head = _called(function, params)
    for stack, own in body:
        x, stack_aux = _call_stack(function, stack, own, params, x, documents_BL)
        aux += stack_aux
    if head is None:
        return x, aux
    (module,), own = head[0].unit, head[1]
    module_params = _module_params(function, module, own, params)
    return apply(module, module_params, x, targets, documents_BL=documents_BL)[0], aux


def evaluate(
    function: StageFunction,
    params: StageParams,
    x: Given,
    targets: jax.Array | None = None,
) -> jax.Array:
    """Output of a microbatch, or the sum of its losses if the stage is the last."""

    def one(x: Given, targets: jax.Array | None) -> jax.Array:
        return output(function, params, x, targets)[0]

    targets = None if targets is None else _split(function, targets)
    y = _over_data(function, one)(_arrived(function, params, x), targets)
    return jnp.sum(y) if function.last else _merge(y)


def logits(
    function: StageFunction, params: StageParams, given: Given, position: jax.Array
) -> jax.Array:
    """logits_V of the last stage for the first sequence at one position."""
    body, head = _called(function, params)
    assert head is not None, "only the last stage has logits"

    def one(given: Given) -> jax.Array:
        x, documents_BL = _parts(given)
        for stack, own in body:
            x, _ = _call_stack(function, stack, own, params, x, documents_BL)
        return x

    x = _merge(_over_data(function, one)(_arrived(function, params, given)))
    x_11D = jax.lax.dynamic_slice_in_dim(x[:1], position, 1, axis=1)
    (module,), own = head[0].unit, head[1]
    bound: Any = bind(module, _module_params(function, module, own, params))
    return bound.logits(x_11D)[0, 0]


def rank_forward(
    function: StageFunction,
    residuals: Residuals,
    params: StageParams,
    x: Given,
    targets: jax.Array | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """One data rank's output, or summed loss, and what its backward needs besides the
    weights and the input."""
    (y, _), vjp = jax.vjp(*_differentiable(function, params, x, targets))
    leaves, residuals.tree = jax.tree.flatten(vjp)
    given = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((params, x)))}
    residuals.sources = tuple(given.get(id(leaf)) for leaf in leaves)
    return y, [leaf for leaf in leaves if id(leaf) not in given]


def rank_gradients(
    residuals: Residuals,
    params: StageParams,
    x: Given,
    saved: list[jax.Array],
    dy: jax.Array | None,
    scale: Scale = None,
) -> tuple[Any, ...]:
    """One data rank's gradients: of trained weights and, unless tokens, of the input.

    `dy` is None on the last stage, where the loss is what is differentiated. They are
    those of the loss times `scale`, if there is one, which `dy` has already.
    """
    given, rest = jax.tree.leaves((params, x)), iter(saved)
    leaves = [next(rest) if i is None else given[i] for i in residuals.sources]
    vjp = jax.tree.unflatten(residuals.tree, leaves)
    d_loss, d_aux = _loss_gradients(scale)
    return vjp((d_loss if dy is None else dy, d_aux))


def forward(
    function: StageFunction, residuals: Residuals, params: StageParams, x: Given
) -> tuple[jax.Array, list[jax.Array]]:
    """Output of a stage that is not the last, and the residuals."""
    one = partial(rank_forward, function, residuals, params)
    y, saved = _over_data(function, one)(_arrived(function, params, x))
    return _merge(y), saved


def forward_loss(
    function: StageFunction,
    residuals: Residuals,
    params: StageParams,
    x: Given,
    targets: jax.Array,
    loss: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """The same of the last stage; `loss` accumulates the token sum."""
    one = partial(rank_forward, function, residuals, params)
    split = _arrived(function, params, x), _split(function, targets)
    ce, saved = _over_data(function, one)(*split)
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
    """Accumulated fp32 gradients (leading dim: data rank) and the input's gradient.

    Tokens have no gradient: of the first stage it is a zero, an array to wait for.
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
    """The input's gradient, and those of trained weights per data rank, not added."""

    def one(x: Given, saved: list[jax.Array], dy: jax.Array | None):
        return rank_gradients(residuals, params, x, saved, dy, scale)

    dy = None if dy is None else _arrived(function, params, dy)
    x = _arrived(function, params, x)
    grads = _over_data(function, one)(x, saved, dy)
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
    """Forward and backward of the last stage; `loss` accumulates the token sum."""

    def one(x: Given, targets: jax.Array):
        (ce, _), vjp = jax.vjp(*_differentiable(function, params, x, targets))
        return ce, vjp(_loss_gradients(scale))

    split = _arrived(function, params, x), _split(function, targets)
    ce, grads = _over_data(function, one)(*split)
    dx = _input_gradient(function, grads)
    return accumulate(acc, grads[0]), loss + jnp.sum(ce), dx


def _arrived(function: StageFunction, params: StageParams, given: Any) -> Any:
    """What another stage has sent, split over data, in the precision of compute.

    Outside of what is differentiated: gradients sent back have their sender's.
    """
    dtype = compute_dtype(function.stacks, params)

    def converted(x: jax.Array) -> jax.Array:
        return x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(dtype)

    return _split(function, jax.tree.map(converted, given))


def accumulate(acc: StageParams, grads: StageParams) -> StageParams:
    """Add one microbatch's gradients to the fp32 sums."""
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), acc, grads)


def _loss_gradients(scale: Scale) -> tuple[jax.Array, jax.Array]:
    """Those of cross-entropy and of auxiliary losses."""
    if isinstance(scale, LossScales):
        return scale.loss, scale.aux
    d_loss = jnp.ones((), jnp.float32) if scale is None else scale
    return d_loss, d_loss


def _parts(given: Given) -> tuple[jax.Array, jax.Array | None]:
    if isinstance(given, Packed):
        return given.x, given.documents_BL
    return given, None


def _differentiable(
    function: StageFunction, params: StageParams, given: Given, targets: Any
) -> tuple[Any, ...]:
    """Function and primals for jax.vjp: trained weights and the residual stream."""
    trained, frozen = (part(function.stacks, params) for part in PARTS)

    def of(trained: StageParams, given: Given) -> tuple[jax.Array, jax.Array]:
        return output(function, joined_parts(trained, frozen), given, targets)

    if function.first:
        return partial(of, given=given), trained
    x, documents_BL = _parts(given)

    def of_stream(trained: StageParams, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return of(trained, x if documents_BL is None else Packed(x, documents_BL))

    return of_stream, trained, x


def _called(function: StageFunction, params: StageParams):
    """The stacks that are called, with their parameters: (body, head or None)."""
    pairs = zip(function.stacks, params, strict=True)
    called = [(stack, own) for stack, own in pairs if stack.only is None]
    return (called[:-1], called[-1]) if function.last else (called, None)


def _call_stack(
    function: StageFunction,
    stack: BlockStack,
    own: dict[str, jax.Array],
    params: StageParams,
    x: jax.Array,
    documents_BL: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    def unit(x: jax.Array, own: dict[str, jax.Array]):
        aux = jnp.zeros((), jnp.float32)
        for module in stack.unit:
            module = in_form(module, function.attention)
            module_params = _module_params(function, module, own, params)
            called = module, module_params, x
            x, module_aux = apply(*called, documents_BL=documents_BL)
            aux += module_aux
        return x, aux

    kept = with_remat(unit, function.remat, looped=stack.stacked)
    if not stack.stacked:
        return kept(x, own)
    x, aux = jax.lax.scan(kept, x, own)
    return x, jnp.sum(aux)


def _module_params(
    function: StageFunction,
    module: ModuleSpec,
    own: dict[str, jax.Array],
    params: StageParams,
) -> dict[str, jax.Array]:
    """A module's own parameters out of its unit's, and its tied ones."""
    prefix, held = module.name + ".", dict(function.held.tied)
    mine = {
        leaf.removeprefix(prefix): value
        for leaf, value in own.items()
        if leaf.startswith(prefix)
    }
    tied = {name: held[owner] for name, owner in module.tied}
    return mine | {name: params[at][leaf] for name, (at, leaf) in tied.items()}


def _over_data(function: StageFunction, one: Callable[..., Any]) -> Callable[..., Any]:
    """Map `one` over the leading data dim; without a data axis add that dim only."""

    def single(*arrays: Any) -> Any:
        out = one(*jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: a[None], out)

    several = function.data > 1
    mapped = jax.vmap(one, spmd_axis_name="data") if several else single
    return _knowing_the_mesh(function, mapped)


def _knowing_the_mesh(
    function: StageFunction, mapped: Callable[..., Any]
) -> Callable[..., Any]:
    """The same, traced so that kernels of attention find over what they are cut."""
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
