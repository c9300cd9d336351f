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

from hetjax.comm.connections import Key
from hetjax.comm.peers import Peers

_FULL = np.dtype(np.float32)
_DIRECT_BYTES = 256 << 10  # up to here latency counts, not bytes


def total(
    peers: Peers,
    holders: Sequence[str],
    key: Key,
    own: np.ndarray,
    wire: np.dtype = _FULL,
) -> np.ndarray:
    """Sum a flat fp32 array over its holders, names of workers in the order to add.

    What is sent is rounded to dtype `wire` first, our own contribution, too. Blocks;
    may run beside others with other keys, whose last number must be 0. Raises PeerLost.
    """
    assert own.ndim == 1 and key[-1] == 0, (own.shape, key)
    sent = own.astype(wire, copy=False)
    others = [holder for holder in holders if holder != peers.own]
    if len(others) == 1 or sent.nbytes <= _DIRECT_BYTES:
        for other in others:
            peers.send(other, key, [sent])
        return _added(peers, holders, key, sent)
    return _in_parts(peers, holders, key, sent)


def _in_parts(
    peers: Peers, holders: Sequence[str], key: Key, sent: np.ndarray
) -> np.ndarray:
    others = [holder for holder in holders if holder != peers.own]
    parts = dict(zip(holders, np.array_split(sent, len(holders)), strict=True))
    for other in others:
        peers.send(other, key, [parts[other]])
    own = _added(peers, holders, key, parts[peers.own]).astype(sent.dtype, copy=False)
    summed, done = {peers.own: own}, (*key[:-1], 1)
    for other in others:
        peers.send(other, done, [own])
    for other in others:
        summed[other] = peers.mailbox.take(other, done).view(sent.dtype)
    return np.concatenate([summed[holder] for holder in holders], dtype=_FULL)


def _added(
    peers: Peers, holders: Sequence[str], key: Key, sent: np.ndarray
) -> np.ndarray:
    """The fp32 sum of what holders sent under the key and our own, in their order."""
    found: np.ndarray | None = None
    for holder in holders:
        mine = holder == peers.own
        part = sent if mine else peers.mailbox.take(holder, key).view(sent.dtype)
        part = part.astype(_FULL, copy=False)
        found = part if found is None else np.add(found, part)
    assert found is not None
    return found
