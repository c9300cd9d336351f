# SPDX-License-Identifier: Apache-2.0
"""Describes the arrays that a stage holds through a step, as abstract arrays.

Owns shapes, dtypes and layouts of compute weights and, for trained weights, of fp32
masters, optimizer state and gradient accumulators, on a mesh of devices or an abstract
mesh. Does not own the rules of layouts (`hetjax/mesh/axes.py`) nor arrays themselves.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hetjax.mesh.axes import compute_spec, master_spec, replicated, tensor_dim
from hetjax.models.model import AbstractParam
from hetjax.stage.eight_bits import held
from hetjax.stage.partition import BlockStack

AnyMesh = Mesh | AbstractMesh
# Optax's `init`: parameters by leaf name -> the optimizer's state
OptimizerInit = Callable[[dict[str, Any]], Any]
_Specs = Callable[[AbstractParam], PartitionSpec]


def compute_weights(stacks: Sequence[BlockStack], mesh: AnyMesh, dtype: Any) -> Any:
    """Return compute weights per stack: cut over tensor, whole on every data rank.

    Raises BadInput for a logical axis name that has no rule.
    """
    return _params(stacks, mesh, dtype, lambda param: compute_spec(param.logical))


def compute_dtype(stacks: Sequence[BlockStack], weights: Any) -> Any:
    """Return the dtype of the weights that are not quantised."""
    return next(
        own[leaf].dtype
        for stack, own in zip(stacks, weights, strict=True)
        for leaf, param in stack.leaves().items()
        if param.dtype is None
    )


def trained_part(stacks: Sequence[BlockStack], weights: Any) -> Any:
    """Return the trained ones of the weights (dicts by leaf, one per stack)."""
    return _part(stacks, weights, trained=True)


def frozen_part(stacks: Sequence[BlockStack], weights: Any) -> Any:
    """Return the weights that stay as they begin."""
    return _part(stacks, weights, trained=False)


def _part(stacks: Sequence[BlockStack], weights: Any, *, trained: bool) -> Any:
    kept = [stack.trained().keys() for stack in stacks]
    return tuple(
        {leaf: value for leaf, value in own.items() if (leaf in of_stack) == trained}
        for own, of_stack in zip(weights, kept, strict=True)
    )


PARTS = trained_part, frozen_part


def joined_parts(trained: Any, frozen: Any) -> Any:
    """Merge the trained and the frozen part of the weights."""
    return tuple(a | b for a, b in zip(trained, frozen, strict=True))


def master_weights(stacks: Sequence[BlockStack], mesh: AnyMesh) -> Any:
    """Return fp32 masters of trained weights, one dict per stack.

    They are also cut over data where that divides.
    """
    data, tensor = mesh.shape["data"], mesh.shape["tensor"]

    def spec(param: AbstractParam) -> PartitionSpec:
        return master_spec(param.shape, param.logical, data=data, tensor=tensor)

    return trained_part(stacks, _params(stacks, mesh, jnp.float32, spec))


def accumulators(weights: Any) -> Any:
    """Return fp32 gradient sums of trained compute weights; dim 0 is the data rank."""

    def accumulator(weight: Any) -> jax.ShapeDtypeStruct:
        mesh, spec = weight.sharding.mesh, PartitionSpec("data", *weight.sharding.spec)
        shape = (mesh.shape["data"], *weight.shape)
        return _abstract(shape, jnp.float32, NamedSharding(mesh, spec))

    return jax.tree.map(accumulator, weights)


def copied_weights(weights: Any, masters: Any) -> Any:
    """Return trained compute weights whose dtype or layout is not their master's."""

    def differs(weight: Any, master: Any) -> bool:
        same = device_shape(weight) == device_shape(master)
        return weight.dtype != master.dtype or not same

    return tuple(
        {leaf: w for leaf, w in own.items() if differs(w, of_stack[leaf])}
        for own, of_stack in zip(weights, masters, strict=True)
    )


