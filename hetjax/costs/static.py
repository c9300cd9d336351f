# SPDX-License-Identifier: Apache-2.0
"""Bytes that live on a device through the whole step: weights, state, accumulators.

Owns how parameters lie on the stage's mesh: compute weights cut over `tensor`, masters
and optimizer state also over `data` where that divides, one fp32 accumulator per data
rank. Does not own what lives shorter (`memory.py`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.costs.runs import StageRuns
from hetjax.models.model import AbstractParam
from hetjax.plans.plan import StageMesh

# What Optax calls `init`: parameters by leaf name -> the optimizer's state
OptimizerInit = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBytes:
    """Bytes on each device of the stage; `copies` are compute weights that are not
    the masters themselves, `accumulators` include the loss."""

    masters: int
    optimizer: int
    copies: int
    accumulators: int

    @property
    def total(self) -> int:
        return self.masters + self.optimizer + self.copies + self.accumulators


def adam_state(params: dict[str, Any]) -> Any:
    """Give the state of Adam: two moments of every parameter, and a count."""
    return {"count": jnp.zeros((), jnp.int32), "mu": params, "nu": params}


@lru_cache(maxsize=4096)
def static_bytes(
    stage: StageRuns, mesh: StageMesh, dtype: str, optimizer: OptimizerInit
) -> StaticBytes:
    """Add up what the stage holds from the first action of a step to the last."""
    held = list(_held(stage))
    itemsize = jnp.dtype(dtype).itemsize
    masters = [units * _master_size(param, mesh) for units, param in held]
    weights = [units * _weight_size(param, mesh) for units, param in held]
    pairs = zip(weights, masters, strict=True)
    return StaticBytes(
        masters=4 * sum(masters),
        optimizer=_optimizer_bytes(stage, mesh, optimizer),
        copies=itemsize * sum(w for w, m in pairs if itemsize != 4 or w != m),
        accumulators=4 * sum(weights) + 4,
    )


def weight_bytes(stage: StageRuns, mesh: StageMesh) -> int:
    """Give the fp32 bytes of the stage's weights on a device, cut over tensor alone."""
    return 4 * sum(units * _weight_size(param, mesh) for units, param in _held(stage))


def _held(stage: StageRuns) -> Iterator[tuple[int, AbstractParam]]:
    for run in stage.runs:
        for param in run.params().values():
            yield run.num_units, param
    for _, param in stage.borrowed:
        yield 1, param


def _modules(stage: StageRuns) -> Iterator[tuple[int, dict[str, AbstractParam]]]:
    """(number of units, parameters by leaf name) of every module held."""
    for run in stage.runs:
        for module in run.unit:
            prefix = f"{module.name}."
            own = {k: v for k, v in run.params().items() if k.startswith(prefix)}
            if own:
                yield run.num_units, own
    for path, param in stage.borrowed:
        yield 1, {path: param}


def _weight_size(param: AbstractParam, mesh: StageMesh) -> int:
    cut = mesh.tensor if any(param.logical) else 1
    return math.prod(param.shape) // cut


def _master_size(param: AbstractParam, mesh: StageMesh) -> int:
    size = _weight_size(param, mesh)
    for name, dim in zip(param.logical, param.shape, strict=True):
        if name is not None:
            return size // mesh.data if dim % (mesh.tensor * mesh.data) == 0 else size
    divides = any(dim % mesh.data == 0 for dim in param.shape)
    return size // mesh.data if divides else size


def _optimizer_bytes(
    stage: StageRuns, mesh: StageMesh, optimizer: OptimizerInit
) -> int:
    """State leaves shaped and named like a parameter lie like its master, others whole;
    the optimizer sees one module of one unit at a time."""
    total = 0
    for units, params in _modules(stage):
        abstract = {
            leaf: jax.ShapeDtypeStruct(param.shape, jnp.float32)
            for leaf, param in params.items()
        }
        state = jax.eval_shape(optimizer, abstract)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            param = params.get(str(getattr(path[-1], "key", "")) if path else "")
            size = math.prod(leaf.shape)
            if param is not None and param.shape == leaf.shape:
                size = _master_size(param, mesh)
            total += units * size * leaf.dtype.itemsize
    return total
