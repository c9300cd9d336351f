# SPDX-License-Identifier: Apache-2.0
"""Exact counts of layers: parameters, bytes, FLOPs, sizes cut by tensor parallelism.

Legend: B sequences, L positions, D residual width.
Owns counting, for any module of the protocol. Does not own times nor memory
(`costs/`).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from hetjax.models.model import (
    Layer,
    Model,
    ModuleSpec,
    abstract_params,
    apply,
)


def parameter_count(layer: Layer) -> int:
    """Count the parameters that the layer owns; a tied one is its owner's alone."""
    return sum(
        math.prod(param.shape)
        for spec in layer.modules
        for param in abstract_params(spec).values()
    )


def forward_flops(model: Model, seq_len: int) -> tuple[int, ...]:
    """Count each layer's forward FLOPs for one sequence.

    Only matrix products count, 2 per multiply-add. Causal attention counts in full,
    as it is computed where no kernel skips the masked half.
    """
    tokens_BL = jax.ShapeDtypeStruct((1, seq_len), jnp.int32)
    known: dict[tuple[Any, ...], tuple[int, Any]] = {}
    inputs: tuple[Any, ...] = (tokens_BL,)
    last = model.modules[-1]
    flops = []
    for layer in model.layers:
        flops.append(0)
        for spec in layer.modules:
            if spec is last:
                inputs = (*inputs, tokens_BL)
            key = (spec.cls, spec.config, *((i.shape, i.dtype) for i in inputs))
            if key not in known:
                known[key] = _module_flops(spec, inputs)
            module_flops, output = known[key]
            flops[-1] += module_flops
            inputs = (output,)
    return tuple(flops)


def tensor_sizes(model: Model) -> dict[str, tuple[int, ...]]:
    """Give the sizes that a tensor-parallel degree must divide, by logical axis."""
    sizes: dict[str, set[int]] = {}
    for spec in dict.fromkeys(replace(m, path="", tied=()) for m in model.modules):
        for param in abstract_params(spec).values():
            for size, name in zip(param.shape, param.logical, strict=True):
                if name is not None:
                    sizes.setdefault(name, set()).add(size)
    return {name: tuple(sorted(found)) for name, found in sorted(sizes.items())}


def _module_flops(spec: ModuleSpec, inputs: tuple[Any, ...]) -> tuple[int, Any]:
    untied = replace(spec, tied=())
    params = {
        name: jax.ShapeDtypeStruct(param.shape, jnp.float32)
        for name, param in abstract_params(untied).items()
    }

    def forward(params: dict[str, jax.Array], *inputs: jax.Array) -> jax.Array:
        return apply(untied, params, *inputs)[0]

    jaxpr, output = jax.make_jaxpr(forward, return_shape=True)(params, *inputs)
    return _jaxpr_flops(jaxpr.jaxpr), output


def _jaxpr_flops(jaxpr: Jaxpr) -> int:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> int:
    if equation.primitive.name == "dot_general":
        return _dot_flops(equation)
    inner = [_jaxpr_flops(jaxpr) for jaxpr in _inner_jaxprs(equation.params)]
    if equation.primitive.name == "cond":
        return max(inner)
    repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
    return repeats * sum(inner)


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs, out = equation.invars[0].aval, equation.outvars[0].aval
    return 2 * math.prod(out.shape) * math.prod(lhs.shape[dim] for dim in contracted)


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for leaf in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
        if isinstance(leaf, ClosedJaxpr):
            yield leaf.jaxpr
        elif isinstance(leaf, Jaxpr):
            yield leaf


def _is_jaxpr(leaf: Any) -> bool:
    return isinstance(leaf, ClosedJaxpr | Jaxpr)
