# SPDX-License-Identifier: Apache-2.0
"""Makes the mesh of a stage, and maps logical axes onto its two axes.

Owns `stage_mesh` and `abstract_mesh` (the one place where meshes are made), the logical
axis rules, and the two shardings of every parameter: as compute weight and as master
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
# compilers cut intermediate arrays; explicit, as JAX releases differ in their default
_AUTO = (AxisType.Auto, AxisType.Auto)
NUM_SLICES = 8
MIN_SLICE_SIZE = 1 << 18  # elements


def stage_mesh(devices: Sequence[jax.Device], *, data: int, tensor: int) -> Mesh:
    """Return the mesh of a stage: axes ("data", "tensor"), data-major, of one kind."""
    assert len(devices) == data * tensor, (devices, data, tensor)
    assert len({d.device_kind for d in devices}) == 1, "no mesh may mix device kinds"
    grid = np.array(devices, dtype=object).reshape(data, tensor)
    return Mesh(grid, ("data", "tensor"), axis_types=_AUTO)


def abstract_mesh(*, data: int, tensor: int) -> AbstractMesh:
    """Return the same mesh without devices, for the sizes of arrays on it."""
    return AbstractMesh((data, tensor), ("data", "tensor"), axis_types=_AUTO)


def tensor_dim(logical: Sequence[str | None]) -> int | None:
    """Return the dim that is cut over the tensor axis (at most one), or None."""
    dims = [i for i, name in enumerate(logical) if name in RULES]
    assert len(dims) <= 1, f"two dims of {tuple(logical)} map to the tensor axis"
    return dims[0] if dims else None


def compute_spec(logical: Sequence[str | None]) -> PartitionSpec:
    """Return the layout of a compute weight: cut over tensor, whole on data ranks.

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
    """Return the layout of master weight and optimizer state: cut over data, too.

    The tensor dim is cut tensor-major, then by data if that divides it, so that each
    device holds neighbouring checkpoint slices. Arrays without a tensor dim are cut
    along the first dim that data divides, and stay whole if it divides none.
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
    """Return (dim, number) of a parameter's checkpoint slices, the same for all plans.

    The tensor dim is cut in 8, or in as many (a power of two) as divide it and leave
    slices of 1 MiB or more in float32, as each is a file. Arrays without a tensor dim
    are one slice.
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
    """Return the sharding of arrays that are whole on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding with dim 0 (sequences of a microbatch) cut over data."""
    return NamedSharding(mesh, PartitionSpec("data"))
