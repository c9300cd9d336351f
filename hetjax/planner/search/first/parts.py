# SPDX-License-Identifier: Apache-2.0
"""Parts of a cluster that are worth a plan of their own.

All devices that take part have to wait for the slowest way between them, so that some
of them may be faster alone. Owns which parts these are. Does not own which of them are
searched (`floor.py`, `proposals.py`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Node, part_of
from hetjax.planner.model.request import PlanRequest, can_offload

_PARTED = 32  # devices: of larger clusters no parts are searched


def searches_parts(request: PlanRequest) -> bool:
    """Whether the cluster is small enough for parts to be searched like the whole."""
    return request.cluster.num_devices <= _PARTED


def parts_alone(request: PlanRequest) -> list[PlanRequest]:
    """Every kind of device, every zone, every class, and one node of each class."""
    nodes = [frozenset({nodes.nodes[0].name}) for nodes in request.classes]
    return _parts(request, [*_groups(request), *nodes])


def parts_without(request: PlanRequest) -> list[PlanRequest]:
    """All but one kind, zone or class, of a small cluster also all but one node of a
    class; none that is a kind, zone or class alone."""
    whole = frozenset(node.name for node in request.cluster.nodes)
    groups = _groups(request)
    alike = request.classes if searches_parts(request) else ()
    nodes = [frozenset({nodes.nodes[-1].name}) for nodes in alike]
    others = (whole - group for group in [*groups, *nodes])
    return _parts(request, [names for names in others if names not in groups])


def _groups(request: PlanRequest) -> list[frozenset[str]]:
    """The names of nodes of each kind, of each zone and of each class."""
    groups = nodes_by_kind(request), nodes_by_zone(request), nodes_by_class(request)
    return [nodes for group in groups for nodes in group.values()]


def nodes_by_kind(request: PlanRequest) -> dict[str, frozenset[str]]:
    """Return the names of nodes of every kind of device."""
    return _grouped(request, lambda node: canonical_name(node.device))


def nodes_by_zone(request: PlanRequest) -> dict[str, frozenset[str]]:
    """Return the names of nodes in every zone; that without a name is `""`."""
    return _grouped(request, lambda node: node.zone)


def nodes_by_class(request: PlanRequest) -> dict[str, frozenset[str]]:
    """Return the names of nodes of every class."""
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
    """Requests for these nodes, each set once; neither none nor all of them."""
    num_nodes = len(request.cluster.nodes)
    there = (names for names in dict.fromkeys(chosen) if 0 < len(names) < num_nodes)
    clusters = (part_of(request.cluster, names) for names in there)
    return [
        replace(request, cluster=cluster)
        for cluster in clusters
        if can_offload(cluster, request.offloads)
    ]
