# SPDX-License-Identifier: Apache-2.0
"""States what a plan assumes of the network if the cluster file says nothing.

Owns which nodes' network cards are assumed, the lines with figures and their sources,
and the warnings if a figure is a guess or missing. Does not own the figures
(`cluster/devices.toml`) nor the links that a message passes
(`costs/network/routes.py`).
"""

from collections.abc import Iterator

from hetjax.cluster.catalogue import DeviceSpec, device_spec
from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import listed

_FIELD = "network_gbit_per_s"
_MOST_NAMES = 4


def link_lines(cluster: Cluster) -> Iterator[str]:
    """Yield a line per kind whose nodes' network cards have the catalogue's figure."""
    for spec, names in _assumed(cluster).items():
        yield (
            f"network assumed: {spec.network_gbit_per_s:g} Gbit/s for each host of "
            f"{listed(names, _MOST_NAMES)} ({spec.name}: {_source(spec)})"
        )


def guess_lines(cluster: Cluster) -> Iterator[str]:
    """Yield warnings if some figures are guesses, or zones have no latency."""
    names = [
        name
        for spec, those in _assumed(cluster).items()
        if _FIELD in spec.sources[_FIELD]  # the source of a guess names this field
        for name in those
    ]
    if names:
        yield (
            f"warning: the network of {listed(names, _MOST_NAMES)} is a guess, and "
            f"plans depend on it: give {_FIELD} of each in the cluster file, or a "
            "[[link]] between them"
        )
    zones = {node.zone for node in cluster.nodes}
    for link in cluster.links:
        if not link.latency_ms and zones.issuperset(link.between):
            yield (
                f"warning: the link between {' and '.join(link.between)} has no "
                "latency_ms: plans assume that both are in one machine room. Give it "
                "half of the time that ping prints"
            )


def _assumed(cluster: Cluster) -> dict[DeviceSpec, list[str]]:
    """Return nodes, by kind, that use their cards at a speed that was not given."""
    found: dict[DeviceSpec, list[str]] = {}
    for node in cluster.nodes:
        spec = device_spec(node)
        is_given = node.network_gbit_per_s is not None
        if not is_given and _needs_its_card(cluster, node, spec):
            found.setdefault(spec, []).append(node.name)
    return found


def _needs_its_card(cluster: Cluster, node: Node, spec: DeviceSpec) -> bool:
    """Return whether a node's hosts, or nodes without a link to it, use its card."""
    if node.hosts > 1 and not spec.links_span_hosts:
        return True
    own_links = [link.between for link in cluster.links if node.name in link.between]
    linked = {node.name, *(end for ends in own_links for end in ends)}
    return any(other.name not in linked for other in cluster.nodes)


def _source(spec: DeviceSpec) -> str:
    """Return where the figure is from, without the advice to give a better one."""
    return spec.sources[_FIELD].partition(f": give {_FIELD}")[0]
