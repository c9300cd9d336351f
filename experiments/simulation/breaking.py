# SPDX-License-Identifier: Apache-2.0
"""Breaks a rule of the protocol for the duration of a `with`.

Owns the replacement of the product's functions, methods and reactions. Does not own the
rules (`broken_messages.py`, `broken_recovery.py`, `broken_store.py`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

Break = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A rule of `docs/how/protocol.md`, by its number, with a check left out."""

    rule: int
    what: str
    breaks: tuple[Break, ...]

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Let the product break the rule within this context."""
        with ExitStack() as stack:
            for broken in self.breaks:
                stack.enter_context(broken())
            yield


def breaks(rule: int, what: str, *breaks: Break) -> Mutation:
    return Mutation(rule, what, breaks)


def function(original: Callable[..., Any], other: Callable[..., Any]) -> Break:
    """Replace a function under every name by which it was imported."""

    @contextmanager
    def broken() -> Iterator[None]:
        with ExitStack() as stack:
            for module in _modules():
                for name, value in [*vars(module).items()]:
                    if value is original:
                        stack.enter_context(patch.object(module, name, other))
            yield

    return broken


def _modules() -> list[ModuleType]:
    """Return the modules of the product and of the simulation.

    Modules of broken rules are left out: they need the originals.
    """
    found = [*sys.modules.values()]
    run = ("hetjax.", "experiments.simulation.")
    return [
        module
        for module in found
        if module.__name__.startswith(run) and ".broken_" not in module.__name__
    ]


def method(owner: object, name: str, other: object) -> Break:
    return lambda: patch.object(owner, name, other)


def handler(react: Any, event: type, other: Callable[..., Any]) -> Break:
    """Replace the reaction to this kind of event."""

    @contextmanager
    def broken() -> Iterator[None]:
        original = react.registry[event]
        react.register(event, other)
        try:
            yield
        finally:
            react.register(event, original)

    return broken


def events(react: Any, event: type, other: Callable[[Any, Any], Any]) -> Break:
    """Pass `other(event, state)` to the reaction, or skip it if that is None."""
    original = react.registry[event]

    def reaction(found: Any, state: Any, *now_s: float) -> Any:
        taken = other(found, state)
        return (state, ()) if taken is None else original(taken, state, *now_s)

    return handler(react, event, reaction)
