# SPDX-License-Identifier: Apache-2.0
"""Loads observers by what a user types or passes: a tracker's name, code, or a value.

Owns the names of trackers, and the refusal of what is no observer. Does not own the
trackers: each is imported only on request, as its library may not be installed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetjax.errors import BadInput
from hetjax.files.importing import NamedCode, names_code
from hetjax.training.observers.observer import Observer

GivenObserver = Observer | Callable[[], Observer] | str

_TRACKERS = {  # module of this folder and its class; extras have the same names
    "prometheus": "prometheus:PrometheusObserver",
    "tensorboard": "tensorboard:TensorBoardObserver",
    "wandb": "weights_and_biases:WandbObserver",
}
_ALLOWED = (
    f"{', '.join(_TRACKERS)}, or package.module:name of a hetjax.Observer, or of a "
    "class or function without arguments that gives one"
)


@dataclass(frozen=True, slots=True)
class ObserverSource:
    """What makes an observer, or is one, and the name that users see."""

    name: str
    given: Any

    def observer(self) -> Observer:
        """Return the observer; raises as its maker does, TypeError if it is none."""
        found = self.given
        if isinstance(found, type) or not isinstance(found, Observer):
            found = found()
        if not isinstance(found, Observer):
            raise TypeError(f"a {type(found).__name__} is not a hetjax.Observer")
        return found


def observer_sources(given: Sequence[GivenObserver]) -> tuple[ObserverSource, ...]:
    """Return the sources of observers; import those that are named, but make none.

    Raises BadInput for what cannot be an observer.
    """
    return tuple(_named(x) if isinstance(x, str) else _passed(x) for x in given)


def _named(name: str) -> ObserverSource:
    if name in _TRACKERS:
        return ObserverSource(name, _tracker(name))
    if not names_code(name):
        raise BadInput(
            got=f"observer {name!r}",
            allowed=_ALLOWED,
            fix="--observer tensorboard",
        )
    code = NamedCode(
        name=name,
        what="observer",
        kind="name",
        where="here",
        fix="give a class of your own that subclasses hetjax.Observer",
    )
    return _checked(code, code.imported())


def _passed(value: Any) -> ObserverSource:
    home = value if hasattr(value, "__qualname__") else type(value)
    name = f"{home.__module__}:{home.__qualname__}"
    code = NamedCode(name=name, what="observer", kind="name", where="", fix="")
    return _checked(code, value)


def _checked(code: NamedCode, found: Any) -> ObserverSource:
    is_one = isinstance(found, Observer) and not isinstance(found, type)
    if not is_one and callable(found):
        code.check_takes_nothing(found)
    elif not is_one:
        raise BadInput(
            got=f"observer {code.name}, which is a {type(found).__name__}",
            allowed=_ALLOWED,
            fix="let it subclass hetjax.Observer",
        )
    return ObserverSource(code.name, found)


def _tracker(name: str) -> Any:
    from importlib import import_module

    module, _, kind = _TRACKERS[name].partition(":")
    try:
        return getattr(import_module(f"hetjax.training.observers.{module}"), kind)
    except ImportError as error:
        raise BadInput(
            got=f"observer {name}: {error}",
            allowed=f"{name} where its library is installed",
            fix=f"pip install 'hetjax[{name}]'",
        ) from error
