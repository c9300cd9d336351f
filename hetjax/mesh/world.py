# SPDX-License-Identifier: Apache-2.0
"""Processes of one island on several hosts, joined so that a mesh can span them.

Owns the settings of `jax.distributed` and the order of devices. The first process has
the service that all others depend on: they end with it. Does not own arrays on such
meshes (`spanning.py`) nor which hosts belong together.
"""

from dataclasses import dataclass

import jax

from hetjax.errors import BadInput

# long: a starved process is not a dead one, and those that are lost are told of by
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
