# SPDX-License-Identifier: Apache-2.0
"""The mathematics of one stage as pure functions, before any compilation.

Owns how a stage calls its stacks (scan, remat, tied parameters, loss) and how its
vector-Jacobian product is cut into a forward and a backward function whose residuals
hold neither weights nor the stage input. The functions of one data rank are what costs
trace; those of a microbatch, which the runtime compiles, map them over the data ranks.
Does not own meshes or compiled programs (`hetjax/runtime/execution/programs.py`).

The batch dim of a microbatch is split over the data axis by an explicit vmap, so that
gradients stay apart per data rank and are summed once per step, not per microbatch.

With remat "full" a block is made again but for its last product and that one's
all-reduce, which no gradient needs: it costs less than in Megatron-LM, which runs the
whole forward again (1.15 of "selective" on its 22B and 175B, not the published 1.3;
tested).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.mesh.axes import abstract_mesh
from hetjax.models.attention import KERNELS, AttentionForm, in_form
from hetjax.models.chunked_attention import KEPT
from hetjax.models.model import ModuleSpec, apply, bind
from hetjax.plans.plan import Remat
from hetjax.stage.arrays import PARTS, joined_parts
from hetjax.stage.partition import BlockStack, StageStacks

StageParams = tuple[dict[str, jax.Array], ...]  # a dict per stack: leaf name -> array


# One pass over memory each, which a compiler fuses into what reads them next; of tanh,
# JAX 0.12 has one_minus_square; reshard it puts under a mesh, of constants alone.
_ELEMENTWISE = frozenset(
    """
    abs add add_any and broadcast_in_dim clamp convert_element_type cos div eq erf
    exp expm1 ge gt integer_pow iota le log log1p logistic lt max min mul ne neg not
    one_minus_square or pow reshape reshard rsqrt select_n sign sin sqrt square
    squeeze stop_gradient sub tanh transpose
    """.split()
)


def _costs_more_than_memory(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keep products, reductions, gathers and sorts; make the rest again.

    To make an elementwise result again takes no more traffic than to read it back.
    """
    return primitive.name not in _ELEMENTWISE


POLICIES: Mapping[Remat, Callable[..., bool]] = {
    "none": _costs_more_than_memory,
    "selective": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(KEPT),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def with_remat(
    unit: Callable[..., Any], remat: Remat, *, looped: bool
) -> Callable[..., Any]:
    """Return the unit of a run, keeping for its backward what the choice allows.

    `looped` if it is the body of a scan, out of which no compiler merges what is made
    again with what was made first.
    """
    return jax.checkpoint(unit, policy=POLICIES[remat], prevent_cse=not looped)


@dataclass(frozen=True, slots=True)
class StageFunction:
    """What decides a stage's mathematics; equal ones compile to equal programs.

    `data` is the number of data ranks that share a microbatch, `tensor` that of devices
    that share their heads. `attention` is the form of it; None: as modules say.
    """

    held: StageStacks
    remat: Remat
    data: int = 1
    tensor: int = 1
    attention: AttentionForm | None = None

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
    function: StageFunction, params: StageParams, x: jax.Array, targets: Any
) -> tuple[jax.Array, jax.Array]:
    """The stage's output (or summed loss, if it is the last) and its auxiliary loss."""
    aux = jnp.zeros((), jnp.float32)
    body, head = _called(function, params)
    for stack, own in body:
        x, stack_aux = _call_stack(function, stack, own, params, x)
        aux += stack_aux
    if head is None:
        return x, aux
    (module,), own = head[0].unit, head[1]
    module_params = _module_params(function, module, own, params)
    return apply(module, module_params, x, targets)[0], aux


def evaluate(
    function: StageFunction,
    params: StageParams,
    x: jax.Array,
    targets: jax.Array | None = None,
) -> jax.Array:
    """Output of a microbatch, or the sum of its losses if the stage is the last."""

    def one(x: jax.Array, targets: jax.Array | None) -> jax.Array:
        return output(function, params, x, targets)[0]

    targets = None if targets is None else _split(function, targets)
    y = _over_data(function, one)(_split(function, arrived(params, x)), targets)
    return jnp.sum(y) if function.last else _merge(y)


def logits(
    function: StageFunction, params: StageParams, x: jax.Array, position: jax.Array
) -> jax.Array:
    """logits_V of the last stage for the first sequence at one position."""
    body, head = _called(function, params)
    assert head is not None, "only the last stage has logits"

    def one(x: jax.Array) -> jax.Array:
        for stack, own in body:
            x, _ = _call_stack(function, stack, own, params, x)
        return x

    x = _merge(_over_data(function, one)(_split(function, arrived(params, x))))
    x_11D = jax.lax.dynamic_slice_in_dim(x[:1], position, 1, axis=1)
    (module,), own = head[0].unit, head[1]
    bound: Any = bind(module, _module_params(function, module, own, params))
    return bound.logits(x_11D)[0, 0]


