# SPDX-License-Identifier: Apache-2.0
"""Sums over processes: every holder ends with the same bits.

Two holders, or little to sum: each sends all it has to all others. Else each holder
sums one part for all: it gets that part from all others and sends its sum back, which
moves 2 (n - 1) / n of the bytes per holder, as a ring does, in two hops instead of
2 (n - 1). All add in the same order. Does not own rows of gradients (`reduction.py`)
nor when a sum is due.
"""

from collections.abc import Sequence

import numpy as np

from hetjax.mesh.links import Key
from hetjax.mesh.peers import Peers

_DIRECT_BYTES = 256 << 10  # up to here latency counts, not bytes


def total(
    peers: Peers, holders: Sequence[str], key: Key, own: np.ndarray
) -> np.ndarray:
    """Sum a flat fp32 array over its holders, names of workers in the order to add.

    Blocks; may run beside others with other keys, whose last number must be 0. Raises
    PeerLost.
    """
    assert own.ndim == 1 and key[-1] == 0, (own.shape, key)
    others = [holder for holder in holders if holder != peers.own]
    if len(others) == 1 or own.nbytes <= _DIRECT_BYTES:
        for other in others:
            peers.send(other, key, [own])
        return _added(peers, holders, key, own)
    return _in_parts(peers, holders, key, own)


def _in_parts(
    peers: Peers, holders: Sequence[str], key: Key, own: np.ndarray
) -> np.ndarray:
    parts = dict(zip(holders, np.array_split(own, len(holders)), strict=True))
    for holder, part in parts.items():
        if holder != peers.own:
            peers.send(holder, key, [part])
    summed = {peers.own: _added(peers, holders, key, parts[peers.own])}
    done: Key = (*key[:-1], 1)
    for holder in holders:
        if holder != peers.own:
            peers.send(holder, done, [summed[peers.own]])
    for holder in holders:
        if holder != peers.own:
            summed[holder] = peers.mailbox.take(holder, done).view(own.dtype)
    return np.concatenate([summed[holder] for holder in holders])


def _added(
    peers: Peers, holders: Sequence[str], key: Key, own: np.ndarray
) -> np.ndarray:
    """The sum of what holders sent under the key and of our own, in their order."""
    found: np.ndarray | None = None
    for holder in holders:
        mine = holder == peers.own
        part = own if mine else peers.mailbox.take(holder, key).view(own.dtype)
        found = part if found is None else np.add(found, part)
    assert found is not None
    return found
