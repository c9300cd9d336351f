# SPDX-License-Identifier: Apache-2.0
"""What to do about a lost worker: start it again, do without its node, or give up.

Owns the rule, a function of the losses so far. Does not own doing it (`driver.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Losses without a committed step between them: in all, and of one node
MOST_LOSSES, MOST_OF_A_NODE = 5, 3
Verdict = Literal["start again", "leave the node", "give up"]


@dataclass(frozen=True, slots=True)
class Losses:
    """Workers lost since the last committed step, by node."""

    by_node: Mapping[str, int] = field(default_factory=dict)

    def with_one_of(self, node: str) -> "Losses":
        return Losses({**self.by_node, node: self.by_node.get(node, 0) + 1})

    def without(self, node: str) -> "Losses":
        """The node has left: what it lost counts no more."""
        return Losses({name: n for name, n in self.by_node.items() if name != node})


def verdict(losses: Losses, node: str, recovers: bool) -> Verdict:
    """What follows from the last of these losses, which was of this node."""
    if not recovers or sum(losses.by_node.values()) > MOST_LOSSES:
        return "give up"
    if losses.by_node[node] == MOST_OF_A_NODE:
        return "leave the node"
    return "start again"
