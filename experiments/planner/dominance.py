# SPDX-License-Identifier: Apache-2.0
"""Tests whether a plan for all devices is ever slower than one for some of them.

    python -m experiments.planner.dominance [--clusters 500] [--devices 24] [--first 0]

Draws clusters of at most `--devices` devices of one to three kinds, in one or two
zones, and a training task for each. Searches each cluster as a whole, and each part of
it: the parts that the planner's floor considers, and three random ones. Of parts with
the same devices in the same zones, only one is searched. Parts that a lower bound on
all their plans proves to be no faster than the whole are not searched (`excluded`).
Prints a JSON object per cluster: the step of the whole, the best searched part and its
step, and by how much the whole is slower (`behind`, as a share; negative where it is
faster, None where no part was searched). Then prints a JSON object for all. Bounds of
searched plans are not proved. CPU seconds exclude process start and imports.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from random import Random

from hetjax.cluster.cluster import Cluster, Link, Node, part_of
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.models.presets import model_preset
from hetjax.planner.bound.certificate import certified_bound
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Found, Search
from hetjax.planner.search.first.parts import parts_alone, parts_without

KINDS = (
    *("A100-SXM4-80GB", "A100-SXM4-40GB", "H100-SXM5-80GB", "H20", "V100-SXM2-32GB"),
    *("RTX-4090", "RTX-3090", "L4", "T4", "A10"),
)
MODELS = ("gpt2-124m", "llama-1b", "gpt3-2.6b", "llama3-8b")
Alike = tuple[tuple[str, int, str], ...]
_ALLOWED = 0.005  # by which a whole may be slower than a part


def drawn_request(seed: int, most_devices: int) -> PlanRequest:
    r = Random(f"dominance {seed}")
    nodes: list[Node] = []
    zones = r.choice([("",), ("",), ("east", "west")])
    for kind in r.sample(KINDS, r.randint(1, 3)):
        count, zone = r.choice([1, 2, 4, 8]), r.choice(zones)
        for _ in range(r.randint(1, 4)):
            if sum(node.count for node in nodes) + count <= most_devices:
                name = f"n{len(nodes)}"
                nodes.append(Node(name=name, device=kind, count=count, zone=zone))
    links: tuple[Link, ...] = ()
    if len({node.zone for node in nodes}) > 1:
        gbit_per_s = r.choice([1.0, 5.0, 10.0, 25.0])
        between = Link(
            between=("east", "west"), bandwidth_gbit_per_s=gbit_per_s, latency_ms=1.0
        )
        links = (between,)
    return PlanRequest(
        model=model_preset(r.choice(MODELS)),
        cluster=Cluster(name=f"drawn-{seed}", nodes=tuple(nodes), links=links),
        seq_len=r.choice([512, 1024]),
        global_batch=r.choice([16, 32, 64, 96]),
    )


def parts_of(request: PlanRequest, seed: int) -> Iterator[PlanRequest]:
    """Yield the floor's parts and three random ones; of parts alike, the first."""
    r, names = Random(f"parts {seed}"), [n.name for n in request.cluster.nodes]
    random = (
        frozenset(r.sample(names, r.randint(1, len(names) - 1)))
        for _ in range(3 if len(names) > 1 else 0)
    )
    seen: set[Alike] = {_alike(request)}
    drawn = (
        replace(request, cluster=part_of(request.cluster, chosen)) for chosen in random
    )
    for part in (*parts_alone(request), *parts_without(request), *drawn):
        if _alike(part) not in seen:
            seen.add(_alike(part))
            yield part


def _alike(request: PlanRequest) -> Alike:
    """Return what two clusters have in common that differ only in names and order."""
    nodes = request.cluster.nodes
    return tuple(sorted((node.device, node.count, node.zone) for node in nodes))


def _is_no_faster(part: PlanRequest, whole: Found) -> bool:
    """Return whether a bound proves that no plan of the part is faster than the whole.

    It holds for every schedule, and for stages that share devices.
    """
    least_s = certified_bound(part, (), "interleaved").step_s
    return least_s is not None and least_s >= whole.best.simulation.step_time_s


def _found(request: PlanRequest) -> tuple[Found | None, float]:
    search, begin_s = Search(request, [Objective()]), time.process_time()
    found: Found | None = None
    with suppress(BadInput, NoFeasiblePlan):
        search.run(proves=False)
        found = search.found()[0]
    return found, time.process_time() - begin_s


def row(seed: int, most_devices: int) -> dict[str, object]:
    request = drawn_request(seed, most_devices)
    whole, cpu_s = _found(request)
    best: Found | None = None
    parts_s, num_excluded = 0.0, 0
    for part in parts_of(request, seed):
        if whole is not None and _is_no_faster(part, whole):
            num_excluded += 1
            continue
        found, seconds = _found(part)
        parts_s += seconds
        best = min((best, found), key=lambda each: _step_s(each) or inf)
    step_s, part_s = _step_s(whole), _step_s(best)
    return {
        "cluster": seed,
        "there": [f"{n.count} {n.device} {n.zone}" for n in request.cluster.nodes],
        "model": request.model.name,
        "global_batch": request.global_batch,
        "step_s": step_s,
        "source": None if whole is None else whole.source,
        "cpu_s": round(cpu_s, 1),
        "parts_cpu_s": round(parts_s, 1),
        "excluded": num_excluded,
        "part": None if best is None else [n.name for n in best.request.cluster.nodes],
        "part_s": part_s,
        "behind": step_s / part_s - 1 if step_s and part_s else None,
    }


def _step_s(found: Found | None) -> float | None:
    return None if found is None else found.best.simulation.step_time_s


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=500)
    parser.add_argument("--devices", type=int, default=24)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args(argv)
    rows: list[dict[str, object]] = []
    for seed in range(given.first, given.first + given.clusters):
        rows.append(row(seed, given.devices))
        print(json.dumps(rows[-1]), flush=True)
    planned = [row for row in rows if row["step_s"] or row["part"]]
    behind = [float(str(row["behind"])) for row in planned if row["behind"] is not None]
    total = {
        "clusters": len(planned),
        "no_plan_but_of_a_part": sum(row["step_s"] is None for row in planned),
        "behind": sum(share > _ALLOWED for share in behind),
        "most": max(behind, default=None),
    }
    print(json.dumps(total))


if __name__ == "__main__":
    main(sys.argv[1:])
