# SPDX-License-Identifier: Apache-2.0
"""Compares hetjax with PyTorch's pipelining: two processes, one pipeline, in one run.

    python -m experiments.islands.against_torch --torch PYTHON [--rounds 3] [--steps 3]

PYTHON is an interpreter that has PyTorch (`experiments/benchmarks/torch_pipeline.py`
says which model it runs and how it times it). Both sides train the same GPT (8 blocks,
width 512, 256 tokens, 8 microbatches of 4, fp32, one thread a process), first in one
process and then as two stages in two. The sides alternate by rounds of some steps, and
ours also by steps, because disturbances of a shared machine last less than a round.
`efficiency` is the pipelined rate over twice the rate of the same framework in one
process, median over our steps and PyTorch's rounds; the bubble of two stages and eight
microbatches in 1F1B order allows 8 / 9. Ours is measured under the same 1F1B and under
the schedule that the search finds for the layers' times as measured on both at once.
`apart` is the total rate of two processes that each train the whole model and share
only the machine: no schedule can be more efficient than that. Our head is tied to the
embedding, so that the two stages sum its gradients, and gradients are clipped; PyTorch
does neither. Prints one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from experiments.islands import models
from experiments.islands.unequal import (
    Running,
    all_busy,
    cluster_of,
    profiled,
    request_of,
)
from experiments.testbed.hosts import Host, Testbed
from hetjax.models.presets import model_preset
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import PlanRequest
from hetjax.plans.plan import Plan

MODEL = "gpt-8x512"
MICROBATCHES, MICROBATCH_SIZE = 8, 4
HOSTS = ("east", "west")
# in its first steps a process still allocates memory: 13 us a page on the machine where
# this was measured, up to half of a step's time
_WARM_UP_STEPS = 6


def torch_round(python: str, steps: int) -> dict[str, float]:
    """Run one round of PyTorch and return its rates."""
    words = [python, "-m", "experiments.benchmarks.torch_pipeline", "--rounds", "1"]
    told = subprocess.run(
        [*words, "--steps", str(steps)], check=True, capture_output=True, text=True
    )
    found = json.loads(told.stdout)
    return {
        "one": found["one_process_tokens_per_s"][0],
        "1f1b": found["pipelined_tokens_per_s"][0],
    }


def plans_of(request: PlanRequest) -> dict[str, Plan]:
    """Return plans for each process alone, and for both (1F1B and searched)."""
    model = request.model
    one, other, both = (
        models.plan_of(model, models.pipeline(model, n, MICROBATCHES, MICROBATCH_SIZE))
        for n in (HOSTS[:1], HOSTS[1:], HOSTS)
    )
    return {
        "one": one,
        "other": other,
        "1f1b": both,
        "searched": evaluate_plan(request, both, "searched").plan,
    }


def timed(*layouts: Running) -> float:
    """Return the tokens per second of a step of these at the same time."""
    all_busy(layouts, 1)
    return sum(x.tokens_per_step / median(x.step_s) for x in layouts)


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = models.preset(MODEL).config
    dataset = models.own_sources(folder, model_preset(MODEL).vocab_size)
    hosts = [Host(name=name) for name in HOSTS]
    cluster = cluster_of(hosts)
    rates: dict[str, list[dict[str, float]]] = {"hetjax": [], "torch": []}
    with Testbed(hosts, quota_less=True) as testbed, ExitStack() as ends:
        sizes, batch = [MICROBATCH_SIZE], MICROBATCHES * MICROBATCH_SIZE
        profile = profiled(testbed, cluster, MODEL, sizes, folder, "--halves")
        plans = plans_of(request_of(MODEL, cluster, profile, batch, sizes))
        running = {
            name: Running(
                plan,
                testbed,
                config,
                cluster,
                dataset,
                folder / name,
                ends,
            )
            for name, plan in plans.items()
        }
        for layout in running.values():
            layout.run(_WARM_UP_STEPS, counts=False)
        for _ in range(given.rounds):
            for _ in range(given.steps):
                ours = ("one", "1f1b", "searched")
                found = {name: timed(running[name]) for name in ours}
                found["apart"] = timed(running["one"], running["other"])
                rates["hetjax"].append(found)
            if given.torch:
                rates["torch"].append(torch_round(given.torch, given.steps))
            print(json.dumps(rates), file=sys.stderr, flush=True)
        for layout in running.values():
            layout.end()
    return {name: _told(found) for name, found in rates.items() if found} | {
        "load": os.getloadavg()[0]
    }


def _told(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return tokens per second of each round, and the median efficiency over rounds."""
    schedules = [name for name in rounds[0] if name != "one"]
    return {
        "one_process_tokens_per_s": [r["one"] for r in rounds],
        "two_processes_tokens_per_s": {s: [r[s] for r in rounds] for s in schedules},
        "efficiency": {
            s: median(r[s] / (2 * r["one"]) for r in rounds) for s in schedules
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args(arguments)
    os.environ["PJRT_NPROC"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(given, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
