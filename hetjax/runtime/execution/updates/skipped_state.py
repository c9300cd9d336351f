# SPDX-License-Identifier: Apache-2.0
"""Updates the optimizer state at a skipped step: which of its counters increase.

A skipped step counts as a step of the run. So counters of steps, which the
learning-rate schedule reads, increase. It makes no update. So counters of updates,
which correct averages for their short history, stay, as moments do. Rules say which
counter is which. A state with a number that no rule lists is refused, rather than left
unchanged. Does not own these lists (`hetjax/optimizers/`), nor when a step is skipped
(`commit.py`).
"""

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import jax

from hetjax.errors import BadInput
from hetjax.optimizers.moments import Moment
from hetjax.optimizers.table import NUMBERS
from hetjax.stage.eight_bits import HeldMoment


def after_skipped_step(state: Any) -> Any:
    """Return the state after a step without an update: step counters are one higher."""
    if isinstance(state, dict):
        return {key: after_skipped_step(node) for key, node in state.items()}
    if not isinstance(state, tuple):
        return state
    if not _is_named(state):
        return tuple(map(after_skipped_step, state))
    fields = dict(zip(type(state)._fields, state, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    after = {
        name: _plus_one(value.sharding)(value)
        if NUMBERS.get(f"{type(state).__name__}.{name}") == "steps"
        else after_skipped_step(value)
        for name, value in fields.items()
    }
    return type(state)(**after)


def check_numbers(state: Any, parameters: Collection[str]) -> None:
    """Raise BadInput for a number in a module's state that no rule lists.

    `parameters` are the module's, by which moments are kept.
    """
    for name in _unlisted(state, parameters, type(state).__name__):
        raise BadInput(
            got=f"an optimizer whose state has {name}, but no rule says whether a "
            "skipped step changes it",
            allowed="numbers that the rules of training list: "
            + f"{', '.join(sorted(NUMBERS))}; and arrays by parameter",
            fix="list it among the numbers of a rule in hetjax/optimizers/, or use "
            "another optimizer",
        )


def _unlisted(node: Any, parameters: Collection[str], name: str) -> Iterator[str]:
    """Yield names of numbers that are neither listed nor kept by parameter."""
    if isinstance(node, Moment | HeldMoment):
        return
    if isinstance(node, tuple):
        fields = getattr(node, "_fields", range(len(node)))
        for field, value in zip(fields, node, strict=True):
            inner = f"{type(node).__name__}.{field}"
            if inner not in NUMBERS:
                yield from _unlisted(value, parameters, inner)
    elif isinstance(node, dict):
        for key, value in node.items():
            if not (key in parameters and hasattr(value, "dtype")):
                yield from _unlisted(value, parameters, f"{name}[{key!r}]")
    elif jax.tree.leaves(node):
        yield name


def _is_named(node: Any) -> bool:
    return hasattr(node, "_fields")


@cache
def _plus_one(sharding: Any) -> Any:
    return jax.jit(lambda count: count + 1, out_shardings=sharding)
