# SPDX-License-Identifier: Apache-2.0
"""Tests the lower bound against many random plans that come near it.

    python -m experiments.planner.bound_fuzz [--plans 50000] [--output FILE]
    python -m experiments.planner.bound_fuzz --break links [--plans 2000]

Requests are as wide as the cluster file: several hosts per node, measured links that
differ by direction, shared trunks, up to 24 layers and as many stages. Appends a line
per request to the output, and continues an earlier output. At the end prints how much
longer than the bound plans took, and the contradictions: there must be none. With
`--break` it restores a known fault, and prints the first plan that shows it.
"""

import argparse
import json
import sys
import time
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from hetjax.planner.bound.certificate import proved
from hetjax.planner.model.request import PlanRequest
from hetjax.schedule.bound import ROUNDING
from tests.planner.bound_checks import contradictions, simulated
from tests.planner.bound_mutants import FAULTS
from tests.planner.near_plans import near_plan, proof_of
from tests.planner.wide_space import wide_request

OUTPUT = Path("experiments/results/planner_bound_fuzz.jsonl")
PER_REQUEST = 50
# upper edges of time over bound, by which plans are counted
EDGES = (1.001, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 5.0, 10.0, 100.0)


def row(seed: int) -> dict[str, Any]:
    """Compare all plans of one request with its bound."""
    start_s = time.process_time()
    request = wide_request(seed)
    proof = proof_of(request)
    certified_s = _certified_s(request) if proof.bound is not None else 0.0
    counts, wrong, over, least = [0] * (len(EDGES) + 1), [], 0, float("inf")
    for n in range(PER_REQUEST):
        predicted = simulated(proof, near_plan(Random(f"{seed} {n}"), proof))
        if predicted is None:
            over += 1
            continue
        wrong += [f"plan {n}: {told}" for told in contradictions(proof, predicted)]
        step_s = predicted.simulation.step_time_s
        if step_s < certified_s * (1 - ROUNDING):
            wrong.append(f"plan {n}: takes {step_s}, {certified_s} is proved")
        if proof.bound is not None:
            ratio = step_s / max(certified_s, proof.bound.step_s)
            counts[bisect_right(EDGES, ratio)] += 1
            least = min(least, ratio)
    nodes = request.cluster.nodes
    return {
        "seed": seed,
        "layers": len(request.model.layers),
        "devices": request.cluster.num_devices,
        "hosts": max(node.hosts for node in nodes),
        "zones": len({node.zone for node in nodes}),
        "measured": request.profile is not None,
        "tight": proof.tight,
        "over_memory": over,
        "counts": counts,
        "least": None if least == float("inf") else round(least, 6),
        "wrong": wrong,
        "cpu_s": round(time.process_time() - start_s, 2),
    }


def _certified_s(request: PlanRequest) -> float:
    """Return the bound that `plan` prints, which includes cuts of the network."""
    step_s = proved(request).step_s
    assert step_s is not None
    return step_s


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = [sum(of) for of in zip(*(row["counts"] for row in rows), strict=True)]
    kinds = Counter(
        name
        for row in rows
        for name, holds in {
            "several hosts": row["hosts"] > 1,
            "two zones": row["zones"] > 1,
            "measured": row["measured"],
            "tight memory": row["tight"],
            "more than 16 layers": row["layers"] > 16,
        }.items()
        if holds
    )
    return {
        "requests": len(rows),
        "plans_drawn": PER_REQUEST * len(rows),
        "over_memory": sum(row["over_memory"] for row in rows),
        "plans_compared": sum(counts),
        "contradictions": sum(len(row["wrong"]) for row in rows),
        "least_over_bound": min(row["least"] for row in rows if row["least"]),
        "time_over_bound": {
            f"below {edge:g}" if edge else "above": count
            for edge, count in zip((*EDGES, None), counts, strict=True)
        },
        "requests_of": dict(kinds),
        "cpu_s": round(sum(row["cpu_s"] for row in rows)),
    }


def run(output: Path, num_plans: int) -> None:
    rows = read(output)
    seen = {row["seed"] for row in rows}
    with output.open("a") as file:
        for seed in range(num_plans // PER_REQUEST):
            if seed not in seen:
                rows.append(row(seed))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
    print(json.dumps(summary(rows), indent=1))
    sys.exit(any(row["wrong"] for row in rows))


def read(output: Path) -> list[dict[str, Any]]:
    """Return the rows so far. Removes a truncated last line, whose seed runs again."""
    if not output.exists():
        return []
    lines = output.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        output.write_text("".join(lines[:-1]))
    return [json.loads(line) for line in lines if line.endswith("\n")]


def broken(name: str, num_plans: int) -> None:
    """Print the first plan that shows the fault."""
    start_s = time.process_time()
    with FAULTS[name]():
        for seed in range(num_plans // PER_REQUEST):
            wrong = row(seed)["wrong"]
            if wrong:
                cpu_s = time.process_time() - start_s
                print(f"{name}: found in request {seed}, {wrong[0]} ({cpu_s:.0f} s)")
                return
    sys.exit(f"{name}: not found in {num_plans} plans")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=50_000)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--break", dest="fault", choices=FAULTS)
    arguments = parser.parse_args()
    if arguments.fault is not None:
        broken(arguments.fault, arguments.plans)
    else:
        run(arguments.output, arguments.plans)


if __name__ == "__main__":
    main()
