# SPDX-License-Identifier: Apache-2.0
"""Meshes that span the processes of one island on several hosts, and arrays on them.

Owns the settings of `jax.distributed`, the order of devices, the making of arrays from
host values and the reading of arrays. The first process of a world runs the service
that all others depend on: they end with it. A process with devices of a mesh is a
member of the mesh; the member with the lowest index leads. On a mesh of one process,
JAX's usual functions do the work. Does not own which hosts belong together, nor which
processes a plan makes members.
"""

from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from hetjax.errors import BadInput
from hetjax.mesh.host_copies import host_copy


def is_member(mesh: Mesh) -> bool:
    """Whether this process has devices of the mesh."""
    return mesh.devices.flat[0].client.process_index() in _members(mesh)


def leads(mesh: Mesh) -> bool:
    """Whether this process is the leading member of the mesh."""
    return mesh.devices.flat[0].client.process_index() == min(_members(mesh))


def to_mesh(value: np.ndarray | np.generic, sharding: Sharding | None) -> jax.Array:
    """Return a host value as an array of the sharding; each member places its part.

    All members must pass the same value; none of it crosses between them.
    """
    assert sharding is not None
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    whole = np.asarray(value)
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype
    )


def value_here(x: jax.Array) -> np.ndarray:
    """Return the value of an array that every device has whole; waits for it."""
    return np.asarray(x.addressable_data(0))


def whole_value(x: jax.Array) -> np.ndarray | None:
    """Return a host copy of an array on the process that leads its mesh, else None.

    If the mesh spans processes, this runs a program of all members: they must call it
    in the same order. Waits for the devices.
    """
    if x.is_fully_addressable:
        return host_copy(x)
    mesh = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    assert isinstance(mesh, Mesh), x.sharding
    made = x if x.is_fully_replicated else _replicate(mesh)(x)
    if leads(mesh):
        return np.array(made.addressable_data(0))
    jax.block_until_ready(made)  # so that only one whole array exists at a time
    return None


def _members(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


@lru_cache(maxsize=64)
def _replicate(mesh: Mesh):
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


# long: a starved process is not dead, and the controller reports those that are lost
# (`hetjax/comm/heart.py`)
_HEARTBEAT_S = 120
_JOIN_S = 120
_LEAVE_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One process's place in a world, which the first process serves at `address`."""

    address: str
    count: int
    index: int


def join_world(world: World) -> None:
    """Join the world; has to come before the first use of devices."""
    # CPU devices have no collectives between processes without it
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # without it, any process that dies ends all others; with it, only the first does
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        world.address,
        world.count,
        world.index,
        coordinator_bind_address=world.address,  # the default is all interfaces
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        initialization_timeout=_JOIN_S,
        shutdown_timeout_seconds=_LEAVE_S,
    )


def leave_world() -> None:
    """Leave the world in good order; the first process has to leave last."""
    jax.distributed.shutdown()


def world_devices(index: int, count: int, per_host: int) -> list[jax.Device]:
    """Return `per_host` devices of each of `count` hosts, in (host, local id) order.

    Raises BadInput unless this process is number `index` to JAX, or if one has too few.
    """
    if (jax.process_index(), jax.process_count()) != (index, count):
        raise BadInput(
            got=f"host {index} of {count}, which is process {jax.process_index()} of "
            f"{jax.process_count()} to JAX",
            allowed="all hosts of a node, in the order in which their devices are "
            "joined",
            fix="name its machines in that order",
        )
    found: list[jax.Device] = []
    for host in range(count):
        own = [d for d in jax.devices() if d.process_index == host]
        if len(own) < per_host:
            raise BadInput(
                got=f"{len(own)} devices on host {host} of {count}",
                allowed=f"{per_host} on each host, as many as the cluster file says",
                fix="correct count or hosts of that node in the cluster file",
            )
        found += sorted(own, key=lambda device: device.id)[:per_host]
    return found
