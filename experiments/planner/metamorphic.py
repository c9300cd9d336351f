# SPDX-License-Identifier: Apache-2.0
"""Tests whether a cluster that is no worse ever gets a slower plan.

    python -m experiments.planner.metamorphic [--clusters 40] [--seed 0] [--devices 8]

Draws clusters as `dominance.py` does. Searches each as drawn and in every variation:
nodes renamed, nodes in another order, a faster network, a faster node, one more device
on a node, one more node. Nothing limits the searches, but the requests have fewer
choices, so that a search takes seconds. Bounds are not proved. Prints a JSON object per
cluster: the step as drawn, that of every variation, and by how much each is slower
(`behind`, as a share; negative where it is faster). Then prints a JSON object for all.
CPU seconds exclude process start and imports.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

from experiments.planner.dominance import drawn_request
from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Search

ALLOWED = 0.005  # by which a variation may be slower
_FASTER = 1.25


def renamed(cluster: Cluster, r: Random) -> Cluster:
    """Rename nodes and zones, so that the new names sort differently."""
    ends = sorted({node.name for node in cluster.nodes})
    ends += sorted({node.zone for node in cluster.nodes} - {""})
    names = [f"m{n}" for n in range(len(ends))]
    other = dict(zip(ends, r.sample(names, len(names)), strict=True)) | {"": ""}
    nodes = tuple(
        replace(node, name=other[node.name], zone=other[node.zone])
        for node in cluster.nodes
    )
    links = tuple(
        replace(link, between=(other[link.between[0]], other[link.between[1]]))
        for link in cluster.links
    )
    return replace(cluster, nodes=nodes, links=links)


def reordered(cluster: Cluster, r: Random) -> Cluster:
    nodes = r.sample(cluster.nodes, len(cluster.nodes))
    return replace(cluster, nodes=tuple(nodes))


def with_faster_network(cluster: Cluster, r: Random) -> Cluster:
    """Speed up every link, or every network card if there are no links."""
    if cluster.links:
        return replace(cluster, links=tuple(map(_faster_link, cluster.links)))
    return replace(cluster, nodes=tuple(map(_faster_card, cluster.nodes)))


def _faster_link(link: Link) -> Link:
    return replace(link, bandwidth_gbit_per_s=link.bandwidth_gbit_per_s * _FASTER)


def _faster_card(node: Node) -> Node:
    card = device_spec(node).network_gbit_per_s
    return replace(node, network_gbit_per_s=card * _FASTER)


def with_faster_node(cluster: Cluster, r: Random) -> Cluster:
    """Make one node compute, read and write faster."""
    node = r.choice(cluster.nodes)
    spec = device_spec(node)
    faster = replace(
        node,
        peak_tflops=spec.peak_tflops * _FASTER,
        memory_gb_per_s=spec.memory_gb_per_s * _FASTER,
    )
    return _with_node(cluster, node, faster)


def with_device_more(cluster: Cluster, r: Random) -> Cluster:
    node = r.choice(cluster.nodes)
    return _with_node(cluster, node, replace(node, count=node.count + 1))


def with_node_more(cluster: Cluster, r: Random) -> Cluster:
    """Add a node like an existing one."""
    more = replace(r.choice(cluster.nodes), name="another")
    return replace(cluster, nodes=(*cluster.nodes, more))


def _with_node(cluster: Cluster, before: Node, after: Node) -> Cluster:
    nodes = (after if node is before else node for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


VARIATIONS: Mapping[str, Callable[[Cluster, Random], Cluster]] = {
    "renamed": renamed,
    "reordered": reordered,
    "faster network": with_faster_network,
    "faster node": with_faster_node,
    "device more": with_device_more,
    "node more": with_node_more,
}


def varied(request: PlanRequest, variation: str, seed: int) -> PlanRequest:
    """Return the request on a cluster that is no worse."""
    vary, r = VARIATIONS[variation], Random(f"{variation} {seed}")
    return replace(request, cluster=vary(request.cluster, r))


def step_s(request: PlanRequest) -> float | None:
    """Return the step of the best plan found; None if no plan fits."""
    search = Search(request, [Objective()])
    try:
        search.run(proves=False)
    except (BadInput, NoFeasiblePlan):
        return None
    return search.found()[0].best.simulation.step_time_s


def quick_request(seed: int, most_devices: int) -> PlanRequest:
    """Return a drawn request with fewer choices."""
    request = drawn_request(seed, most_devices)
    return replace(request, microbatch_sizes=(1, 4), remats=("none", "full"))


def row(seed: int, most_devices: int, variations: Sequence[str]) -> dict[str, object]:
    request, begin_s = quick_request(seed, most_devices), time.process_time()
    drawn_s = step_s(request)
    drawn: dict[str, object] = {
        "cluster": seed,
        "there": [f"{n.count} {n.device} {n.zone}" for n in request.cluster.nodes],
        "model": request.model.name,
        "global_batch": request.global_batch,
        "step_s": drawn_s,
    }
    if drawn_s is None:
        return drawn
    found = {name: step_s(varied(request, name, seed)) for name in variations}
    behind = {name: s / drawn_s - 1 if s else None for name, s in found.items()}
    cpu_s = round(time.process_time() - begin_s, 1)
    return drawn | {"varied_s": found, "behind": behind, "cpu_s": cpu_s}


def summary(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return how many variations got slower plans, or no plan, and the worst."""
    behind: list[tuple[float, str, object]] = []
    lost: list[tuple[str, object]] = []
    for each in rows:
        by_name = each.get("behind")
        for name, share in by_name.items() if isinstance(by_name, dict) else ():
            if isinstance(share, float):
                behind.append((share, name, each["cluster"]))
            else:
                lost.append((name, each["cluster"]))
    late = [each for each in behind if each[0] > ALLOWED]
    planned = sum(each["step_s"] is not None for each in rows)
    return {
        "clusters": planned,
        "variations": len(behind),
        "behind": len(late),
        "without_plan": lost,
        "most": max(behind, default=None),
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="the first cluster's")
    parser.add_argument("--devices", type=int, default=8, help="of a cluster, at most")
    parser.add_argument(
        "--variations", nargs="+", default=list(VARIATIONS), choices=VARIATIONS
    )
    given = parser.parse_args(argv)
    rows: list[dict[str, object]] = []
    for seed in range(given.seed, given.seed + given.clusters):
        rows.append(row(seed, given.devices, given.variations))
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