def rank_forward(
    function: StageFunction,
    residuals: Residuals,
    params: StageParams,
    x: jax.Array,
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
    x: jax.Array,
    saved: list[jax.Array],
    dy: jax.Array | None,
    scale: jax.Array | None = None,
) -> tuple[Any, ...]:
    """One data rank's gradients: of trained weights and, unless tokens, of the input.

    `dy` is None on the last stage, where the loss is what is differentiated. They are
    those of the loss times `scale`, if there is one, which `dy` has already.
    """
    given, rest = jax.tree.leaves((params, x)), iter(saved)
    leaves = [next(rest) if i is None else given[i] for i in residuals.sources]
    vjp = jax.tree.unflatten(residuals.tree, leaves)
    d_loss = _loss_gradient(scale)
    return vjp((d_loss if dy is None else dy, d_loss))


def forward(
    function: StageFunction, residuals: Residuals, params: StageParams, x: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Output of a stage that is not the last, and the residuals."""
    one = partial(rank_forward, function, residuals, params)
    y, saved = _over_data(function, one)(_split(function, arrived(params, x)))
    return _merge(y), saved


def forward_loss(
    function: StageFunction,
    residuals: Residuals,
    params: StageParams,
    x: jax.Array,
    targets: jax.Array,
    loss: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """The same of the last stage; `loss` accumulates the token sum."""
    one = partial(rank_forward, function, residuals, params)
    split = _split(function, arrived(params, x)), _split(function, targets)
    ce, saved = _over_data(function, one)(*split)
    return loss + jnp.sum(ce), saved


def backward(
    function: StageFunction,
    residuals: Residuals,
    params: StageParams,
    x: jax.Array,
    saved: list[jax.Array],
    dy: jax.Array,
    scale: jax.Array | None,
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
    x: jax.Array,
    saved: list[jax.Array],
    dy: jax.Array | None,
    scale: jax.Array | None,
) -> tuple[jax.Array, StageParams]:
    """The input's gradient, and those of trained weights per data rank, not added."""

    def one(x: jax.Array, saved: list[jax.Array], dy: jax.Array | None):
        return rank_gradients(residuals, params, x, saved, dy, scale)

    dy = None if dy is None else _split(function, arrived(params, dy))
    x = _split(function, arrived(params, x))
    grads = _over_data(function, one)(x, saved, dy)
    return _input_gradient(function, grads), grads[0]


def fused(
    function: StageFunction,
    params: StageParams,
    x: jax.Array,
    targets: jax.Array,
    scale: jax.Array | None,
    acc: StageParams,
    loss: jax.Array,
) -> tuple[StageParams, jax.Array, jax.Array]:
    """Forward and backward of the last stage; `loss` accumulates the token sum."""

    def one(x: jax.Array, targets: jax.Array):
        (ce, _), vjp = jax.vjp(*_differentiable(function, params, x, targets))
        return ce, vjp((_loss_gradient(scale),) * 2)

    split = _split(function, arrived(params, x)), _split(function, targets)
    ce, grads = _over_data(function, one)(*split)
    dx = _input_gradient(function, grads)
    return accumulate(acc, grads[0]), loss + jnp.sum(ce), dx


def arrived(params: StageParams, x: jax.Array) -> jax.Array:
    """What another stage has sent, in the precision of these weights; tokens stay.

    Messages travel in their sender's precision. Outside of what is differentiated:
    the gradient that is sent back has the precision of who sends it.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return x.astype(jax.tree.leaves(params)[0].dtype)


def accumulate(acc: StageParams, grads: StageParams) -> StageParams:
    """Add one microbatch's gradients to the fp32 sums."""
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), acc, grads)


def _loss_gradient(scale: jax.Array | None) -> jax.Array:
    return jnp.ones((), jnp.float32) if scale is None else scale


def _differentiable(
    function: StageFunction, params: StageParams, x: jax.Array, targets: Any
) -> tuple[Any, ...]:
    """Function and primals for jax.vjp; token inputs and frozen weights are none."""
    trained, frozen = (part(function.stacks, params) for part in PARTS)

    def of(trained: StageParams, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return output(function, joined_parts(trained, frozen), x, targets)

    return (partial(of, x=x), trained) if function.first else (of, trained, x)


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
) -> tuple[jax.Array, jax.Array]:
    def unit(x: jax.Array, own: dict[str, jax.Array]):
        aux = jnp.zeros((), jnp.float32)
        for module in stack.unit:
            module = in_form(module, function.attention)
            module_params = _module_params(function, module, own, params)
            x, module_aux = apply(module, module_params, x)
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


def _split(function: StageFunction, x: jax.Array) -> jax.Array:
    return x.reshape(function.data, x.shape[0] // function.data, *x.shape[1:])


def _merge(y: jax.Array) -> jax.Array:
    return y.reshape(y.shape[0] * y.shape[1], *y.shape[2:])
