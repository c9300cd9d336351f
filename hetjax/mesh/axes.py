# SPDX-License-Identifier: Apache-2.0
"""The mesh of a stage and the rules that map logical axes onto its two axes.

Owns `stage_mesh` and `abstract_mesh` (the one place where meshes are made), the logical
axis rules, and the two shardings every parameter has: as compute weight and as master
weight. Does not own the movement of arrays between meshes (`reshard.py`).
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from hetjax.errors import BadInput

RULES = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "tensor",
}
# compilers cut what lies between; said, since releases of JAX differ in their default
_AUTO = (AxisType.Auto, AxisType.Auto)
NUM_SLICES = 8
MIN_SLICE_SIZE = 1 << 18  # elements


def stage_mesh(devices: Sequence[jax.Device], *, data: int, tensor: int) -> Mesh:
    """The mesh of a stage: axes ("data", "tensor"), devices data-major, one kind."""
    assert len(devices) == data * tensor, (devices, data, tensor)
    assert len({d.device_kind for d in devices}) == 1, "no mesh may mix device kinds"
    grid = np.array(devices, dtype=object).reshape(data, tensor)
    return Mesh(grid, ("data", "tensor"), axis_types=_AUTO)


def abstract_mesh(*, data: int, tensor: int) -> AbstractMesh:
    """The same mesh without devices, for the sizes of what would lie on it."""
    return AbstractMesh((data, tensor), ("data", "tensor"), axis_types=_AUTO)


def tensor_dim(logical: Sequence[str | None]) -> int | None:
    """The dim that is cut over the tensor axis, or None (at most one per array)."""
    dims = [i for i, name in enumerate(logical) if name in RULES]
    assert len(dims) <= 1, f"two dims of {tuple(logical)} map to the tensor axis"
    return dims[0] if dims else None


def compute_spec(logical: Sequence[str | None]) -> PartitionSpec:
    """Layout of a compute weight: cut over tensor, whole on every data rank.

    Raises BadInput for a logical axis name that has no rule.
    """
    for name in logical:
        if name is not None and name not in RULES:
            raise BadInput(
                got=f"logical axes {tuple(logical)}: {name!r} has no rule",
                allowed=f"{', '.join(RULES)}, or None for a dim that stays whole",
                fix="correct the name where the module makes its nnx.Param",
            )
    return PartitionSpec(*(RULES[name] if name else None for name in logical))


def master_spec(
    shape: Sequence[int], logical: Sequence[str | None], *, data: int, tensor: int
) -> PartitionSpec:
    """Layout of master weight and optimizer state: also cut over data where it divides.

    The tensor dim is cut tensor-major, then by data, so that each device holds
    neighbouring checkpoint slices; arrays without one are cut along the first dim
    that data divides, and stay whole if none does.
    """
    dim = tensor_dim(logical)
    if data == 1:
        return compute_spec(logical)
    if dim is not None:
        cut = ("tensor", "data") if shape[dim] % (tensor * data) == 0 else "tensor"
        return PartitionSpec(*(cut if i == dim else None for i in range(len(shape))))
    for i, size in enumerate(shape):
        if size % data == 0:
            return PartitionSpec(*(None,) * i, "data")
    return PartitionSpec()


def slices(shape: Sequence[int], logical: Sequence[str | None]) -> tuple[int, int]:
    """(dim, number) of the fixed checkpoint slices of a parameter; no plan changes it.

    The tensor dim is cut in 8, or in as many (a power of two) as divide it and leave
    slices of 1 MiB or more in float32: each is a file. Arrays without a tensor dim are
    one slice.
    """
    dim = tensor_dim(logical)
    if dim is None:
        return 0, 1
    number = NUM_SLICES
    size = math.prod(shape)
    while shape[dim] % number or (number > 1 and size < number * MIN_SLICE_SIZE):
        number //= 2
    return dim, number


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Whole on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Dim 0 (sequences of a microbatch) cut over data, whole over tensor."""
    return NamedSharding(mesh, PartitionSpec("data"))
