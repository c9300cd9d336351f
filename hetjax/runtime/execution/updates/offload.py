# SPDX-License-Identifier: Apache-2.0
"""Moves arrays of a stage to its host and back.

Owns the mesh of the host's CPU, on which every array is whole, and copies between it
and a stage's devices. Does not own what is kept there (`update.py`) nor which stages
offload (the plan).
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hetjax.mesh.axes import replicated, stage_mesh
from hetjax.mesh.host_copies import start_copy
from hetjax.mesh.multihost import to_mesh
from hetjax.stage.arrays import shardings


def host_mesh() -> Mesh:
    """Return the CPU of this process's host, as a mesh of one device."""
    return stage_mesh(jax.local_devices(backend="cpu")[:1], data=1, tensor=1)


def whole_on(mesh: Mesh, abstract: Any) -> Any:
    """Return abstract arrays of these shapes, whole on every device of the mesh."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated(mesh)),
        abstract,
    )


def on_their_way(arrays: Any) -> Any:
    """Start copying arrays to the host; return those that `moved` reads there."""
    return jax.tree.map(start_copy, arrays)


def moved(arrays: Any, like: Any) -> Any:
    """Wait for arrays on the host; return them, laid out like abstract ones."""
    return jax.tree.map(
        lambda array, sharding: to_mesh(np.asarray(array), sharding),
        arrays,
        shardings(like),
    )
