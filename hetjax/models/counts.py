# SPDX-License-Identifier: Apache-2.0
"""Exact counts of layers: parameters, and sizes cut by tensor parallelism.

Owns counting, for any module of the protocol. Does not own FLOPs, times nor memory
(`hetjax/costs/`).
"""

import math
from dataclasses import replace

from hetjax.models.model import Layer, Model, abstract_params


def parameter_count(layer: Layer) -> int:
    """Count the parameters that the layer owns; a tied one is its owner's alone."""
    return sum(
        math.prod(param.shape)
        for spec in layer.modules
        for param in abstract_params(spec).values()
    )


def tensor_sizes(model: Model) -> dict[str, tuple[int, ...]]:
    """Give the sizes that a tensor-parallel degree must divide, by logical axis."""
    sizes: dict[str, set[int]] = {}
    for spec in dict.fromkeys(replace(m, path="", tied=()) for m in model.modules):
        for param in abstract_params(spec).values():
            for size, name in zip(param.shape, param.logical, strict=True):
                if name is not None:
                    sizes.setdefault(name, set()).add(size)
    return {name: tuple(sorted(found)) for name, found in sorted(sizes.items())}
