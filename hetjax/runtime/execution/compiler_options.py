# SPDX-License-Identifier: Apache-2.0
"""Chooses XLA's options: compute during collectives, and deterministic results.

Owns options of the compilers for GPUs and TPUs that are off by default: those that help
according to the compiled schedule (`docs/how/compiled.md`), and those of a
deterministic run. Does not own how an update rounds on CPUs (`update.py`).
"""

from typing import Any

from jax.sharding import Mesh

# Off by default except on Hopper and Blackwell. With it a program waits for an
# all-reduce where it reads the result, not where the all-reduce starts.
_GPU = {"xla_gpu_enable_latency_hiding_scheduler": True}
_FUSED = "xla_tpu_enable_async_collective_fusion_fuse_all_reduce"
# By default a TPU waits for an all-reduce. With these options its steps are fused into
# the products that run meanwhile, several of them.
_TPU = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion": True,
    _FUSED: True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
_OPTIONS = {"gpu": _GPU, "tpu": _TPU}  # by JAX's platform name
# Only GPUs compute in an order that varies. This option excludes such operations. It
# also chooses kernels without timing them, so that a program that is compiled again,
# here or elsewhere, is the same.
_DETERMINISTIC = {"gpu": {"xla_gpu_deterministic_ops": True}}
# An all-reduce fused with a product takes 16 MiB of vector memory and more, which is
# all that these kinds have: the compiler refuses.
_SMALL_VMEM = ("TPU v2", "TPU v3", "TPU v4")


def compiler_options(mesh: Mesh, *, deterministic: bool) -> dict[str, Any]:
    """Return the compiler options for programs on the mesh.

    A single device has no collectives. CPUs have no options. TPUs need none for
    determinism: they are deterministic by default.
    """
    device = mesh.devices.flat[0]
    found = dict(_DETERMINISTIC.get(device.platform, {})) if deterministic else {}
    if mesh.devices.size == 1:
        return found
    found |= _OPTIONS.get(device.platform, {})
    if device.device_kind.startswith(_SMALL_VMEM):
        del found[_FUSED]
    return found
