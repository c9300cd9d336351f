# SPDX-License-Identifier: Apache-2.0
"""Arrays on meshes that may span processes: made from host values, and read back.

A process that has devices of such a mesh is a member of it, and the member with the
lowest index leads. On a mesh of one process everything is as JAX does it. Does not own
how processes are joined (`world.py`), nor who is a member by plan.
"""

from functools import lru_cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


def is_member(mesh: Mesh) -> bool:
    """Whether this process has devices of the mesh."""
    return mesh.devices.flat[0].client.process_index() in _members(mesh)


def leads(mesh: Mesh) -> bool:
    """Whether this process is the member that speaks for the mesh."""
    return mesh.devices.flat[0].client.process_index() == min(_members(mesh))


def to_mesh(value: np.ndarray | np.generic, sharding: Sharding | None) -> jax.Array:
    """A host value on the devices of the sharding, each member placing its part.

    All members must give the same value; nothing of it crosses between them.
    """
    assert sharding is not None
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    whole = np.asarray(value)
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype
    )


def value_here(x: jax.Array) -> np.ndarray:
    """The value of an array that every device has whole; waits for it."""
    return np.asarray(x.addressable_data(0))


def whole_value(x: jax.Array) -> np.ndarray | None:
    """A host copy of an array for the process that leads its mesh, None for others.

    A program of all members if the mesh spans processes: they must call this in the
    same order. Waits for the devices.
    """
    if x.is_fully_addressable:
        return np.array(x)
    mesh = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    assert isinstance(mesh, Mesh), x.sharding
    made = x if x.is_fully_replicated else _replicate(mesh)(x)
    if leads(mesh):
        return np.array(made.addressable_data(0))
    jax.block_until_ready(made)  # one copy of one array at a time
    return None


def _members(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


@lru_cache(maxsize=64)
def _replicate(mesh: Mesh):
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
