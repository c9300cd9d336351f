# SPDX-License-Identifier: Apache-2.0
"""Tests whether a plan for all devices is ever slower than one for some of them.

    python -m experiments.planner.dominance [--clusters 500] [--devices 24] [--first 0]

Draws clusters of at most `--devices` devices of one to three kinds, in one or two
zones, and a training task for each. Searches each cluster as a whole, and each part of
it: the parts that the planner's floor considers, and three random ones. Prints a JSON
object per cluster: the step of the whole, the best part and its step, and by how much
the whole is slower (`behind`, as a share; negative where it is faster). Then prints a
JSON object for all. Bounds are not proved. CPU seconds exclude process start and
imports.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

from hetjax.cluster.cluster import Cluster, Link, Node, part_of
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.models.presets import model_preset
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Found, Search
from hetjax.planner.search.first.parts import parts_alone, parts_without

KINDS = (
    *("A100-SXM4-80GB", "A100-SXM4-40GB", "H100-SXM5-80GB", "H20", "V100-SXM2-32GB"),
    *("RTX-4090", "RTX-3090", "L4", "T4", "A10"),
)
MODELS = ("gpt2-124m", "llama-1b", "gpt3-2.6b", "llama3-8b")
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
    """Yield the floor's parts and three random ones; each set of nodes once."""
    r, names = Random(f"parts {seed}"), [n.name for n in request.cluster.nodes]
    random = (
        frozenset(r.sample(names, r.randint(1, len(names) - 1)))
        for _ in range(3 if len(names) > 1 else 0)
    )
    seen: set[frozenset[str]] = set()
    drawn = (
        replace(request, cluster=part_of(request.cluster, chosen)) for chosen in random
    )
    for part in (*parts_alone(request), *parts_without(request), *drawn):
        held = frozenset(node.name for node in part.cluster.nodes)
        if held not in seen:
            seen.add(held)
            yield part


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
    parts_s = 0.0
    for part in parts_of(request, seed):
        found, seconds = _found(part)
        parts_s += seconds
        if found is not None and (best is None or _step_s(found) < _step_s(best)):
            best = found
    planned: dict[str, object] = {
        "cluster": seed,
        "there": [f"{n.count} {n.device} {n.zone}" for n in request.cluster.nodes],
        "model": request.model.name,
        "global_batch": request.global_batch,
        "step_s": None if whole is None else _step_s(whole),
        "source": None if whole is None else whole.source,
        "cpu_s": round(cpu_s, 1),
        "parts_cpu_s": round(parts_s, 1),
    }
    if best is None:
        return planned
    part = [node.name for node in best.request.cluster.nodes]
    behind = None if whole is None else _step_s(whole) / _step_s(best) - 1
    return planned | {"part": part, "part_s": _step_s(best), "behind": behind}


def _step_s(found: Found) -> float:
    return found.best.simulation.step_time_s


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=500)
    parser.add_argument("--devices", type=int, default=24)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args(argv)
    behind: list[float] = []
    for seed in range(given.first, given.first + given.clusters):
        compared = row(seed, given.devices)
        print(json.dumps(compared), flush=True)
        if isinstance(compared.get("behind"), float):
            behind.append(float(str(compared["behind"])))
    late = [share for share in behind if share > _ALLOWED]
    most = max(behind, default=0.0)
    print(json.dumps({"clusters": len(behind), "behind": len(late), "most": most}))


if __name__ == "__main__":
    main(sys.argv[1:])
