# SPDX-License-Identifier: Apache-2.0
"""Divides a device's memory: the one budget of planner and workers.

A reserve is for the framework (the driver's context, the code of its libraries, NCCL's
buffers: all outside JAX's allocator). The allocator of a worker takes the rest when it
starts. A plan may fill the rest except for losses by fragmentation. Planner and checks
use `plan_bytes`, launchers set `GPU_ALLOCATOR_FRACTION`, so every accepted plan can
start. Does not own how much a plan needs (`hetjax/costs/stage_memory.py`).
"""

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Node

# of a GPU; JAX's default of 0.75 would leave a fifth of it unused. Not measured so far
GPU_ALLOCATOR_FRACTION = 0.92
# libtpu keeps its own reserve: it shows 15.75 of 16 GiB (v5e), 30.75 of 32 GiB (v4)
_TPU_ALLOCATOR_FRACTION = 0.96
_FRAGMENTED = 0.02  # of the device


def plan_bytes(device: str, memory_gib: float) -> float:
    """Return how many bytes a plan may fill of each device of this kind and size.

    A CPU has no reserve: the figure in a cluster file is the limit itself.

    >>> plan_bytes("A100-SXM4-80GB", 80) / 2**30, plan_bytes("cpu", 4) / 2**30
    (72.0, 4.0)
    """
    if device == "cpu":
        return memory_gib * 2**30
    is_tpu = device.startswith("TPU")
    allocated = _TPU_ALLOCATOR_FRACTION if is_tpu else GPU_ALLOCATOR_FRACTION
    return (allocated - _FRAGMENTED) * memory_gib * 2**30


def node_plan_bytes(node: Node) -> float:
    """Return `plan_bytes` for each device of the node. Raises as `device_spec` does."""
    spec = device_spec(node)
    return plan_bytes(spec.name, spec.memory_gib)
