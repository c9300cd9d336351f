# SPDX-License-Identifier: Apache-2.0
"""Probes the hosts of a file: returns their cluster, with measured links.

Owns the text of the result. Does not own the probe of a host's cards
(`hetjax/launchers/over_ssh.py`) nor the measuring of connections (`way_between.py`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.machines import cluster_of_machines, matched
from hetjax.diagnosis.facts import Peer
from hetjax.diagnosis.way_between import links_of, ways_between
from hetjax.launchers.over_ssh import SshHosts


@dataclass(frozen=True, kw_only=True, slots=True)
class LookedAt:
    """The cluster of the hosts that answered; `ways` has a line to print for each pair
    of them, `missing` the names of the others."""

    cluster: Cluster
    ways: tuple[str, ...]
    missing: tuple[str, ...]


def look_at_hosts(file: Path) -> LookedAt:
    """Probe all hosts and measure the connections between them. Raises BadInput for a
    bad file, or if no host answers."""
    reach = SshHosts(file)
    machines = reach.machines(looks=True)
    found = cluster_of_machines("ssh", machines)
    ways = ways_between(reach, machines)
    links = links_of(found, matched(found, machines, simulate=False), ways)
    lines = tuple(_line(*ends, way) for ends, way in ways.items())
    there = {machine.id for machine in machines}
    missing = tuple(name for name in reach.names if name not in there)
    return LookedAt(cluster=replace(found, links=links), ways=lines, missing=missing)


def _line(left: str, right: str, way: Peer) -> str:
    if way.error is not None:
        return f"{left} to {right}: not measured ({way.error})"
    return f"{left} to {right}: {way.gbit_per_s:.3g} Gbit/s, {way.latency_ms:.3g} ms"
