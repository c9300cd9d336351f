# SPDX-License-Identifier: Apache-2.0
"""A whole model on one device, as one function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.models.model import Model, ModuleSpec, Params, abstract_params, apply, bind

Weights = Callable[[str, tuple[int, ...]], np.ndarray]


def parameters(model: Model, weights: Weights) -> dict[str, Params]:
    """Return all parameters, by the path of their module."""
    return {
        spec.path: {
            name: jnp.asarray(weights(f"{spec.path}.{name}", parameter.shape))
            for name, parameter in abstract_params(spec).items()
        }
        for spec in model.modules
    }


def logits(
    model: Model, params: dict[str, Params], tokens_BL: np.ndarray
) -> np.ndarray:
    """Return fp32 logits_BLV of the vocabulary, without padding."""

    def called(params: dict[str, Params], tokens_BL: jax.Array) -> jax.Array:
        x = tokens_BL
        for spec in model.modules[:-1]:
            x, _ = apply(spec, _with_tied(spec, params), x)
        head: Any = bind(model.modules[-1], _with_tied(model.modules[-1], params))
        return head.logits(x)

    with jax.default_matmul_precision("float32"):
        found_BLV = jax.jit(called)(params, jnp.asarray(tokens_BL))
    return np.asarray(found_BLV)[..., : model.vocab_size]


def _with_tied(spec: ModuleSpec, params: dict[str, Params]) -> Params:
    """Add the parameters that the module shares, found by their full path."""
    shared = {}
    for own, path in spec.tied:
        owner, _, name = path.rpartition(".")
        shared[own] = params[owner][name]
    return params[spec.path] | shared
