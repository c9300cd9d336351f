# SPDX-License-Identifier: Apache-2.0
"""Sums one gradient group over its holders, whose meshes may all differ.

Every holder packs its gradients of the group into R canonical rows: row j holds the
j-th part of every parameter. So holders with other tensor or data degrees differ only
in the number of rows per device. A holder with D devices has its rows as R/D arrays
rows_DN, one row per device: element i of array k is row i * R/D + k. Inside a process
rows move point to point, device to device (no program spans two holders, so device
kinds may differ); between processes their values move over the host. Every holder adds
all contributions in the same order: the result is bit-identical everywhere. Owns
packing, exchange and sum. Does not own when they happen (the REDUCE action).

R rows (the least common multiple of device counts), D devices of a holder, N elements
per row.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from hetjax.comm.connections import Key
from hetjax.comm.host_sum import added, joined, rounded
from hetjax.comm.peers import Peers
from hetjax.mesh.multihost import to_mesh
from hetjax.mesh.reshard import shard_boxes


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of one row per device, tensor-major like master weights."""
    return NamedSharding(mesh, PartitionSpec(("tensor", "data")))


Rows = tuple[jax.Array, ...]  # R/D arrays rows_DN


def pack(
    leaves: Sequence[jax.Array], dims: Sequence[int], rows: int, num_devices: int
) -> Rows:
    """Return the rows of a group: each leaf cut in R parts along its dim, zero-padded.

    Traced inside a program of the holder's mesh. Leaf shapes are global and equal for
    all holders, so row j means the same everywhere.
    """
    parts = [_to_rows(leaf, dim, rows) for leaf, dim in zip(leaves, dims, strict=True)]
    rows_RN = jnp.concatenate(parts, axis=1)
    rows_DKN = rows_RN.reshape(num_devices, rows // num_devices, -1)
    return tuple(rows_DKN[:, k] for k in range(rows // num_devices))


def unpacked_rows(packed: Rows, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Return the rows of each packed leaf.

    Traced inside a program of the holder's mesh.
    """
    rows = len(packed) * packed[0].shape[0]
    rows_RN = jnp.stack(packed, axis=1).reshape(rows, -1)
    ends = list(accumulate(-(-math.prod(shape) // rows) for shape in shapes))
    return [rows_RN[:, a:b] for a, b in zip([0, *ends], ends, strict=False)]


def exchange(
    contributions: Sequence[Rows], moved: Callable[[int, int, int], None]
) -> list[Rows]:
    """Return the sum over holders, once per holder, laid out like its contribution.

    Direct exchange: a holder receives (holders - 1) times the group's bytes; with two
    holders, a ring moves as many. `moved` is called for each copy from device to
    device: (from, to, bytes), holders by number.
    """
    sums = []
    for holder, own in enumerate(contributions):
        there = [
            own if rows is own else _copied(rows, own, partial(moved, giver, holder))
            for giver, rows in enumerate(contributions)
        ]
        sums.append(_adder(len(contributions), own[0].sharding)(*there))
    return sums


def to_host(rows: Rows, wanted: Sequence[int]) -> np.ndarray:
    """Return the wanted canonical rows on the host, in order; wait for the devices.

    If the mesh spans processes, devices of this process must hold the rows.
    """
    num_arrays, (num_devices, num_elements) = len(rows), rows[0].shape
    if num_arrays == num_devices == 1:
        return np.asarray(rows[0])
    shards = [_by_row(array) for array in rows]
    found = np.empty((len(wanted), num_elements), rows[0].dtype)
    for at, row in enumerate(wanted):
        found[at] = np.asarray(shards[row % num_arrays][row // num_arrays])[0]
    return found


def from_host(rows_RN: np.ndarray, like: Rows) -> Rows:
    """Return canonical rows, laid out as a holder's are."""
    return tuple(
        to_mesh(rows_RN[k :: len(like)], array.sharding) for k, array in enumerate(like)
    )


def _copied(rows: Rows, like: Rows, moved: Callable[[int], None]) -> Rows:
    """Copy rows to the devices of another holder, shard by shard, without waiting."""
    shards = [_by_device(array) for array in rows]
    ordered = [array[i] for i in range(len(shards[0])) for array in shards]
    target, (_, num_elements) = like[0].sharding, like[0].shape
    devices = _row_devices(target, like[0].shape)
    arrays = []
    for k in range(len(like)):
        given = [ordered[i * len(like) + k] for i in range(len(devices))]
        ends = list(zip(given, devices, strict=True))
        moved(sum(x.nbytes for x, device in ends if x.devices() != {device}))
        copies = [jax.device_put(x, device) for x, device in ends]
        shape = (len(devices), num_elements)
        arrays.append(jax.make_array_from_single_device_arrays(shape, target, copies))
    return tuple(arrays)


def _by_device(array: jax.Array) -> list[jax.Array]:
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return [shards[device] for device in _row_devices(array.sharding, array.shape)]


def _by_row(array: jax.Array) -> dict[int, jax.Array]:
    """Return this process's shards of an array rows_DN, by row."""
    shards = array.addressable_shards
    return {shard.index[0].indices(array.shape[0])[0]: shard.data for shard in shards}


@cache
def _row_devices(sharding: Sharding, shape: tuple[int, ...]) -> list[jax.Device]:
    """Return the device of each row."""
    boxes = shard_boxes(sharding, shape)
    return sorted(boxes, key=lambda device: boxes[device][0])


def _to_rows(leaf: jax.Array, dim: int, rows: int) -> jax.Array:
    flat = jnp.moveaxis(leaf, dim, 0).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % rows)).reshape(rows, -1)


def leaf_of_rows(part_RN: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    """Return the leaf of this shape that has these rows, cut along the dim."""
    moved = (shape[dim], *shape[:dim], *shape[dim + 1 :])
    flat = part_RN.reshape(-1)[: math.prod(shape)]
    return jnp.moveaxis(flat.reshape(moved), 0, dim)


@lru_cache(maxsize=256)
def _adder(num_holders: int, sharding: Sharding):
    def add(*contributions: Rows) -> Rows:
        return jax.tree.map(lambda first, *rest: sum(rest, start=first), *contributions)

    return jax.jit(add, out_shardings=sharding)


_FULL = np.dtype(np.float32)
_DIRECT_BYTES = 256 << 10  # up to here latency counts, not bytes


def total(
    peers: Peers,
    holders: Sequence[str],
    key: Key,
    own: np.ndarray,
    wire: np.dtype = _FULL,
) -> np.ndarray:
    """Sum a flat fp32 array over its holders, worker names in the order of addition.

    With two holders, or little to sum, each sends its whole array to all others.
    Otherwise each holder sums one part: it receives that part from all others and sends
    the sum back. That moves 2 (n - 1) / n of the bytes per holder, as a ring does, in
    two hops instead of 2 (n - 1).

    All contributions, this worker's included, are first rounded to dtype `wire`.
    Blocks. Calls with other keys may run concurrently; the last number of a key must be
    0. Raises PeerLost.
    """
    assert own.ndim == 1 and key[-1] == 0, (own.shape, key)
    sent = rounded(own, wire)
    others = [holder for holder in holders if holder != peers.own]
    if len(others) == 1 or sent.nbytes <= _DIRECT_BYTES:
        for other in others:
            peers.send(other, key, [sent])
        return _added(peers, holders, key, sent)
    parts = dict(zip(holders, np.array_split(sent, len(holders)), strict=True))
    for other in others:
        peers.send(other, key, [parts[other]])
    own = rounded(_added(peers, holders, key, parts[peers.own]), sent.dtype)
    summed, done = {peers.own: own}, (*key[:-1], 1)
    for other in others:
        peers.send(other, done, [own])
    for other in others:
        summed[other] = peers.mailbox.receive(other, done).view(sent.dtype)
    return joined([summed[holder] for holder in holders])


def _added(
    peers: Peers, holders: Sequence[str], key: Key, sent: np.ndarray
) -> np.ndarray:
    """Return the fp32 sum of what all holders sent under the key, in their order.

    Reuses the memory of the first received part if it is fp32: fresh memory costs as
    much as adding.
    """
    parts = [
        sent
        if holder == peers.own
        else peers.mailbox.receive(holder, key).view(sent.dtype)
        for holder in holders
    ]
    came = next(part for part in parts[:2] if part is not sent)
    reused = came.dtype == _FULL and came.flags.writeable
    return added(parts, came if reused else None)
