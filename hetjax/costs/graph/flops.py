# SPDX-License-Identifier: Apache-2.0
"""Counts the forward FLOPs of layers in the traced program.

Legend: B sequences, L positions.
Owns the count of matrix products, for any module of the protocol. Does not own the
model's computation nor seconds (`roofline.py`).
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.costs.graph.joins import RAGGED, ragged_sizes
from hetjax.models.attention.attention import in_form
from hetjax.models.model import Model, ModuleSpec, abstract_params, apply
from hetjax.stage.jaxprs import Jaxpr, JaxprEqn, bodies, is_scan


def forward_flops(model: Model, seq_len: int) -> tuple[int, ...]:
    """Count each layer's forward FLOPs for one sequence.

    Only matrix products count, 2 per multiply-add. Causal attention counts in full, as
    publications count it, whatever form computes it: the trace uses the form that
    skips nothing.
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
            kind = spec.cls, spec.config, spec.adapters
            key = (*kind, *((i.shape, i.dtype) for i in inputs))
            if key not in known:
                known[key] = _module_flops(spec, inputs)
            module_flops, output = known[key]
            flops[-1] += module_flops
            inputs = (output,)
    return tuple(flops)


def _module_flops(spec: ModuleSpec, inputs: tuple[Any, ...]) -> tuple[int, Any]:
    untied = in_form(replace(spec, tied=()), "xla")
    params = {
        name: jax.ShapeDtypeStruct(param.shape, param.held_in(jnp.float32))
        for name, param in abstract_params(untied).items()
    }

    def forward(params: dict[str, jax.Array], *inputs: jax.Array) -> jax.Array:
        return apply(untied, params, *inputs)[0]

    jaxpr, output = jax.make_jaxpr(forward, return_shape=True)(params, *inputs)
    return _jaxpr_flops(jaxpr.jaxpr), output


def _jaxpr_flops(jaxpr: Jaxpr) -> int:
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(equation: JaxprEqn) -> int:
    if equation.primitive.name == "dot_general":
        return _dot_flops(equation)
    if equation.primitive.name == RAGGED:
        return _ragged_flops(equation)
    inner = list(map(_jaxpr_flops, bodies(equation)))
    if equation.primitive.name == "cond":
        return max(inner)
    return sum(inner) * (equation.params["length"] if is_scan(equation) else 1)


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs, out = equation.invars[0].aval, equation.outvars[0].aval
    return 2 * math.prod(out.shape) * math.prod(lhs.shape[dim] for dim in contracted)


def _ragged_flops(equation: Any) -> int:
    shapes = [variable.aval.shape for variable in equation.invars]
    return 2 * math.prod(ragged_sizes(equation.params, shapes))
