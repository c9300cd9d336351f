# SPDX-License-Identifier: Apache-2.0
"""Zones of a cluster file that nothing joins: what is missing, in lines to type.

Nodes of one zone share a network; what joins two zones has to be said. Does not own
routes (`hetjax/costs/network/routes.py`).
"""

from collections.abc import Sequence
from itertools import combinations

from hetjax.cluster.cluster import Cluster
from hetjax.errors import BadInput


def check_joined(cluster: Cluster) -> None:
    """Raise BadInput if a link joins some zone to no other one, with lines to add."""
    zone_of = {node.name: node.zone for node in cluster.nodes}
    zones = list(dict.fromkeys(zone_of.values()))
    ends = [[zone_of.get(end, end) for end in link.between] for link in cluster.links]
    joined = {zone for pair in ends for zone in pair if pair[0] != pair[1]}
    alone = [zone for zone in zones if zone not in joined]
    if len(zones) == 1 or not alone:
        return
    nodes = {
        zone: [name for name, its in zone_of.items() if its == zone] for zone in zones
    }
    raise BadInput(
        got="; ".join(f"{_shown(zone)} ({', '.join(nodes[zone])})" for zone in alone)
        + ": no link to any other zone",
        allowed="zones that a [[link]] joins, or one zone for all nodes",
        fix=_fix(zones, alone, nodes[""] if "" in zones else ()),
    )


def _fix(zones: Sequence[str], alone: Sequence[str], zoneless: Sequence[str]) -> str:
    same = "remove all zone lines, if the nodes share one network"
    if zoneless:
        return f"{same}; else add a zone to {', '.join(zoneless)}, and links to it"
    pairs = [pair for pair in combinations(zones, 2) if {*pair} & {*alone}]
    lines = "; ".join(
        f'[[link]], between = ["{left}", "{right}"], bandwidth_gbit_per_s = 5.0, '
        "latency_ms = 30.0"
        for left, right in pairs
    )
    return f"{same}; else add, line by line and with figures of your own: {lines}"


def _shown(zone: str) -> str:
    return f"zone {zone!r}" if zone else "nodes without a zone"
