# SPDX-License-Identifier: Apache-2.0
"""A text goes on through one module, which keeps something of the positions before.

Owns what a module that is `PositionWise` does instead of keeping, and the refusal of
modules that cannot go on. Does not own the protocol (`model.py`), nor which modules
follow each other where (`hetjax/serving/`, `hetjax/stage/`).
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
    """Give room (arrays) for what the module keeps of one text."""
    module = bind(spec, params)
    return module.keeps(num_positions) if isinstance(module, Continuing) else ()


def continued(
    spec: ModuleSpec, params: Params, x: jax.Array, kept: Any, start: jax.Array
) -> tuple[jax.Array, Any]:
    """Give the output for the positions from `start` on, and what is kept then."""
    module: Any = bind(spec, params)
    if isinstance(module, Continuing):
        return module.continued(x, kept, start)
    return module(x), kept


def check_continuing(specs: Iterable[ModuleSpec]) -> None:
    """Raise BadInput for a module that cannot go on after others."""
    for spec in specs:
        if not issubclass(spec.cls, PositionWise | Continuing):
            raise BadInput(
                got=f"a model with a module {spec.cls.__name__}, that says nothing of "
                "how a text goes on",
                allowed="modules that are PositionWise, or that have `keeps` and "
                "`continued` (hetjax.models.model.Continuing)",
                fix="let it be one of these; hetjax eval needs neither",
            )
