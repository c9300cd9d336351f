# SPDX-License-Identifier: Apache-2.0
"""The update of a stack whose moments are held in 8 bits, a leaf of a unit at a time.

So no more than that is in fp32 at once of moments, and of scaled gradients. Owns the
order and the state of one leaf. Does not own the rule (`update.py`) nor the codes
(`hetjax/stage/eight_bits.py`).
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
    rule: Rule,
    stack: BlockStack,
    masters: dict[str, jax.Array],
    state: dict[str, Any],
    grads: dict[str, jax.Array],
    scale: jax.Array,
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Traceable: masters and state after a step; gradients are still to be scaled."""
    parameters = stack.trained()

    def one(params: Any, state: Any, grads: Any) -> Any:
        grads = jax.tree.map(lambda g: g * scale, grads)
        # what is read is read before anything is written, so that both can be in place;
        # as in `update.py`, data movement stays out of the rule's kernels
        params, state, grads = jax.lax.optimization_barrier((params, state, grads))
        # codes in kernels of their own, which round the same on all meshes
        seen = jax.lax.optimization_barrier(eight_bits.seen(state))
        params, state = jax.lax.optimization_barrier(rule(params, seen, grads))
        held = eight_bits.held(state, parameters)
        return jax.lax.optimization_barrier((params, held))

    step = partial(_in_turn, one) if stack.stacked else one
    new_masters: dict[str, jax.Array] = {}
    new_state: dict[str, Any] = {}
    last: Any = ()
    for name, params in by_module(masters).items():
        found = []
        for leaf in params:
            own = {leaf: params[leaf]}, _part(state[name], leaf, params.keys())
            own, last = jax.lax.optimization_barrier((own, last))  # one after another
            last = step(*own, {leaf: grads[leaf]})
            found.append(last)
        for params, _ in found:
            new_masters |= params
        new_state[name] = _joined(state[name], [state for _, state in found])
    return new_masters, new_state


def _in_turn(one: Rule, params: Any, state: Any, grads: Any) -> Any:
    """The updates of a stack's units, one after another and in place."""

    def step(unit: jax.Array, held: Any) -> Any:
        take = partial(jax.lax.dynamic_index_in_dim, index=unit, keepdims=False)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=unit, axis=0)
        own = one(*jax.tree.map(take, (*held, grads)))
        return jax.tree.map(put, held, own)

    (gradient,) = grads.values()
    return jax.lax.fori_loop(0, len(gradient), step, (params, state))


def _part(state: Any, leaf: str, leaves: Any) -> Any:
    """The state of a module as if it had this leaf alone."""

    def by_leaf(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() <= leaves

    def of(node: Any) -> Any:
        return {k: v for k, v in node.items() if k == leaf} if by_leaf(node) else node

    return jax.tree.map(of, state, is_leaf=by_leaf)


def _joined(whole: Any, parts: list[Any]) -> Any:
    """The state of a module from those of its leaves; what they share they agree on."""
    found = {
        path: value
        for part in parts
        for path, value in jax.tree_util.tree_leaves_with_path(part)
    }
    paths, structure = jax.tree_util.tree_flatten_with_path(whole)
    return jax.tree.unflatten(structure, [found[path] for path, _ in paths])
