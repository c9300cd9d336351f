# SPDX-License-Identifier: Apache-2.0
"""Bytes that live on a device through the whole step: weights, state, accumulators.

Owns their sum, unit by unit: equal units are counted once. Does not own how arrays lie
on the stage's mesh (`hetjax/stage/arrays.py`) nor what lives shorter
(`stage_memory.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from hetjax.mesh.axes import abstract_mesh
from hetjax.plans.plan import StageMesh
from hetjax.stage.arrays import (
    OptimizerInit,
    accumulators,
    compute_weights,
    copied_weights,
    device_bytes,
    master_weights,
    optimizer_state,
)
from hetjax.stage.partition import BlockStack


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


def static_bytes(
    stacks: Sequence[BlockStack], mesh: StageMesh, dtype: str, optimizer: OptimizerInit
) -> StaticBytes:
    """Add up what the stage holds from the first action of a step to the last."""
    held = [
        (
            stack.num_units,
            _unit_bytes(replace(stack, num_units=1), mesh, dtype, optimizer),
        )
        for stack in stacks
    ]
    return StaticBytes(
        masters=sum(units * one.masters for units, one in held),
        optimizer=sum(units * one.optimizer for units, one in held),
        copies=sum(units * one.copies for units, one in held),
        accumulators=sum(units * one.accumulators for units, one in held) + 4,
    )


def weight_bytes(stacks: Sequence[BlockStack], mesh: StageMesh) -> int:
    """Give the fp32 bytes of weights on a device, cut over tensor alone."""
    on = abstract_mesh(data=mesh.data, tensor=mesh.tensor)
    return device_bytes(compute_weights(stacks, on, jnp.float32))


@lru_cache(maxsize=4096)
def _unit_bytes(
    unit: BlockStack, mesh: StageMesh, dtype: str, optimizer: OptimizerInit
) -> StaticBytes:
    on = abstract_mesh(data=mesh.data, tensor=mesh.tensor)
    weights, masters = compute_weights([unit], on, dtype), master_weights([unit], on)
    return StaticBytes(
        masters=device_bytes(masters),
        optimizer=device_bytes(optimizer_state([unit], masters, optimizer)),
        copies=device_bytes(copied_weights(weights, masters)),
        accumulators=device_bytes(accumulators(weights)),
    )
