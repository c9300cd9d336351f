# SPDX-License-Identifier: Apache-2.0
"""Host copies equal the device arrays, with or without pinned memory.

JAX also offers pinned memory on CPUs; here CPUs stand in for a GPU.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hetjax.mesh import host_copies as module
from hetjax.mesh.host_copies import host_copies, host_copy, start_copy

PINNED = "pinned_host"
SPECS = [(), ("data",), (None, "tensor"), ("data", "tensor"), (("data", "tensor"),)]


@pytest.fixture(params=[("gpu",), ("gpu", "cpu")], ids=["as CPUs", "as GPUs"])
def platforms(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, ...]]:
    monkeypatch.setattr(module, "_PLATFORMS", request.param)
    module._is_pinned_faster.cache_clear()
    yield request.param
    module._is_pinned_faster.cache_clear()


def drawn(dtype: str, seed: int = 0) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal((8, 12))
    return (100 * numbers).astype(jnp.dtype(dtype))


def on(spec: tuple, value: np.ndarray) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_copy_has_the_values_and_the_shards(
    platforms: tuple[str, ...], spec: tuple, dtype: str
) -> None:
    value = drawn(dtype)
    x = on(spec, value)
    there = start_copy(x)
    assert there.dtype == x.dtype
    assert np.asarray(there).tobytes() == value.tobytes()
    for ours, its in zip(x.addressable_shards, there.addressable_shards, strict=True):
        assert (its.device, its.index) == (ours.device, ours.index)
        assert np.asarray(its.data).tobytes() == value[its.index].tobytes()


def test_pinned_memory_is_used_where_it_is_faster_and_nowhere_else(
    platforms: tuple[str, ...],
) -> None:
    for x in (on(("data",), drawn("float32")), jnp.ones(3)):
        there = start_copy(x)
        assert (there.sharding.memory_kind == PINNED) is ("cpu" in platforms)
        assert (there is x) is ("cpu" not in platforms)


def test_a_copy_outlives_its_array(platforms: tuple[str, ...]) -> None:
    values = [drawn("float32", seed) for seed in range(9)]
    arrays = [on(("data",), value) for value in values]
    arrays.append(jax.device_put(values[0], SingleDeviceSharding(jax.devices()[1])))
    copies = [*host_copies(arrays), host_copy(arrays[0])]
    begun = start_copy(arrays[1])
    for x in arrays:  # the next step reuses their memory
        jax.block_until_ready(jax.jit(jnp.zeros_like, donate_argnums=0)(x))
        x.delete() if not x.is_deleted() else None
    for copy, value in zip(copies, [*values, values[0], values[0]], strict=True):
        assert copy.flags.owndata and copy.flags.writeable
        np.testing.assert_array_equal(copy, value)
    if begun is not arrays[1]:
        np.testing.assert_array_equal(np.asarray(begun), values[1])
