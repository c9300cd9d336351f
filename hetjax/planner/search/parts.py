# SPDX-License-Identifier: Apache-2.0
"""Parts of a cluster that are worth a plan of their own.

All devices that take part have to wait for the slowest way between them, so that some
of them may be faster alone. Owns which parts these are. Does not own which of them are
searched (`floor.py`, `proposals.py`).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import part_of
from hetjax.planner.model.request import PlanRequest, can_offload


def parts_alone(request: PlanRequest) -> list[PlanRequest]:
    """Every kind of device, every zone, every class, and one node of each class."""
    nodes = [frozenset({nodes.nodes[0].name}) for nodes in request.classes]
    return _parts(request, [*_groups(request), *nodes])


def parts_without(request: PlanRequest) -> list[PlanRequest]:
    """All but one kind, zone or class; none that is one of them alone."""
    whole = frozenset(node.name for node in request.cluster.nodes)
    groups = _groups(request)
    others = (whole - group for group in groups)
    return _parts(request, [names for names in others if names not in groups])


def _groups(request: PlanRequest) -> list[frozenset[str]]:
    """The names of nodes of each kind, of each zone and of each class."""
    kinds, zones = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for node in request.cluster.nodes:
        kinds[canonical_name(node.device)].add(node.name)
        zones[node.zone].add(node.name)
    classes = ({node.name for node in nodes.nodes} for nodes in request.classes)
    return [*map(frozenset, (*kinds.values(), *zones.values(), *classes))]


def _parts(request: PlanRequest, chosen: Iterable[frozenset[str]]) -> list[PlanRequest]:
    """Requests for these nodes, each set once; neither none nor all of them."""
    num_nodes = len(request.cluster.nodes)
    there = (names for names in dict.fromkeys(chosen) if 0 < len(names) < num_nodes)
    clusters = (part_of(request.cluster, names) for names in there)
    return [
        replace(request, cluster=cluster)
        for cluster in clusters
        if can_offload(cluster, request.offloads)
    ]
