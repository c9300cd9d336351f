# SPDX-License-Identifier: Apache-2.0
"""Moves an array between unlike meshes, piece by piece, without blocking the caller.

`jax.device_put` between layouts that differ waits for the source; that of single-device
pieces never does. Owns the piece plan (which box of which shard goes where; also what
crosses the wire between processes) and its execution inside one process. Does not
own tags or delivery (`hetjax/comm/transport.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

Box = tuple[tuple[int, int], ...]  # per dim: start, stop


@dataclass(frozen=True, slots=True)
class ReshardPiece:
    """A box of the global array that one device sends to another."""

    source: jax.Device
    target: jax.Device
    box: Box


@cache
def shard_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, Box]:
    """Return the box of the global array that each device holds, in device order."""
    return {
        device: tuple(i.indices(n)[:2] for i, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


@cache
def pieces(
    shape: tuple[int, ...], source: Sharding, target: Sharding
) -> dict[jax.Device, tuple[ReshardPiece, ...]]:
    """Return, per target device, the pieces that tile its shard, each from one holder.

    Target devices take turns among the devices that hold the same box, so that the load
    of a replicated source is spread.
    """
    holders: dict[Box, list[jax.Device]] = {}
    for device, box in shard_boxes(source, shape).items():
        holders.setdefault(box, []).append(device)
    return {
        device: tuple(
            ReshardPiece(owners[turn % len(owners)], device, common)
            for held, owners in holders.items()
            if (common := _intersection(box, held)) is not None
        )
        for turn, (device, box) in enumerate(shard_boxes(target, shape).items())
    }


@dataclass(frozen=True, slots=True)
class Parcel:
    """An array on its source devices, cut for its target.

    It moves as a `whole`, or in `parts`: per target device the boxes of its shard, each
    with its start within the shard.
    """

    abstract: jax.ShapeDtypeStruct
    target: Sharding
    whole: jax.Array | None = None
    parts: Mapping[jax.Device, tuple[tuple[jax.Array, tuple[int, ...]], ...]] = field(
        default_factory=dict
    )


def reshard(x: jax.Array, target: Sharding) -> jax.Array:
    """Return the same global array laid out as `target`, before `x` is computed."""
    return delivered(parcel(x, target))


def parcel(x: jax.Array, target: Sharding) -> Parcel:
    """Cut an array on its source devices, to be moved later.

    On no device do the cuts take more memory than the shard there. The source devices
    run nothing at delivery, so delivery does not wait for work enqueued by then.
    """
    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
    plan = pieces(x.shape, x.sharding, target)
    if all(len(parts) == 1 for parts in plan.values()) and _same_boxes(x, target):
        return Parcel(abstract, target, whole=x)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    held = shard_boxes(x.sharding, x.shape)
    wanted = shard_boxes(target, x.shape)
    cuts = {  # several targets may want the same box
        (source, box): _cut(shards[source], held[source], box)
        for source, box in {(p.source, p.box): 0 for ps in plan.values() for p in ps}
    }
    parts = {
        device: tuple(
            (cuts[p.source, p.box], _starts(p.box, wanted[device])) for p in parts
        )
        for device, parts in plan.items()
    }
    return Parcel(abstract, target, parts=parts)


def delivered(parcel: Parcel) -> jax.Array:
    """Start moving a parcel; return the array in its target layout, not yet there."""
    shape, target = parcel.abstract.shape, parcel.target
    if parcel.whole is not None:
        return jax.device_put(parcel.whole, target)
    wanted = shard_boxes(target, shape)
    outputs = []
    for device, parts in parcel.parts.items():
        arrived = [jax.device_put(cut, device) for cut, _ in parts]
        offsets = tuple(starts for _, starts in parts)
        outputs.append(_joined(arrived, _size(wanted[device]), offsets))
    return jax.make_array_from_single_device_arrays(shape, target, outputs)


def moved_bytes(parcel: Parcel) -> int:
    """Return the bytes that the parcel's delivery moves from one device to another."""
    if parcel.whole is not None:
        shape, whole = parcel.abstract.shape, parcel.whole
        ends = zip(
            shard_boxes(whole.sharding, shape),
            shard_boxes(parcel.target, shape).items(),
            strict=True,
        )
        return whole.dtype.itemsize * sum(
            math.prod(_size(box)) for source, (target, box) in ends if source != target
        )
    return sum(
        cut.nbytes
        for target, parts in parcel.parts.items()
        for cut, _ in parts
        if cut.devices() != {target}
    )


def _same_boxes(x: jax.Array, target: Sharding) -> bool:
    """Whether device_put is known to be asynchronous: same boxes in the same order."""
    source_boxes = list(shard_boxes(x.sharding, x.shape).values())
    return source_boxes == list(shard_boxes(target, x.shape).values())


def _intersection(a: Box, b: Box) -> Box | None:
    common = tuple(
        (max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True)
    )
    return common if all(lo < hi for lo, hi in common) else None


def _size(box: Box) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in box)


def _starts(box: Box, within: Box) -> tuple[int, ...]:
    return tuple(lo - base for (lo, _), (base, _) in zip(box, within, strict=True))


def _cut(shard: jax.Array, held: Box, box: Box) -> jax.Array:
    if held == box:
        return shard
    return _slicer(_size(box))(shard, np.array(_starts(box, held), np.int32))


def _joined(
    parts: Sequence[jax.Array],
    size: tuple[int, ...],
    offsets: tuple[tuple[int, ...], ...],
) -> jax.Array:
    if len(parts) == 1:
        return parts[0]
    return _joiner(size, offsets)(*parts)


@cache
def _slicer(size: tuple[int, ...]):
    def cut(shard: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(shard, list(starts), size)

    return jax.jit(cut)


@cache
def _joiner(size: tuple[int, ...], offsets: tuple[tuple[int, ...], ...]):
    grid = [sorted({offset[dim] for offset in offsets}) for dim in range(len(size))]
    assert list(product(*grid)) == sorted(offsets), "pieces must tile a grid"
    order = [offsets.index(offset) for offset in product(*grid)]

    def join(*parts: jax.Array) -> jax.Array:
        tiles = [parts[i] for i in order]
        for dim in reversed(range(len(size))):
            step = len(grid[dim])
            rows = [tiles[i : i + step] for i in range(0, len(tiles), step)]
            tiles = [jnp.concatenate(r, axis=dim) if step > 1 else r[0] for r in rows]
        return tiles[0]

    return jax.jit(join)
