# SPDX-License-Identifier: Apache-2.0
"""Continues a text through one module, which keeps state of earlier positions.

Owns the empty state of a `PositionWise` module, and the refusal of modules that cannot
continue a text. Does not own the protocol (`model.py`), nor the sequence of modules and
where they run (`hetjax/serving/`, `hetjax/stage/`).
"""

from collections.abc import Iterable
from typing import Any

import jax

from hetjax.errors import BadInput
from hetjax.models.model import (
    Continuing,
    ModuleSpec,
    Params,
    PositionWise,
    bind,
)


def room(spec: ModuleSpec, params: Params, num_positions: int) -> Any:
    """Return arrays with room for the module's state of one text."""
    module = bind(spec, params)
    return module.keeps(num_positions) if isinstance(module, Continuing) else ()


def continued(
    spec: ModuleSpec, params: Params, x: jax.Array, kept: Any, start: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the output for the positions from `start` on, and the new state."""
    module: Any = bind(spec, params)
    if isinstance(module, Continuing):
        return module.continued(x, kept, start)
    return module(x), kept


def check_continuing(specs: Iterable[ModuleSpec]) -> None:
    """Raise BadInput for a module that cannot continue a text."""
    for spec in specs:
        if not issubclass(spec.cls, PositionWise | Continuing):
            raise BadInput(
                got=f"a model whose module {spec.cls.__name__} cannot continue a text",
                allowed="modules that are PositionWise, or that have `keeps` and "
                "`continued` (hetjax.models.model.Continuing)",
                fix="make it one of these; hetjax eval needs neither",
            )
