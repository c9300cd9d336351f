# SPDX-License-Identifier: Apache-2.0
"""What XLA is asked: to compute during collectives, and to give the same bits again.

Owns the options of the compilers for GPUs and TPUs that are off by default: those that
the compiled schedule shows to be of use (`docs/how/compiled.md`), and what a
deterministic run asks for. Does not own how an update rounds on CPUs (`update.py`).
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
# Only GPUs compute in an order that is another one each time. This excludes such
# operations; and it chooses kernels without timing them, so that a program that is
# compiled again, here or elsewhere, is the same one.
_DETERMINISTIC = {"gpu": {"xla_gpu_deterministic_ops": True}}
# An all-reduce fused with a product takes 16 MiB of vector memory and more, which is
# all that these have: the compiler refuses.
_SMALL_VMEM = ("TPU v2", "TPU v3", "TPU v4")


def compiler_options(mesh: Mesh, *, deterministic: bool) -> dict[str, Any]:
    """Return the options of programs on the mesh.

    One device has no collectives. CPUs have no options, and TPUs none for determinism:
    they are deterministic as they are.
    """
    device = mesh.devices.flat[0]
    found = dict(_DETERMINISTIC.get(device.platform, {})) if deterministic else {}
    if mesh.devices.size == 1:
        return found
    found |= _OPTIONS.get(device.platform, {})
    if device.device_kind.startswith(_SMALL_VMEM):
        del found[_FUSED]
    return found
