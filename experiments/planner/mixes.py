# SPDX-License-Identifier: Apache-2.0
"""Measures the speed-up of planned layouts over baselines on mixed clusters.

    python -m experiments.planner.mixes [--models gpt3-6.7b llama2-7b mixtral-8x7b]
        [--mixes "8 A100 + 8 H20"] [--seq-len 1024] [--budget-s 10]

Nine mixes of A100-80GB, H800 and H20 with 8 to 64 GPUs (AutoHet, arXiv 2512.20953,
reports at most 1.79x over the better of Megatron-LM and Whale on such clusters). The
same simulator judges all plans, the baselines' too, with the same analytic costs; a
baseline may choose the best of its own plans by that judge. Prints one JSON object with
a row per model and mix.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.models.presets import model_preset
from hetjax.planner.baselines.by_name import compared
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.schedule.predicted import Predicted

DEVICES = {"A100": "A100-SXM4-80GB", "H800": "H800", "H20": "H20"}
# nodes by (device, GPUs of a node)
MIXES: dict[str, tuple[tuple[str, int], ...]] = {
    "4 A100 + 4 H20": (("A100", 4), ("H20", 4)),
    "8 A100 + 8 H800": (("A100", 8), ("H800", 8)),
    "8 A100 + 8 H20": (("A100", 8), ("H20", 8)),
    "8 H800 + 8 H20": (("H800", 8), ("H20", 8)),
    "16 A100 + 8 H800": (("A100", 8), ("A100", 8), ("H800", 8)),
    "8 A100 + 8 H800 + 8 H20": (("A100", 8), ("H800", 8), ("H20", 8)),
    "16 A100 + 16 H20": (("A100", 8), ("A100", 8), ("H20", 8), ("H20", 8)),
    "16 A100 + 8 H800 + 8 H20": (("A100", 8), ("A100", 8), ("H800", 8), ("H20", 8)),
    "24 A100 + 24 H800 + 16 H20": (
        *(("A100", 8),) * 3,
        *(("H800", 8),) * 3,
        *(("H20", 8),) * 2,
    ),
}
BASELINES = ("megatron", "whale")
_WORK_OF_A_SECOND = 5_000  # of local search, which is counted and not timed


def cluster(mix: Sequence[tuple[str, int]], name: str) -> Cluster:
    nodes = tuple(
        Node(name=f"{kind.lower()}-{n}", device=DEVICES[kind], count=count)
        for n, (kind, count) in enumerate(mix)
    )
    return Cluster(name=name, nodes=nodes)


def row(model: str, mix: str, seq_len: int, budget_s: float) -> dict[str, Any]:
    machines = cluster(MIXES[mix], mix)
    request = PlanRequest(
        model=model_preset(model),
        cluster=machines,
        seq_len=seq_len,
        global_batch=8 * machines.num_devices,
    )
    start_s = time.perf_counter()
    others = compared(request, BASELINES)
    baseline_s = time.perf_counter() - start_s
    steps_s = {name: _step_s(found) for name, found in others.items()}
    told = {
        "model": model,
        "mix": mix,
        "global_batch": request.global_batch,
        **{f"{name}_s": seconds for name, seconds in steps_s.items()},
        "baselines_search_s": round(baseline_s, 2),
    }
    try:
        found = find_plan(request, local_work=budget_s * _WORK_OF_A_SECOND)
    except NoFeasiblePlan as error:
        return told | {"infeasible": error.got}
    step_time_s = found.best.simulation.step_time_s
    there = [seconds for seconds in steps_s.values() if seconds is not None]
    return told | {
        "hetjax_s": step_time_s,
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "model_gap": found.model_gap,
        "search_s": round(found.search_s, 2),
        "speed_up": min(there) / step_time_s if there else None,
    }


def _step_s(found: Predicted | NoFeasiblePlan) -> float | None:
    if isinstance(found, NoFeasiblePlan):
        return None
    return found.simulation.step_time_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ["gpt3-6.7b", "llama2-7b", "mixtral-8x7b"]
    parser.add_argument("--models", nargs="+", default=models)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES))
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--budget-s", type=float, default=10.0)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        for mix in arguments.mixes:
            rows.append(row(model, mix, arguments.seq_len, arguments.budget_s))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
