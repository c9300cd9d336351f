# SPDX-License-Identifier: Apache-2.0
"""Compares the planner with every plan of small random requests, by the simulator.

    python -m experiments.planner.brute_force [--instances 200] [--first 0]

Prints one JSON object. `bound_over_optimum` must nowhere be above 1: no plan is faster
than the certified bound. `found_over_optimum` is 1 where the planner found the best
plan of all; it never exceeds 1 + `gap`, the gap that the planner reports.
"""

import argparse
import json
import math
import time
from statistics import mean, median
from typing import Any

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.search.find import find_plan
from tests.planner.whole_space import all_plans, fastest_s, random_request

ROUNDING = 1e-9
_LOCAL_WORK = 10_000


def compare(seed: int) -> dict[str, Any]:
    """Compare one instance; planner and enumeration must agree on feasibility."""
    request = random_request(seed)
    optimum_s = fastest_s(request)
    start_s = time.perf_counter()
    try:
        found = find_plan(request, local_work=_LOCAL_WORK)
    except NoFeasiblePlan:
        return {"seed": seed, "feasible": False, "agrees": math.isinf(optimum_s)}
    step_time_s = found.best.simulation.step_time_s
    assert found.lower_bound_s is not None, found.bound.why
    return {
        "seed": seed,
        "feasible": True,
        "agrees": optimum_s <= step_time_s * (1 + ROUNDING),
        "num_plans": sum(1 for _ in all_plans(request)),
        "found_over_optimum": step_time_s / optimum_s,
        "bound_over_optimum": found.lower_bound_s / optimum_s,
        "gap": found.gap,
        "search_s": round(time.perf_counter() - start_s, 3),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    solved = [row for row in rows if row["feasible"]]
    ratios = [row["found_over_optimum"] for row in solved]
    bounds = [row["bound_over_optimum"] for row in solved]
    return {
        "instances": len(rows),
        "feasible": len(solved),
        "disagreements": sum(not row["agrees"] for row in rows),
        "plans_tried": sum(row["num_plans"] for row in solved),
        "bounds_above_optimum": sum(b > 1 + ROUNDING for b in bounds),
        "outside_reported_gap": sum(
            row["found_over_optimum"] > (1 + row["gap"]) * (1 + ROUNDING)
            for row in solved
        ),
        "optimal": sum(ratio <= 1 + ROUNDING for ratio in ratios),
        "found_over_optimum": {"mean": mean(ratios), "max": max(ratios)},
        "bound_over_optimum": {
            "median": median(bounds),
            "min": min(bounds),
            "max": max(bounds),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.instances)
    rows = [compare(seed) for seed in seeds]
    print(json.dumps({"summary": summary(rows), "instances": rows}, indent=1))


if __name__ == "__main__":
    main()
