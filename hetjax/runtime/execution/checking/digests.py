# SPDX-License-Identifier: Apache-2.0
"""Computes digests of arrays: 64 bits that show whether two holders have equal numbers.

A digest is a sum over all elements of a function of their bits. So neither the order
nor the layout of the elements matters, and integers do not round. JAX, as we use it,
has no 64-bit integers, so a digest is two 32-bit sums of different functions. Each
function is a bijection, so one differing element always shows; several that differ
escape once in 2**64. A permutation of elements does not show.

Owns this arithmetic, traced inside a stage's programs (`update.py`). Does not own who
compares what (`checks.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# Finalisers of 32-bit hashes: that of MurmurHash3, and lowbias32 of C. Wellons
_MIXINGS = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x7FEB352D, 15, 0x846CA68B, 16))
_ZEROS = 0x9E3779B9  # stands in for 0; otherwise zeros would not count


def digests(groups: Sequence[Sequence[jax.Array]], specs: Any) -> jax.Array:
    """Return uint32[N, 2] of all elements of the fp32 arrays of each of N groups.

    `specs` are their shardings. Each device of a mesh sums its part; one all-reduce
    follows.
    """

    def local(groups: Sequence[Sequence[jax.Array]]) -> jax.Array:
        own = [_digest(group, of) for group, of in zip(groups, specs, strict=True)]
        return jax.lax.psum(jnp.stack(own), _axes(specs))

    return _on_mesh(local, groups, specs)


def is_finite(arrays: Sequence[jax.Array], specs: Any) -> jax.Array:
    """Return whether all elements of these fp32 arrays are finite."""

    def local(arrays: Sequence[jax.Array]) -> jax.Array:
        bad = jnp.zeros((), jnp.int32)
        for array in arrays:
            finite = jnp.isfinite(array)
            found = _reduced([finite, finite], jnp.bool_(True), jax.lax.bitwise_and)
            bad = bad | (~found[0]).astype(jnp.int32)
        return jax.lax.psum(bad, _axes(specs)) == 0

    return _on_mesh(local, arrays, specs)


def whole(digests: np.ndarray) -> Sequence[int]:
    """Return the 64 bits of each of digests[N, 2]."""
    return [int(low) | int(high) << 32 for low, high in digests]


def _on_mesh(local: Callable[[Any], jax.Array], arrays: Any, specs: Any) -> jax.Array:
    mesh = jax.tree.leaves(specs)[0].mesh
    cut = jax.tree.map(lambda sharding: sharding.spec, specs)
    every = jax.shard_map(
        local, mesh=mesh, in_specs=(cut,), out_specs=PartitionSpec(), check_vma=False
    )
    return every(arrays)


def _axes(specs: Any) -> tuple[str, ...]:
    return jax.tree.leaves(specs)[0].mesh.axis_names


def _digest(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> Any:
    """Return uint32[2] of the parts of this device that no earlier device has."""
    found = jnp.zeros((2,), jnp.uint32)
    for array, sharding in zip(arrays, shardings, strict=True):
        bits = jax.lax.bitcast_convert_type(array, jnp.uint32)
        mixed = [_mixed(bits, *mixing) for mixing in _MIXINGS]
        own = jnp.stack(_reduced(mixed, jnp.uint32(0), jax.lax.add))
        found = found + own * _is_first(sharding).astype(jnp.uint32)
    return found


def _is_first(sharding: NamedSharding) -> jax.Array:
    """Return whether this device is the first of those that have the same part."""
    cut = {axis for axes in sharding.spec if axes for axis in _names(axes)}
    first = jnp.ones((), jnp.bool_)
    for axis in set(sharding.mesh.axis_names) - cut:
        first = first & (jax.lax.axis_index(axis) == 0)
    return first


def _names(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


def _reduced(pair: Sequence[jax.Array], initial: Any, operation: Any) -> Any:
    """Reduce both arrays to scalars in one pass.

    XLA's CPU compiler vectorises a reduction of two arrays, but not of one: 1.6 against
    53 ms for a digest of 8 M elements, on two cores.
    """
    every = range(pair[0].ndim)
    both = lambda a, b: tuple(map(operation, a, b))  # noqa: E731
    return jax.lax.reduce(tuple(pair), (initial, initial), both, tuple(every))


def _mixed(
    bits: jax.Array, one: int, first: int, two: int, second: int, three: int
) -> jax.Array:
    """Apply a bijection of 32 bits."""
    x = bits ^ jnp.uint32(_ZEROS)
    x = (x ^ (x >> jnp.uint32(one))) * jnp.uint32(first)
    x = (x ^ (x >> jnp.uint32(two))) * jnp.uint32(second)
    return x ^ (x >> jnp.uint32(three))
