# SPDX-License-Identifier: Apache-2.0
"""Fragments of nodes: how many devices stages of a size and above can have.

Owns the limits that follow from a stage's lying inside one node. Where sizes divide
each other, stages within these limits fit into the nodes. Does not own which stages
(`problem.py`) nor on which nodes they lie (`placement.py`).
"""

from collections.abc import Iterator, Sequence


def fragment_limits(
    num_devices: int, devices_per_node: int, sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (size, devices that stages of that size and above can have).

    Only limits below the number of devices, the last node being a smaller one if
    nodes do not tile them. None if `devices_per_node` is 0: stages lie anywhere.
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
    """The most devices of one node that stages of these sizes can fill."""
    sums = {0}
    for filled in range(1, num_devices + 1):
        if any(filled - size in sums for size in sizes):
            sums.add(filled)
    return max(sums)
