# SPDX-License-Identifier: Apache-2.0
"""Help on the few options of a command that most people need.

Owns how the others are left out of what Tyro prints. Does not own which they are (the
commands' own files) nor the options (`options.py`).
"""

from collections.abc import Collection
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro


def with_help_of(
    default: Any, shown: Collection[str], description: str
) -> tuple[Any, str]:
    """Return options and a description whose help has these dotted fields alone."""
    more = f"{description}\n\nThese are the usual options; --help-all lists them all."
    return _with_help_of(default, frozenset(shown)), more


def _with_help_of(default: Any, shown: frozenset[str]) -> Any:
    """The same values in a class of its own, whose other fields Tyro does not show."""
    kind, values, changed = type(default), {}, []
    types = get_type_hints(kind, include_extras=True)
    for each in fields(default):
        name, value = each.name, getattr(default, each.name)
        inner = {x.partition(".")[2] for x in shown if x.partition(".")[0] == name}
        if is_dataclass(value) and inner:
            value = _with_help_of(value, frozenset(inner))
            changed.append((name, type(value), field(default=value)))
        elif not inner:
            hidden = Annotated[types[name], tyro.conf.Suppress]
            changed.append((name, hidden, field(default=value)))
        values[name] = value
    return make_dataclass(
        kind.__name__, changed, bases=(kind,), frozen=True, kw_only=True
    )(**values)
