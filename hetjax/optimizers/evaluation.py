# SPDX-License-Identifier: Apache-2.0
"""Finds the weights at which a model is validated, sampled and exported, by rule.

Does not own how a rule finds them (its file), nor when (`hetjax/runtime/execution/`).
"""

from typing import Any

import jax

from hetjax.optimizers.table import EVALUATION


def evaluates_elsewhere(state: Any) -> bool:
    """Whether a rule evaluates at other weights than it trains, by the rule's state."""
    return any(map(_says_where, jax.tree.leaves(state, is_leaf=_says_where)))


def evaluation_weights(state: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights to evaluate, by leaf, from the trained weights; traceable."""
    for node in jax.tree.leaves(state, is_leaf=_says_where):
        if _says_where(node):
            # Optax mixes dtypes and ranks, which callers may have forbidden
            with (
                jax.numpy_dtype_promotion("standard"),
                jax.numpy_rank_promotion("allow"),
            ):
                return EVALUATION[type(node).__name__](node, weights)
    return weights


def _says_where(node: Any) -> bool:
    return type(node).__name__ in EVALUATION
