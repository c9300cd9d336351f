# SPDX-License-Identifier: Apache-2.0
"""Marks the moments of a rule's state that are kept in 8 bits between two updates.

Owns the mark, by which other code finds moments without knowing any rule. Does not own
which moments have it (the rules' files) nor codes (`hetjax/stage/eight_bits.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax


@partial(
    jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["signed"]
)
@dataclass(frozen=True, slots=True)
class Moment:
    """fp32 values of a moment, by leaf; a rule sees the values alone."""

    values: dict[str, Any]
    signed: bool


def marked(state: Any, moments: Mapping[str, str]) -> Any:
    """Return the state with these moments marked: Optax's `State.field` -> signs."""
    kinds = {name.partition(".")[0] for name in moments}

    def has_moments(node: Any) -> bool:
        return type(node).__name__ in kinds

    def mark(node: Any) -> Any:
        if not has_moments(node):
            return node
        found = {
            name: Moment(getattr(node, name), signs == "signed")
            for name in node._fields
            if (signs := moments.get(f"{type(node).__name__}.{name}"))
        }
        return node._replace(**found)

    return jax.tree.map(mark, state, is_leaf=has_moments)


def unmarked(state: Any) -> Any:
    """Return the state without marks, as the rule made it."""

    def values(node: Any) -> Any:
        return node.values if isinstance(node, Moment) else node

    return jax.tree.map(values, state, is_leaf=lambda node: isinstance(node, Moment))
