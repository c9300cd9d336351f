# SPDX-License-Identifier: Apache-2.0
"""Updates a stack one leaf after another.

Within a leaf it updates one unit of the stack at a time, in place. So scaled gradients,
moments decoded from 8 bits, and whatever else a compiler stores on the way exist for
one unit only. CPUs fuse all of it, and are much slower in such a loop: there all units
are updated at once, unless moments are in 8 bits. Owns the order and the state of one
leaf. Does not own the rule (`update.py`) nor the codes (`hetjax/stage/eight_bits.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from hetjax.stage import eight_bits
from hetjax.stage.arrays import by_module
from hetjax.stage.partition import BlockStack

# (masters, optimizer state, gradients) by leaf -> the first two after a step
Rule = Callable[[Any, Any, Any], tuple[Any, Any]]


def updated_by_leaf(
    step: Rule,
    masters: dict[str, jax.Array],
    state: dict[str, Any],
    grads: dict[str, Any],
    whole_gradient: Callable[[str, Any], jax.Array],
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Return masters and state after the `step` of every leaf; traceable.

    `whole_gradient` computes a leaf's gradient, not yet scaled, from the given one.
    """
    new_masters: dict[str, jax.Array] = {}
    new_state: dict[str, Any] = {}
    last: Any = ()
    for name, params in by_module(masters).items():
        found = []
        for leaf in params:
            given, last = jax.lax.optimization_barrier((grads[leaf], last))  # in turn
            own = {leaf: params[leaf]}, _part(state[name], leaf, params.keys())
            last = step(*own, {leaf: whole_gradient(leaf, given)})
            found.append(last)
        for params, _ in found:
            new_masters |= params
        new_state[name] = _joined(state[name], [state for _, state in found])
    return new_masters, new_state


def scaled(rule: Rule, scale: jax.Array) -> Rule:
    """Return the rule for gradients that are not yet scaled."""

    def scaled_step(params: Any, state: Any, grads: Any) -> Any:
        grads = jax.tree.map(lambda g: g * scale, grads)
        # All inputs are read before any output is written, so that both can be in
        # place. Data movement stays out of the rule's kernels: otherwise they would be
        # fused with it, and round, differently on unlike meshes.
        return rule(*jax.lax.optimization_barrier((params, state, grads)))

    return scaled_step


def in_eight_bits(rule: Rule, stack: BlockStack) -> Rule:
    """Return the rule for moments that are held as codes."""
    parameters = stack.trained()

    def step_on_codes(params: Any, state: Any, grads: Any) -> Any:
        # separate kernels for codes round the same on all meshes
        seen = jax.lax.optimization_barrier(eight_bits.seen(state))
        params, state = jax.lax.optimization_barrier(rule(params, seen, grads))
        held = eight_bits.held(state, parameters)
        return jax.lax.optimization_barrier((params, held))

    return step_on_codes


def in_turn(rule: Rule, params: Any, state: Any, grads: Any) -> Any:
    """Update a stack's units one after another, in place."""

    def step(unit: jax.Array, held: Any) -> Any:
        take = partial(jax.lax.dynamic_index_in_dim, index=unit, keepdims=False)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=unit, axis=0)
        own = rule(*jax.tree.map(take, (*held, grads)))
        return jax.tree.map(put, held, own)

    (gradient,) = grads.values()
    return jax.lax.fori_loop(0, len(gradient), step, (params, state))


def _part(state: Any, leaf: str, leaves: Any) -> Any:
    """Return the state of a module as if it had only this leaf."""

    def by_leaf(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() <= leaves

    def of_leaf(node: Any) -> Any:
        return {k: v for k, v in node.items() if k == leaf} if by_leaf(node) else node

    return jax.tree.map(of_leaf, state, is_leaf=by_leaf)


def _joined(whole: Any, parts: list[Any]) -> Any:
    """Return a module's state from those of its leaves, which agree on common parts."""
    found = {
        path: value
        for part in parts
        for path, value in jax.tree_util.tree_leaves_with_path(part)
    }
    paths, structure = jax.tree_util.tree_flatten_with_path(whole)
    return jax.tree.unflatten(structure, [found[path] for path, _ in paths])
