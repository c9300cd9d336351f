# SPDX-License-Identifier: Apache-2.0
"""Lists the parts of a cluster that are worth a separate plan.

All devices of a plan wait for the slowest way between them, so a part of them may be
faster alone. Owns the list of parts. Does not own which of them are searched
(`floor.py`, `proposals.py`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Node, part_of
from hetjax.planner.model.request import PlanRequest, can_offload

_PARTED = 32  # devices; parts of larger clusters are not searched


def searches_parts(request: PlanRequest) -> bool:
    """Return whether the cluster is small enough to search parts like the whole."""
    return request.cluster.num_devices <= _PARTED


def parts_alone(request: PlanRequest) -> list[PlanRequest]:
    """Return every kind of device, zone, kind within a zone and class, and one node of
    each class. So parts of a kind or a zone are also parts of the whole."""
    kinds, zones = nodes_by_kind(request).values(), nodes_by_zone(request).values()
    both = [kind & zone for kind in kinds for zone in zones]
    nodes = [frozenset({nodes.nodes[0].name}) for nodes in request.classes]
    return _parts(request, [*_groups(request), *both, *nodes])


def parts_without(request: PlanRequest) -> list[PlanRequest]:
    """Return all but each kind, zone and class; for a small cluster also all but one
    node of each class. Parts that are a kind, zone or class themselves are left out."""
    whole = request.cluster.names
    groups = _groups(request)
    alike = request.classes if searches_parts(request) else ()
    nodes = [frozenset({nodes.nodes[-1].name}) for nodes in alike]
    others = (whole - group for group in [*groups, *nodes])
    return _parts(request, [names for names in others if names not in groups])


def parts_compared(request: PlanRequest) -> list[PlanRequest]:
    """Return every kind, zone and class, and all but each of these: the parts whose
    worth is shown."""
    whole = request.cluster.names
    groups = _groups(request)
    return _parts(request, [*groups, *(whole - group for group in groups)])


def _groups(request: PlanRequest) -> list[frozenset[str]]:
    """Return the node names of each kind, each zone and each class."""
    groups = nodes_by_kind(request), nodes_by_zone(request), nodes_by_class(request)
    return [nodes for group in groups for nodes in group.values()]


def nodes_by_kind(request: PlanRequest) -> dict[str, frozenset[str]]:
    """Return the node names of every kind of device."""
    return _grouped(request, lambda node: canonical_name(node.device))


def nodes_by_zone(request: PlanRequest) -> dict[str, frozenset[str]]:
    """Return the node names of every zone; the zone without a name is `""`."""
    return _grouped(request, lambda node: node.zone)


def nodes_by_class(request: PlanRequest) -> dict[str, frozenset[str]]:
    """Return the node names of every class."""
    return {
        alike.name: frozenset(node.name for node in alike.nodes)
        for alike in request.classes
    }


def _grouped(
    request: PlanRequest, key: Callable[[Node], str]
) -> dict[str, frozenset[str]]:
    groups = defaultdict[str, set[str]](set)
    for node in request.cluster.nodes:
        groups[key(node)].add(node.name)
    return {name: frozenset(nodes) for name, nodes in groups.items()}


def _parts(request: PlanRequest, chosen: Iterable[frozenset[str]]) -> list[PlanRequest]:
    """Return requests for these sets of nodes, each once, if not empty or all nodes."""
    num_nodes = len(request.cluster.nodes)
    there = (names for names in dict.fromkeys(chosen) if 0 < len(names) < num_nodes)
    clusters = (part_of(request.cluster, names) for names in there)
    return [
        replace(request, cluster=cluster)
        for cluster in clusters
        if can_offload(cluster, request.offloads)
    ]
