# SPDX-License-Identifier: Apache-2.0
"""Measures the simulator's time for a plan of equal pipelines.

    python -m experiments.benchmarks.simulator_speed
        [--replicas 5] [--stages 8] [--microbatches 64]

Prints one JSON object: milliseconds of processor time (one core, best and median of
seven) for lowering the plan to the programs of all nodes, and for one simulated step as
`plan` and `simulate` find it. The step is simulated once with a link for every hop, and
once with every stage on a node whose network card its four streams share.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from hetjax.costs.costs import Costs, Route, StageTimes
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulated import simulated


def plan_of(num_replicas: int, num_stages: int, num_microbatches: int) -> Plan:
    def stage(r: int, s: int) -> Stage:
        ahead = min(num_stages - s, num_microbatches)
        return Stage(
            node=f"n{r}.{s}", devices=(0,), layers=(s, s + 1), launch_ahead=ahead
        )

    replicas = tuple(
        Replica(
            num_microbatches=num_microbatches,
            microbatch_size=1,
            stages=tuple(stage(r, s) for s in range(num_stages)),
        )
        for r in range(num_replicas)
    )
    samples = num_replicas * num_microbatches
    return Plan(model="none", seq_len=1, global_batch=samples, replicas=replicas)


def costs_of(plan: Plan, *, shared: bool) -> Costs:
    times = StageTimes(
        forward_s=1.0,
        backward_s=2.0,
        fused_s=3.0,
        input_gradient_s=1.0,
        weight_gradient_s=1.0,
        update_s=1.0,
    )
    keys = [(r, s) for r, s, _ in plan.stages()]
    edges = [
        (a, b) for a in keys for b in keys if a[0] == b[0] and abs(a[1] - b[1]) == 1
    ]
    routes = {
        (a, b): Route(
            trunks=(f"{a}/out", f"{b}/in") if shared else (f"{a}>{b}",),
            latency_s=0.001,
        )
        for a, b in edges
    }
    return Costs(
        times=dict.fromkeys(keys, times),
        trunks={trunk: 1.0 for route in routes.values() for trunk in route.trunks},
        routes=routes,
        message_bytes=dict.fromkeys(edges, 0.3),
    )


def timed(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    times_ms = []
    for _ in range(7):
        start_s = time.process_time()
        result = call()
        times_ms.append((time.process_time() - start_s) * 1e3)
    return {"best": min(times_ms), "median": statistics.median(times_ms)}, result


def measure(
    num_replicas: int, num_stages: int, num_microbatches: int
) -> dict[str, Any]:
    plan = plan_of(num_replicas, num_stages, num_microbatches)
    lowering, programs = timed(lambda: lower(plan))
    found: dict[str, Any] = {
        "replicas": num_replicas,
        "stages": num_stages,
        "microbatches": num_microbatches,
        "actions": sum(map(len, programs.values())),
        "lower_ms": lowering,
    }
    for name, shared in (("own_links", False), ("shared_cards", True)):
        costs = costs_of(plan, shared=shared)
        times_ms, simulation = timed(lambda c=costs: simulated(plan, c))
        found[f"simulate_{name}_ms"] = times_ms
        found[f"step_time_{name}_s"] = simulation.step_time_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64)
    given = parser.parse_args()
    found = measure(given.replicas, given.stages, given.microbatches)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
