# SPDX-License-Identifier: Apache-2.0
"""Defines the mathematics of one stage on one data rank, before any compilation.

Owns how a stage calls its stacks (scan, tied parameters, loss, documents), and how its
vector-Jacobian product is cut into a forward and a backward function whose residuals
hold neither weights nor the stage input. Costs trace these. Does not own how the data
ranks share a microbatch (`microbatch.py`), meshes nor compiled programs
(`hetjax/runtime/execution/programs.py`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax.models.attention.attention import AttentionForm, in_form
from hetjax.models.model import ModuleSpec, apply, bind
from hetjax.plans.plan import Remat
from hetjax.stage.arrays import PARTS, joined_parts
from hetjax.stage.partition import BlockStack, StageStacks
from hetjax.stage.remat import with_remat

StageParams = tuple[dict[str, jax.Array], ...]  # a dict per stack: leaf name -> array


class Packed(NamedTuple):
    """A stage's input for packed sequences; arrays or abstract ones.

    Tokens or the residual stream, and the number of each position's document (0:
    padding).
    """

    x: Any
    documents_BL: Any


Given = jax.Array | Packed


class LossScales(NamedTuple):
    """The factors of the gradients of cross-entropy and of auxiliary losses."""

    loss: Any
    aux: Any


Scale = jax.Array | LossScales | None  # one for both; None: 1


@dataclass(frozen=True, slots=True)
class StageFunction:
    """All that decides a stage's mathematics; equal ones compile to equal programs.

    `data` is the number of data ranks that share a microbatch, `tensor` the number of
    devices that share their heads. `attention` is the attention form; None: as modules
    say. If sequences are `packed`, stages receive `Packed` and are scaled by
    `LossScales`.
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
    """How to reassemble a vjp; filled when the forward function is traced."""

    tree: Any = None
    sources: tuple[int | None, ...] = ()  # index into (params, x) leaves; None: saved


def output(
    function: StageFunction, params: StageParams, given: Given, targets: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the stage's output (the last: summed loss) and its auxiliary loss."""
    x, aux = stream(function, params, given)
    if not function.last:
        return x, aux
    return head_loss(function, params, x, targets, _parts(given)[1]), aux


def stream(
    function: StageFunction, params: StageParams, given: Given
) -> tuple[jax.Array, jax.Array]:
    """Return the residual stream after all but the head, and the auxiliary loss."""
    aux = jnp.zeros((), jnp.float32)
    x, documents_BL = _parts(given)
    for stack, own in called_stacks(function, params)[0]:
        x, stack_aux = _call_stack(function, stack, own, params, x, documents_BL)
        aux += stack_aux
    return x, aux


def head_loss(
    function: StageFunction,
    params: StageParams,
    x: jax.Array,
    targets: Any,
    documents_BL: jax.Array | None = None,
) -> jax.Array:
    """Return the summed loss of the last stage, whose head receives this stream."""
    spec, own = _head(function, params)
    return apply(spec, own, x, targets, documents_BL=documents_BL)[0]


def head_logits(
    function: StageFunction, params: StageParams, x_11D: jax.Array
) -> jax.Array:
    """Return logits_V of the last stage, whose head receives this residual stream."""
    head: Any = bind(*_head(function, params))
    return head.logits(x_11D)[0, 0]


def rank_forward(
    function: StageFunction,
    residuals: Residuals,
    params: StageParams,
    x: Given,
    targets: jax.Array | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Return one data rank's output, or summed loss, and its residuals.

    These are what its backward needs besides the weights and the input.
    """
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
    """Return one data rank's gradients: of trained weights and, unless tokens, of x.

    `dy` is None on the last stage, where the loss is differentiated. The gradients are
    of the loss times `scale`, if there is one; `dy` has this factor already.
    """
    given, rest = jax.tree.leaves((params, x)), iter(saved)
    leaves = [next(rest) if i is None else given[i] for i in residuals.sources]
    vjp = jax.tree.unflatten(residuals.tree, leaves)
    d_loss, d_aux = _loss_gradients(scale)
    return vjp((d_loss if dy is None else dy, d_aux))


def rank_fused(
    function: StageFunction,
    params: StageParams,
    x: Given,
    targets: jax.Array,
    scale: Scale,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Return one data rank's summed loss and, at once, its gradients (last stage)."""
    (ce, _), vjp = jax.vjp(*_differentiable(function, params, x, targets))
    return ce, vjp(_loss_gradients(scale))


def _loss_gradients(scale: Scale) -> tuple[jax.Array, jax.Array]:
    """Return the gradients with respect to cross-entropy and auxiliary losses."""
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
    """Return function and primals for jax.vjp: trained weights and residual stream."""
    trained, frozen = (part(function.stacks, params) for part in PARTS)

    def stage_output(trained: StageParams, given: Given) -> tuple[jax.Array, jax.Array]:
        return output(function, joined_parts(trained, frozen), given, targets)

    if function.first:
        return partial(stage_output, given=given), trained
    x, documents_BL = _parts(given)

    def stream_output(
        trained: StageParams, x: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        stage_input = x if documents_BL is None else Packed(x, documents_BL)
        return stage_output(trained, stage_input)

    return stream_output, trained, x


def called_stacks(function: StageFunction, params: StageParams):
    """Return the called stacks with their parameters: (body, head or None)."""
    pairs = zip(function.stacks, params, strict=True)
    called = [(stack, own) for stack, own in pairs if stack.only is None]
    return (called[:-1], called[-1]) if function.last else (called, None)


def _head(
    function: StageFunction, params: StageParams
) -> tuple[ModuleSpec, dict[str, jax.Array]]:
    head = called_stacks(function, params)[1]
    assert head is not None, "only the last stage has a head"
    (module,), own = head[0].unit, head[1]
    return module, params_of(function, module, own, params)


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
            module_params = params_of(function, module, own, params)
            called = module, module_params, x
            x, module_aux = apply(*called, documents_BL=documents_BL)
            aux += module_aux
        return x, aux

    kept = with_remat(unit, function.remat, looped=stack.stacked)
    if not stack.stacked:
        return kept(x, own)
    x, aux = jax.lax.scan(kept, x, own)
    return x, jnp.sum(aux)


def params_of(
    function: StageFunction,
    module: ModuleSpec,
    own: dict[str, jax.Array],
    params: StageParams,
) -> dict[str, jax.Array]:
    """Return a module's own parameters out of its unit's, and its tied ones."""
    prefix, held = module.name + ".", dict(function.held.tied)
    mine = {
        leaf.removeprefix(prefix): value
        for leaf, value in own.items()
        if leaf.startswith(prefix)
    }
    tied = {name: held[owner] for name, owner in module.tied}
    return mine | {name: params[at][leaf] for name, (at, leaf) in tied.items()}
