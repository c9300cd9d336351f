# SPDX-License-Identifier: Apache-2.0
"""Measures planning time for about 1,000 GPUs of unlike kinds, and replanning time.

    python -m experiments.planner.search_time [--kinds 3 6]

Plans GPT-3 6.7B with 1,024 sequences of 1,024 tokens on 1,008 GPUs of three and of six
kinds, from the cluster to a simulated plan with its certified bound: cost tables,
templates, counts, placement, two simulations at most, no local search. Then removes one
node from a small cluster of three kinds and times replanning. Process start and imports
are left out. Prints one JSON object; memory is the process's peak.
"""

import argparse
import json
import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetjax.cluster.cluster import Cluster, Node
from hetjax.models.presets import model_preset
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.planner.search.replan import replan

MODEL, SEQ_LEN, GLOBAL_BATCH = "gpt3-6.7b", 1024, 1024
# nodes of eight
KINDS = {
    3: {"A100-SXM4-80GB": 50, "H800": 38, "H20": 38},
    6: {
        "A100-SXM4-80GB": 32,
        "H800": 24,
        "H20": 24,
        "A100-SXM4-40GB": 18,
        "L40S": 15,
        "H100-80GB-HBM3": 13,
    },
}
LIMIT_S, MEMORY_LIMIT_GIB = 20.0, 2.0
_SMALL = {"A100-SXM4-80GB": 2, "H800": 2, "H20": 2}
_SMALL_BATCH = 256


def request_of(nodes: dict[str, int], global_batch: int) -> PlanRequest:
    """Return the request for `nodes` nodes of eight of each device."""
    there = tuple(
        Node(name=f"{device.lower()}-{n}", device=device, count=8)
        for device, count in nodes.items()
        for n in range(count)
    )
    return PlanRequest(
        model=model_preset(MODEL),
        cluster=Cluster(name="search-time", nodes=there),
        seq_len=SEQ_LEN,
        global_batch=global_batch,
    )


def planned(num_kinds: int) -> dict[str, Any]:
    request = request_of(KINDS[num_kinds], GLOBAL_BATCH)
    found = find_plan(request, local_work=0)
    return {
        "num_kinds": num_kinds,
        "num_gpus": request.cluster.num_devices,
        "search_s": round(found.search_s, 2),
        "limit_s": LIMIT_S,
        "within": found.search_s < LIMIT_S,
        "step_s": found.best.simulation.step_time_s,
        "model_s": found.model_time_s,
        "lower_bound_s": found.lower_bound_s,
    }


def replanned() -> list[dict[str, Any]]:
    """Lose each kind's first node in turn; the first plan has built the tables."""
    request = request_of(_SMALL, _SMALL_BATCH)
    current = find_plan(request, local_work=0).best
    rows = []
    for device in _SMALL:
        lost = f"{device.lower()}-0"
        nodes = tuple(n for n in request.cluster.nodes if n.name != lost)
        left = replace(request, cluster=replace(request.cluster, nodes=nodes))
        found = replan(left, current.plan)
        rows.append(
            {
                "lost": lost,
                "search_s": round(found.search_s, 2),
                "source": found.source,
                "step_s": found.best.simulation.step_time_s,
                "step_before_s": current.simulation.step_time_s,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", type=int, nargs="+", default=[3, 6], choices=KINDS)
    given = parser.parse_args(arguments)
    rows = [planned(num_kinds) for num_kinds in given.kinds]
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    result = {
        "command": "python -m experiments.planner.search_time",
        "plans": rows,
        "replans": replanned(),
        "memory_gib": round(peak_gib, 2),
        "memory_limit_gib": MEMORY_LIMIT_GIB,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
