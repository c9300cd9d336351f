# SPDX-License-Identifier: Apache-2.0
"""Identifies a model to a plan by its layers and the shapes of their parameters.

Owns the fingerprint in plan files. It covers the model before fine-tuning: layers in
order, paths of their modules, names and shapes of parameters, and tied parameters. It
does not depend on the model's name, its vocabulary before padding, the choice of
trained parameters, adapters, quantisation, precision, sequence length or plan, nor on
the versions of JAX and Flax.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from hetjax.models.model import Model, ModuleSpec, abstract_params

_NUM_DIGITS = 16  # 64 bits: models are distinguished, not signed


@cache
def fingerprint(model: Model) -> str:
    """Return 16 hexadecimal digits, equal for models of equal layers and shapes."""
    layers = [list(map(_module, layer.modules)) for layer in model.layers]
    text = json.dumps(layers, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_NUM_DIGITS]


def _module(spec: ModuleSpec) -> list[object]:
    """Return the module's path, the shapes of its own parameters, and its tied ones."""
    # equal modules of many layers share one cache entry
    whole = replace(spec, path="", frozen=(), adapters=(), frozen_as=None)
    return [spec.path, dict(_shapes(whole)), dict(spec.tied)]


def _shapes(spec: ModuleSpec) -> Iterator[tuple[str, list[int]]]:
    for name, parameter in abstract_params(spec).items():
        yield name, list(parameter.shape)