def optimizer_state(
    stacks: Sequence[BlockStack], masters: Any, init: OptimizerInit
) -> Any:
    """Return the optimizer state, one dict of modules per stack.

    An array named and shaped like a master is laid out like it; so is one with 1 in
    place of some sizes, in its other dims. All others are whole on every device.
    """
    state = jax.eval_shape(lambda m: fresh_optimizer_state(stacks, m, init), masters)

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        own = masters[path[0].idx]
        master = own.get(_last_key(path))
        if master is not None and _is_like(leaf.shape, master.shape):
            return _abstract(leaf.shape, leaf.dtype, _lying_like(master, leaf.shape))
        whole = replicated(next(iter(own.values())).sharding.mesh)
        return _abstract(leaf.shape, leaf.dtype, whole)

    return jax.tree_util.tree_map_with_path(placed, state)


def fresh_optimizer_state(
    stacks: Sequence[BlockStack], masters: Any, init: OptimizerInit
) -> Any:
    """Return the state of step 0; traceable. Optax sees one module of one unit."""

    def module_state(stack: BlockStack, params: dict[str, Any]) -> Any:
        parameters = stack.trained()
        return per_unit(stack, lambda own: held(init(own), parameters))(params)

    return tuple(
        {
            name: module_state(stack, params)
            for name, params in by_module(leaves).items()
        }
        for stack, leaves in zip(stacks, masters, strict=True)
    )


def per_unit(stack: BlockStack, function: Any) -> Any:
    """Return the function of one unit's arrays as a function of a stack's arrays."""
    return jax.vmap(function) if stack.stacked else function


def by_module(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the leaves of a stack by the name of their module."""
    found: dict[str, dict[str, Any]] = {}
    for leaf, value in leaves.items():
        found.setdefault(leaf.partition(".")[0], {})[leaf] = value
    return found


def pack_dim(stack: BlockStack, leaf: str) -> int:
    """Return the dim of a (stacked) leaf that is cut into rows: tensor dim, if any."""
    param = stack.leaves()[leaf]
    return int(stack.stacked) + (tensor_dim(param.logical) or 0)


def shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda a: a.sharding, abstract)


def device_shape(abstract: Any) -> tuple[int, ...]:
    """Return the shape of the part that one device holds."""
    return abstract.sharding.shard_shape(abstract.shape)


def device_bytes(tree: Any) -> int:
    """Return the bytes of abstract arrays on each device that holds them."""
    return sum(
        math.prod(device_shape(a)) * a.dtype.itemsize for a in jax.tree.leaves(tree)
    )


def _params(
    stacks: Sequence[BlockStack], mesh: AnyMesh, dtype: Any, spec: _Specs
) -> tuple[dict[str, jax.ShapeDtypeStruct], ...]:
    def placed_param(stack: BlockStack, param: AbstractParam) -> jax.ShapeDtypeStruct:
        layout = spec(param)
        if stack.stacked:  # the dim of units is never cut
            layout = PartitionSpec(None, *layout)
        held_in = param.held_in(dtype)
        return _abstract(stack.shape(param), held_in, NamedSharding(mesh, layout))

    return tuple(
        {leaf: placed_param(stack, param) for leaf, param in stack.leaves().items()}
        for stack in stacks
    )


def _is_like(shape: tuple[int, ...], master: tuple[int, ...]) -> bool:
    """Return whether the shape is the master's, or has 1 in place of some sizes."""
    return len(shape) == len(master) and all(
        size in (1, whole) for size, whole in zip(shape, master, strict=True)
    )


def _lying_like(master: Any, shape: tuple[int, ...]) -> NamedSharding:
    """Return the master's sharding, without cuts of dims that are 1 here."""
    spec = master.sharding.spec
    spec = (*spec, *(None,) * (len(shape) - len(spec)))
    same = (n == m for n, m in zip(shape, master.shape, strict=True))
    cut = (axis if like else None for axis, like in zip(spec, same, strict=True))
    return NamedSharding(master.sharding.mesh, PartitionSpec(*cut))


def _abstract(shape: Any, dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _last_key(path: Any) -> str:
    return str(getattr(path[-1], "key", ""))
