# SPDX-License-Identifier: Apache-2.0
"""Measures the simulator's time for a plan of 64 stages and 512 microbatches.

    python -m experiments.benchmarks.simulator_speed [--stages 64] [--microbatches 512]

Prints one JSON object: seconds of processor time (one core, best and median of five)
for simulating the lowered programs, and for lowering them first. The simulation runs
once with a link for every hop, and once with every stage on a node whose network card
its four streams share.
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
from hetjax.schedule.simulation.simulator import simulate


def plan_of(num_stages: int, num_microbatches: int) -> Plan:
    stages = tuple(
        Stage(
            node=f"n{s}",
            devices=(0,),
            layers=(s, s + 1),
            launch_ahead=min(num_stages - s, num_microbatches),
        )
        for s in range(num_stages)
    )
    replica = Replica(
        num_microbatches=num_microbatches, microbatch_size=1, stages=stages
    )
    return Plan(
        model="none", seq_len=1, global_batch=num_microbatches, replicas=(replica,)
    )


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
    edges = [(a, b) for a in keys for b in keys if abs(a[1] - b[1]) == 1]
    routes = {
        (a, b): Route(
            trunks=(f"{a[1]}/out", f"{b[1]}/in") if shared else (f"{a[1]}>{b[1]}",),
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
    seconds = []
    for _ in range(5):
        start_s = time.process_time()
        result = call()
        seconds.append(time.process_time() - start_s)
    return {"best": min(seconds), "median": statistics.median(seconds)}, result


def measure(num_stages: int, num_microbatches: int) -> dict[str, Any]:
    plan = plan_of(num_stages, num_microbatches)
    lowering, programs = timed(lambda: lower(plan))
    found: dict[str, Any] = {
        "stages": num_stages,
        "microbatches": num_microbatches,
        "actions": sum(map(len, programs.values())),
        "lower_s": lowering,
    }
    for name, shared in (("own_links", False), ("shared_cards", True)):
        costs = costs_of(plan, shared=shared)
        seconds, simulation = timed(lambda c=costs: simulate(programs, plan, c))
        found[f"simulate_{name}_s"] = seconds
        found[f"step_time_{name}_s"] = simulation.step_time_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    given = parser.parse_args()
    print(json.dumps(measure(given.stages, given.microbatches), indent=1))


if __name__ == "__main__":
    main()
