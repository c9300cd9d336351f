# SPDX-License-Identifier: Apache-2.0
"""What a skipped step does to the optimizer state: which of its counters go on.

A skipped step counts as a step of the run, so counters of steps, which the
learning-rate schedule reads, go on. It makes no update, so counters of updates, which
correct averages for their short history, stay, as moments do. The table says which
counter is which; a state with a number that it does not list is refused, rather than
left behind. Does not own when a step is skipped (`commit.py`).
"""

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, Literal

import jax
import optax
from optax.contrib import MuonState

from hetjax.errors import BadInput
from hetjax.stage.eight_bits import HeldMoment, Moment

# All numbers in Optax's states that are not kept per parameter, by state and field
NUMBERS: dict[tuple[type, str], Literal["steps", "updates", "constant"]] = {
    (optax.ScaleByScheduleState, "count"): "steps",  # the learning rate of the step
    (optax.ScaleByAdamState, "count"): "updates",  # bias correction, lamb's too
    (optax.ScaleByLionState, "count"): "updates",  # read by nothing
    (optax.FactoredState, "count"): "updates",  # adafactor's decay, 1 - t**-0.8
    (MuonState, "count"): "updates",  # bias correction
    (MuonState, "ns_coeffs"): "constant",  # of the Newton-Schulz iteration
}


def after_skipped_step(state: Any) -> Any:
    """The state after a step without an update: counters of steps are one higher."""
    if isinstance(state, dict):
        return {key: after_skipped_step(node) for key, node in state.items()}
    if not isinstance(state, tuple):
        return state
    if not _is_named(state):
        return tuple(map(after_skipped_step, state))
    fields = dict(zip(type(state)._fields, state, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    after = {
        name: _plus_one(value.sharding)(value)
        if NUMBERS.get((type(state), name)) == "steps"
        else after_skipped_step(value)
        for name, value in fields.items()
    }
    return type(state)(**after)


def check_numbers(state: Any, parameters: Collection[str]) -> None:
    """Raise BadInput for a number in a module's state that NUMBERS does not list.

    `parameters` are the module's, by which moments are kept.
    """
    for name in _unlisted(state, parameters, type(state).__name__):
        raise BadInput(
            got=f"an optimizer whose state has {name}, and nothing says whether a "
            "skipped step changes it",
            allowed="numbers that the table of skipped steps lists: "
            + ", ".join(sorted({f"{kind.__name__}.{field}" for kind, field in NUMBERS}))
            + "; and arrays by parameter",
            fix="list it in NUMBERS of hetjax/runtime/execution/skipped_state.py, or "
            "use another optimizer",
        )


def _unlisted(node: Any, parameters: Collection[str], name: str) -> Iterator[str]:
    """Names of numbers that are neither listed nor kept by parameter."""
    if isinstance(node, Moment | HeldMoment):
        return
    if isinstance(node, tuple):
        fields = getattr(node, "_fields", range(len(node)))
        for field, value in zip(fields, node, strict=True):
            if (type(node), field) not in NUMBERS:
                yield from _unlisted(
                    value, parameters, f"{type(node).__name__}.{field}"
                )
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
