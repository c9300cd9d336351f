# SPDX-License-Identifier: Apache-2.0
"""Compares planned layouts with Megatron's and with 1F1B on two slowly linked clusters.

    python -m experiments.planner.two_clusters [--models gpt3-1.3b gpt3-2.6b gpt3-6.7b]

The cluster follows HARP's test cluster (arXiv 2509.24859): one node of 8 V100, which
the paper emulates by A100-40GB at 585 MHz (127 TFLOP/s fp16 measured, 114 GB/s of
NVLink, about 8 GB taken away), nodes of 2 A100-40GB, 200 Gbit/s inside a cluster, 5
Gbit/s and 1 ms across. The paper reports 1.3x to 1.6x. The same simulator judges all
plans, with the same analytic costs. `over_1f1b` compares with the same layout under
1F1B's launch-aheads. Prints one JSON object with a row per model and link.
"""

import argparse
import json
import sys
from typing import Any

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.models.presets import model_preset
from hetjax.planner.baselines.by_name import BASELINES, compared
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import LOCAL_WORK, find_plan

EMULATED_V100 = Node(
    name="v100-0",
    device="emulated-V100",
    count=8,
    zone="v",
    peak_tflops=127.0,
    memory_gib=32.0,
    memory_gb_per_s=1555.0,
    intra_node_gb_per_s=150.0,
    network_gbit_per_s=200.0,
)


def cluster(num_a100_nodes: int, gbit_per_s: float) -> Cluster:
    a100s = tuple(
        Node(
            name=f"a100-{n}",
            device="A100-SXM4-40GB",
            count=2,
            zone="a",
            network_gbit_per_s=200.0,
        )
        for n in range(num_a100_nodes)
    )
    link = Link(between=("v", "a"), bandwidth_gbit_per_s=gbit_per_s, latency_ms=1.0)
    return Cluster(name="two clusters", nodes=(EMULATED_V100, *a100s), links=(link,))


def row(
    model: str, num_a100_nodes: int, gbit_per_s: float, batch: int, local_work: float
):
    request = PlanRequest(
        model=model_preset(model),
        cluster=cluster(num_a100_nodes, gbit_per_s),
        seq_len=1024,
        global_batch=batch,
    )
    others = {
        name: None if isinstance(found, NoFeasiblePlan) else found
        for name, found in compared(request, tuple(BASELINES)).items()
    }
    found = find_plan(request, local_work=local_work)
    step_time_s = found.best.simulation.step_time_s
    plain_s = evaluate_plan(request, found.best.plan, "1f1b").simulation.step_time_s
    steps_s = {n: p and p.simulation.step_time_s for n, p in others.items()}
    megatron_s = steps_s["megatron"]
    told: dict[str, Any] = {
        "model": model,
        "a100_nodes": num_a100_nodes,
        "link_gbit_per_s": gbit_per_s,
        "global_batch": batch,
        "baselines_s": steps_s,
        "hetjax_s": step_time_s,
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "search_s": round(found.search_s, 2),
        "over_megatron": megatron_s and megatron_s / step_time_s,
        "over_1f1b": plain_s / step_time_s,
        "crosses_link": any(
            len({stage.node[0] for stage in replica.stages}) > 1
            for replica in found.best.plan.replicas
        ),
    }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ["gpt3-1.3b", "gpt3-2.6b", "gpt3-6.7b"]
    parser.add_argument("--models", nargs="+", default=models)
    parser.add_argument("--links", nargs="+", type=float, default=[5.0, 2.0])
    parser.add_argument("--a100-nodes", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--local-work", type=float, default=LOCAL_WORK)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        for link in arguments.links:
            rows.append(
                row(
                    model,
                    arguments.a100_nodes,
                    link,
                    arguments.global_batch,
                    arguments.local_work,
                )
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
