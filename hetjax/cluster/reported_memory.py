# SPDX-License-Identifier: Apache-2.0
"""Sets the memory of a node's cards from what the cards report.

Owns the rule for cards of one name with unlike memory, and for files that claim more
than the cards have. Does not own the query (`hetjax/profiling/probe.py`,
`hetjax/mesh/driver.py`).
"""

import warnings
from collections.abc import Collection
from dataclasses import replace

from hetjax.cluster.catalogue import unlike_memory_gib
from hetjax.cluster.cluster import Node

_ROUNDED = 0.05  # "24" for 23.7 GiB is no mistake


def with_reported_memory(node: Node, reported_gib: Collection[float]) -> Node:
    """Return the node; if it states no memory, with the least that its cards report.

    If that is nearly the catalogue's figure, the node stays unchanged. Warns of cards
    with unlike memory, and of a node that claims more than a card has. `reported_gib`
    leaves out cards that report nothing.
    """
    if not reported_gib:
        return node
    least_gib = min(reported_gib)
    if max(reported_gib) > (1 + _ROUNDED) * least_gib:
        sizes = " and ".join(f"{gib:.4g}" for gib in sorted({*reported_gib}))
        warnings.warn(
            f"node {node.name!r}: its {node.device} have {sizes} GiB: "
            f"{least_gib:.4g} is assumed for each",
            stacklevel=2,
        )
    if node.memory_gib is None:
        own = unlike_memory_gib(node.device, least_gib)
        return node if own is None else replace(node, memory_gib=own)
    if node.memory_gib > (1 + _ROUNDED) * least_gib:
        warnings.warn(
            f"node {node.name!r}: memory_gib = {node.memory_gib:g}, "
            f"but a {node.device} here has {least_gib:.4g}: a plan that fills more "
            f"will not start; write memory_gib = {least_gib:.4g}",
            stacklevel=2,
        )
    return node
