# SPDX-License-Identifier: Apache-2.0
"""Computes the fragment limits of nodes, and merges options into meshes.

*Fragments*: a stage lies inside one node. This limits the devices that stages of a size
and above can have in total. Where sizes divide each other, stages within these limits
fit into the nodes. *Meshes*: options that differ only in what they keep form one mesh.
For each number of microbatches in flight, the mesh takes its fastest option that holds
them all. Does not own the costs of options (`problem.py`) nor the nodes of stages
(`seating.py`).

Letters of array names: M meshes, F microbatches held, from 1; others as in
`problem.py`.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def fragment_limits(
    num_devices: int, devices_per_node: int, sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (size, devices that stages of that size and above can have).

    Only limits below the number of devices are yielded. If whole nodes do not make up
    the number of devices, the last node is smaller. If `devices_per_node` is 0, stages
    lie anywhere and there are no limits.
    """
    if not devices_per_node:
        return
    num_nodes, rest = divmod(num_devices, devices_per_node)
    for size in sorted(set(sizes)):
        large = [n for n in sizes if n >= size]
        room = num_nodes * _filled(devices_per_node, large) + _filled(rest, large)
        if room < num_devices:
            yield size, room


def _filled(num_devices: int, sizes: Sequence[int]) -> int:
    """Return the most devices of one node that stages of these sizes can fill."""
    sums = {0}
    for filled in range(1, num_devices + 1):
        if any(filled - size in sums for size in sizes):
            sums.add(filled)
    return max(sums)


@dataclass(frozen=True, kw_only=True, eq=False)
class Meshes:
    """The meshes of a problem.

    `busy_s_BMFU` is the time of the mesh's fastest option that holds F microbatches
    (inf if there is none), `option_BMFU` is that option, `first_M` the first option of
    each mesh. If memory never limits the microbatches in flight, F has size 1.
    """

    first_M: NDArray[np.int64]
    busy_s_BMFU: NDArray[np.float64]
    option_BMFU: NDArray[np.int64]


def merged(
    alike_O: Sequence[Hashable],
    busy_s_BOU: NDArray[np.float64],
    most_in_flight_BOU: NDArray[np.int64],
    most_held: int,
) -> Meshes:
    """Merge options with equal keys `alike_O`; F goes up to `most_held`."""
    keys = list(dict.fromkeys(alike_O))
    of_O = np.array([keys.index(key) for key in alike_O])
    held_F = np.arange(1, most_held + 1)
    busy_s_BOFU = np.where(
        most_in_flight_BOU[:, :, None] >= held_F[:, None],
        np.nan_to_num(busy_s_BOU, nan=np.inf)[:, :, None],
        np.inf,
    )
    busy, option = [], []
    for m in range(len(keys)):
        members = np.flatnonzero(of_O == m)
        best_BFU = busy_s_BOFU[:, members].argmin(axis=1)
        option.append(members[best_BFU])
        busy.append(busy_s_BOFU[:, members].min(axis=1))
    return Meshes(
        first_M=np.array([alike_O.index(key) for key in keys]),
        busy_s_BMFU=np.stack(busy, axis=1),
        option_BMFU=np.stack(option, axis=1),
    )
