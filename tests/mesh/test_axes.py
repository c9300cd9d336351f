# SPDX-License-Identifier: Apache-2.0
"""Meshes, layouts of weights and the fixed checkpoint slices."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from hetjax.mesh.axes import compute_spec, master_spec, slices, stage_mesh


@dataclass(frozen=True)
class FakeDevice:
    device_kind: str


def test_no_mesh_mixes_device_kinds():
    mixed: Any = [FakeDevice("A100"), FakeDevice("H20")]
    with pytest.raises(AssertionError, match="device kinds"):
        stage_mesh(mixed, data=1, tensor=2)


def test_devices_lie_data_major():
    mesh = stage_mesh(jax.devices()[:6], data=3, tensor=2)
    assert mesh.axis_names == ("data", "tensor")
    ids = [[d.id for d in row] for row in mesh.devices]
    assert ids == [[0, 1], [2, 3], [4, 5]]


def test_compute_weights_are_cut_over_tensor_alone():
    assert compute_spec((None, "heads", None)) == PartitionSpec(None, "tensor", None)
    assert compute_spec((None,)) == PartitionSpec(None)


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(16, "vocab"), (8, "heads"), (24, "mlp"), (12, None), (7, None)]),
)
def test_every_device_holds_neighbouring_slices_of_a_master_weight(
    data: int, tensor: int, dim: tuple[int, str | None]
):
    size, name = dim
    shape, logical = (size, 3), (name, None)
    mesh = stage_mesh(jax.devices()[: data * tensor], data=data, tensor=tensor)
    spec = master_spec(shape, logical, data=data, tensor=tensor)
    index = NamedSharding(mesh, spec).devices_indices_map(shape)
    for (d, t), device in np.ndenumerate(mesh.devices):
        rows = range(*index[device][0].indices(size))
        if name is None:
            parts, part = (data, d) if size % data == 0 else (1, 0)
        elif size % (tensor * data) == 0:
            parts, part = tensor * data, t * data + d
        else:
            parts, part = tensor, t
        assert rows == range(part * size // parts, (part + 1) * size // parts)


@pytest.mark.parametrize(
    ("shape", "logical", "expected"),
    [
        ((50304, 768), ("vocab", None), (0, 8)),
        ((2048, 12, 64), (None, "heads", None), (1, 4)),
        ((768, 12, 64), (None, "heads", None), (1, 2)),  # 1.1 MiB each
        ((768, 1024), (None, "mlp"), (1, 2)),
        ((512, 512), (None, "mlp"), (1, 1)),
        ((8192, 3, 64), (None, "kv_heads", None), (1, 1)),
        ((768,), (None,), (0, 1)),
    ],
)
def test_checkpoint_slices_are_fixed_by_the_shape(shape, logical, expected):
    assert slices(shape, logical) == expected
