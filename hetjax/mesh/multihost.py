# SPDX-License-Identifier: Apache-2.0
"""Meshes that span the processes of one island on several hosts, and arrays on them.

Owns the settings of `jax.distributed`, the order of devices, and making arrays from
host values and reading them back. The first process of a world has the service that all
others depend on: they end with it. A process that has devices of a mesh is a member of
it, and the member with the lowest index leads. On a mesh of one process everything is
as JAX does it. Does not own which hosts belong together, nor who is a member by plan.
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
        return host_copy(x)
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


# long: a starved process is not a dead one, and those that are lost are reported by
# the controller (`hetjax/comm/heart.py`)
_HEARTBEAT_S = 120
_JOIN_S = 120
_LEAVE_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One process's place in a world; `address` is where the first one serves it."""

    address: str
    count: int
    index: int


def join_world(world: World) -> None:
    """Become part of it; has to come before the first use of devices."""
    # of CPU devices; without it they have no collectives between processes
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # else a process that dies takes all others with it, not only the first one
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        world.address,
        world.count,
        world.index,
        coordinator_bind_address=world.address,  # by default on all interfaces
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        initialization_timeout=_JOIN_S,
        shutdown_timeout_seconds=_LEAVE_S,
    )


def leave_world() -> None:
    """Part from the others in good order; the first process has to be the last."""
    jax.distributed.shutdown()


def world_devices(index: int, count: int, per_host: int) -> list[jax.Device]:
    """So many devices of each of `count` processes, in (host, local id) order.

    BadInput unless this one is number `index` to JAX, or if one has too few.
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
