# SPDX-License-Identifier: Apache-2.0
"""Sums over holders with unlike meshes, against numpy."""

import math
from collections import Counter
from itertools import permutations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.comm.reduction import (
    Rows,
    exchange,
    leaf_of_rows,
    pack,
    row_sharding,
    unpacked_rows,
)
from hetjax.mesh.axes import stage_mesh

SHAPES = [(8, 3), (5,), (3, 16), (4, 2, 8)]
DIMS = [0, 0, 1, 2]
WIDTHS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)]


def meshes_of(widths: list[tuple[int, int]]) -> list[Mesh]:
    meshes, used = [], 0
    for data, tensor in widths:
        devices = jax.devices()[used : used + data * tensor]
        meshes.append(stage_mesh(devices, data=data, tensor=tensor))
        used += data * tensor
    return meshes


def packed_on(mesh: Mesh, leaves: list[np.ndarray], rows: int):
    program = jax.jit(
        lambda *leaves: pack(leaves, DIMS, rows, mesh.devices.size),
        out_shardings=row_sharding(mesh),
    )
    whole = NamedSharding(mesh, PartitionSpec())
    return program(*(jax.device_put(leaf, whole) for leaf in leaves))


def unpacked(rows: Rows) -> list[jax.Array]:
    leaves = zip(unpacked_rows(rows, SHAPES), SHAPES, DIMS, strict=True)
    return [leaf_of_rows(*each) for each in leaves]


@settings(max_examples=12)
@given(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=3), st.integers(0, 99))
def test_every_holder_gets_the_same_sum_to_the_last_bit(
    widths: list[tuple[int, int]], seed: int
):
    rng = np.random.default_rng(seed)
    meshes = meshes_of(widths)
    rows = math.lcm(*(mesh.devices.size for mesh in meshes))
    gradients = [
        [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
        for _ in meshes
    ]
    packed = [packed_on(m, g, rows) for m, g in zip(meshes, gradients, strict=True)]
    moved: Counter[tuple[int, int]] = Counter()
    sums = exchange(packed, lambda a, b, size: moved.update({(a, b): size}))
    sizes = [sum(array.nbytes for array in arrays) for arrays in packed]
    pairs = permutations(range(len(meshes)), 2)
    assert dict(moved) == {(a, b): sizes[a] for a, b in pairs}
    expected = [
        sum(leaves[1:], start=leaves[0]) for leaves in zip(*gradients, strict=True)
    ]
    for mesh, total in zip(meshes, sums, strict=True):
        assert {d for a in total for d in a.devices()} == set(mesh.devices.flat)
        found = jax.jit(unpacked)(total)
        for leaf, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(leaf, wanted)


def test_a_row_holds_the_same_part_of_a_cut_parameter_on_every_mesh():
    leaf = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    for mesh in meshes_of([(1, 1), (1, 4)]):
        packed = jax.jit(lambda x: pack([x], [0], 4, 1))(leaf)
        for row, array in enumerate(packed):
            wanted = leaf[2 * row : 2 * row + 2].ravel()
            np.testing.assert_array_equal(np.ravel(array), wanted)
        assert mesh.devices.size in (1, 4)
