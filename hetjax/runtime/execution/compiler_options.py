# SPDX-License-Identifier: Apache-2.0
"""What XLA is told, so that collectives run while a device computes.

Owns the options of the compilers for GPUs and TPUs that are off by default and that the
compiled schedule shows to be of use (`docs/how/compiled.md`). Does not own options that
change what is computed (`update.py`).
"""

from typing import Any

from jax.sharding import Mesh

# Off by default but on Hopper and Blackwell: an all-reduce is awaited where its result
# is read, not where it starts.
_GPU = {"xla_gpu_enable_latency_hiding_scheduler": True}
_FUSED = "xla_tpu_enable_async_collective_fusion_fuse_all_reduce"
# By default a TPU waits for an all-reduce. With these its steps go into the products
# that run meanwhile, several of them.
_TPU = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion": True,
    _FUSED: True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
_OPTIONS = {"gpu": _GPU, "tpu": _TPU}  # by JAX's word for the platform
# An all-reduce fused with a product takes 16 MiB of vector memory and more, which is
# all that these have: the compiler refuses.
_SMALL_VMEM = ("TPU v2", "TPU v3", "TPU v4")


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Return the options of programs on the mesh; one device and CPUs have none."""
    if mesh.devices.size == 1:
        return {}
    device = mesh.devices.flat[0]
    found = dict(_OPTIONS.get(device.platform, {}))
    if device.device_kind.startswith(_SMALL_VMEM):
        del found[_FUSED]
    return found
