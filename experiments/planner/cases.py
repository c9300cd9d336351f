# SPDX-License-Identifier: Apache-2.0
"""Plans typical clusters, and compares the plans with the best known ones.

    python -m experiments.planner.cases [--cases university home] [--search-s 20]

Each case once got a worse plan than a person found by hand or by leaving devices out.
Prints a JSON object per case: CPU seconds of the search, the step and its bound, the
same under h1f1b, the best known step (by the costs of the day it was found; those of
H100 have changed since), idle devices, and which part of the search gave the plan.
Process start and imports are left out. Clusters are in `clusters/`.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetjax.cluster.cluster_files import read_cluster
from hetjax.models.finetuning import WHOLE, WITHOUT_ADAPTERS, LoraConfig, fine_tuned
from hetjax.models.presets import model_preset
from hetjax.planner.model.deadline import deadline
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import idle_devices
from hetjax.planner.search.find import find_plan

_CLUSTERS = Path(__file__).parent / "clusters"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is trained on the cluster of that name, and the best known step."""

    cluster: str
    model: str
    global_batch: int
    seq_len: int
    best_s: float | None = None
    lora: LoraConfig = WITHOUT_ADAPTERS
    tensor_degrees: tuple[int, ...] | None = None

    def request(self) -> PlanRequest:
        model = fine_tuned(model_preset(self.model), WHOLE, self.lora)
        cluster = read_cluster(_CLUSTERS / f"{self.cluster}.toml")
        request = PlanRequest(
            model=model,
            cluster=cluster,
            seq_len=self.seq_len,
            global_batch=self.global_batch,
        )
        if self.tensor_degrees is None:
            return request
        return replace(request, tensor_degrees=self.tensor_degrees)


_QLORA = LoraConfig(rank=16, frozen="nf4")
CASES = {
    "university": Case(
        cluster="university",
        model="llama2-7b",
        global_batch=1024,
        seq_len=4096,
        best_s=28.42,
    ),
    "two-clusters": Case(
        cluster="two-clusters",
        model="gpt3-2.6b",
        global_batch=128,
        seq_len=1024,
        best_s=1.643,
    ),
    "a100-h800": Case(
        cluster="a100-h800",
        model="gpt3-6.7b",
        global_batch=48,
        seq_len=1024,
        best_s=1.256,
    ),
    "a100-h800-h20": Case(
        cluster="a100-h800-h20",
        model="gpt3-6.7b",
        global_batch=48,
        seq_len=1024,
        best_s=1.208,
    ),
    "2060-3090": Case(
        cluster="2060-3090",
        model="gpt2-124m",
        global_batch=32,
        seq_len=1024,
        best_s=0.578,
    ),
    "h100-t4": Case(
        cluster="h100-t4",
        model="llama-1b",
        global_batch=96,
        seq_len=2048,
        best_s=0.363,
    ),
    "home": Case(
        cluster="home",
        model="qwen3-8b",
        global_batch=32,
        seq_len=1024,
        lora=_QLORA,
    ),
    "two-zones": Case(
        cluster="two-zones",
        model="llama3-8b",
        global_batch=64,
        seq_len=2048,
        best_s=4.27,
    ),
    "two-zones, llama-1b": Case(
        cluster="two-zones",
        model="llama-1b",
        global_batch=128,
        seq_len=2048,
    ),
    "workstation": Case(
        cluster="workstation",
        model="llama-1b",
        global_batch=32,
        seq_len=1024,
        best_s=1.6872,
    ),
    **{
        name: Case(
            cluster=name,
            model="tiny",
            global_batch=16,
            seq_len=64,
            tensor_degrees=(1, 2),
        )
        for name in ("m0", "m1")
    },
}


def row(name: str, search_s: float | None) -> dict[str, Any]:
    """Plan a case; the search stops after `search_s`."""
    case = CASES[name]
    request, begin_s = case.request(), time.process_time()
    with deadline(math.inf if search_s is None else search_s):
        found = find_plan(request)
    cpu_s, step_s = time.process_time() - begin_s, found.best.simulation.step_time_s
    idle = idle_devices(found.best.plan, request.cluster)
    return {
        "case": name,
        "cpu_s": round(cpu_s, 1),
        "step_s": step_s,
        "bound_s": found.lower_bound_s,
        "gap": found.gap,
        "schedule": found.best.plan.schedule,
        "h1f1b_step_s": found.best_h1f1b.simulation.step_time_s,
        "h1f1b_gap": found.whole_gap,
        "best_known_s": case.best_s,
        "over_best_known": step_s / case.best_s - 1 if case.best_s else None,
        "idle": {node: len(devices) for node, devices in idle.items()},
        "source": found.source,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--search-s", type=float)
    given = parser.parse_args(arguments)
    for name in given.cases:
        print(json.dumps(row(name, given.search_s)), flush=True)


if __name__ == "__main__":
    main()
